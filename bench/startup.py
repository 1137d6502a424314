"""Processor seconds of commands that people type and wait for: medians, in an empty folder and on an empty cluster.

`--cluster DIR` asks a cluster that runs. The bar: half a second for each.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

MOST_S = 0.5
ROUNDS = 9


def seconds(words: list[str], folder: str) -> float:
    """The median of the processor time that a command line takes in a folder."""
    taken = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-P", "-m", "headway.daemon.cli.main", *words]
        subprocess.run(command, capture_output=True, cwd=folder, env=environment, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(taken[1:])  # the first may compile modules


def main() -> int:
    """Print a table; return 1 if a command missed the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", help="State folder of a cluster that runs; none: commands say that there is none.")
    told = parser.parse_args()
    asks = ["--cluster", os.path.abspath(told.cluster)] if told.cluster else []  # noqa: PTH100
    lines = (["--help"], ["jbos"], ["run", "--help"], ["jobs", *asks], ["status", *asks], ["nodes", *asks])
    with tempfile.TemporaryDirectory() as folder:
        found = {" ".join(line[:2] if "--help" in line else line[:1]): seconds(line, folder) for line in lines}
    for name, taken in found.items():
        print(f"headway {name:12} {taken:.2f} s{'' if taken <= MOST_S else '  MISSED'}")
    return int(max(found.values()) > MOST_S)


if __name__ == "__main__":
    sys.exit(main())
