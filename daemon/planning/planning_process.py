"""A process that computes plans, with a limit on its memory: `python -m headway.daemon.planning.planning_process`.

Questions and answers are pickles, each with its length in front, between a daemon and its own child. The process
imports no torch. It ends as soon as its standard input does, whatever it computes: no daemon leaves one behind.
"""

import os
import pickle
import queue
import resource
import signal
import struct
import sys
import threading
from pathlib import Path
from typing import IO, Any, Final

NICE: Final = 5
LENGTH: Final = struct.Struct("<Q")
MEMORY_VARIABLE: Final = "HEADWAY_PLANNING_BYTES"


def write_message(stream: IO[bytes], message: object) -> None:
    """Write one message. Raises OSError."""
    raw = pickle.dumps(message)
    stream.write(LENGTH.pack(len(raw)) + raw)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """Read the next message. Raises EOFError when there is none, or only part of one."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(head)
    raw = stream.read(length)
    if len(raw) < length:
        raise EOFError
    return pickle.loads(raw)


def main() -> None:
    """Answer one question after the other."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as for workers: a daemon that leaves still needs plans
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not mix with answers
    os.nice(NICE)
    from headway.daemon.planning.planner import answer

    limit_memory(int(os.environ[MEMORY_VARIABLE]))
    questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    while True:
        question = questions.get()
        try:
            reply: object = answer(question)
        except Exception as error:
            reply = error if isinstance(error, MemoryError) else RuntimeError(f"{type(error).__name__}: {error}")
        write_message(replies, reply)


def limit_memory(num_bytes: int) -> None:
    """Allow this process `num_bytes` more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _read(questions: "queue.SimpleQueue[Any]") -> None:
    """Read in a thread, so that the end of the daemon is noticed while a plan is computed."""
    try:
        while True:
            questions.put(read_message(sys.stdin.buffer))
    except BaseException:
        os._exit(0)


if __name__ == "__main__":
    main()
