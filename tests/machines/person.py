"""`python person.py`, inside a machine: runs each line of its input, a list of words in JSON, as a `headway` command.

Each command is a fork of this process, which has imported what commands need: five machines on two cores have no time
to spare for imports. Answers with [exit code, what was printed].
"""

import importlib
import json
import os
import pkgutil
import signal
import sys
import tempfile
import traceback

import headway.daemon.cli
import headway.daemon.client
import headway.daemon.local.reference_loop  # and with it torch
from headway.daemon.cli.program import run

LIMIT_S = 240


def main() -> None:
    """Run until the standard input ends."""
    for package in (headway.daemon.client, headway.daemon.cli):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


def answer(arguments: list[str]) -> tuple[int, str]:
    """Return the result of one command line."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            _become(arguments, output.fileno())
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


def _become(arguments: list[str], output: int) -> None:
    """Run in the fork; never return."""
    code = 1
    try:
        signal.alarm(LIMIT_S)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = run(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
