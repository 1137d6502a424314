"""`python -m headway.daemon.worker`: the process that computes one stage on one device. Started by the supervisor.

The main thread goes from goal to goal; a loop thread talks to the daemon and to neighbouring stages. The process
ends by an error, by its goal, or with its daemon: the kernel kills it when its parent dies, and it ends itself when its
stream to the daemon ends.
"""

import faulthandler
import os
import signal
import sys
import traceback

import msgspec

from headway.daemon.base.own_process import die_with_parent
from headway.daemon.worker.process import WorkerOptions, leave_error


def main() -> None:
    """Run the process."""
    die_with_parent()
    # A terminal's Ctrl-C and a batch system's SIGTERM reach all processes, and only the daemon decides. Compilers,
    # which the worker may start, would inherit that a signal is ignored, and could not be ended by SIGTERM any more.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    faulthandler.enable()
    try:
        from headway.daemon.worker.run import work  # torch takes seconds: the kernel knows our parent before that

        work(msgspec.json.decode(sys.argv[1], type=WorkerOptions))
    except Exception as error:
        leave_error(error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: threads inside a communicator would crash the interpreter's end


if __name__ == "__main__":
    main()
