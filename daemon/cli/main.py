"""The program begins here. A Ctrl-C counts from here on, also while the rest is imported."""

import os
import sys

from headway.daemon.base import interrupts

_NUM_STREAMS = 3


def main() -> None:
    """Run the program. Errors are one line on stderr; HEADWAY_DEBUG=1 shows where they were raised."""
    interrupts.begin()
    _open_closed_streams()
    if not os.environ.get("HEADWAY_DEBUG"):
        # gRPC's core prints its errors on stderr, and we also raise them
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from headway.daemon.cli.program import run
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Send to nowhere what the caller has closed: no file of ours may get the number of such a stream."""
    while (number := os.open(os.devnull, os.O_RDWR)) < _NUM_STREAMS:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))


if __name__ == "__main__":
    main()
