"""The program begins here. A Ctrl-C counts from here on, also while the rest is imported."""

import os
import sys

from headway.daemon.base import interrupts


def main() -> None:
    """Run the program. Errors are one line on stderr; HEADWAY_DEBUG=1 shows where they were raised."""
    interrupts.begin()
    if not os.environ.get("HEADWAY_DEBUG"):
        # gRPC's core prints its errors on stderr, and we also raise them
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from headway.daemon.cli.program import run
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
