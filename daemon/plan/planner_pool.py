"""Computes plans: small ones in this process, large ones in another that may run out of memory or time alone.

The other is `python -m headway.daemon.plan.planner_pool`. Questions and answers are pickles, each with its length
in front, between a daemon and its own child. The process imports no torch. It ends as soon as its standard input does,
whatever it computes: no daemon leaves one behind.
"""

import os
import pickle
import queue
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from headway.daemon.plan.cluster_plan import ClusterPlan, PlanRefused
from headway.daemon.plan.plan_question import PlanQuestion
from headway.daemon.plan.planner import answer

MEMORY_BYTES: Final = 2 << 30
"""Memory for one plan, in addition to the process's own: a thousand layers on a hundred devices take a tenth of it."""
TIME_S: Final = 300.0
"""Time for one plan. Its job counts as refused long before that, and others have their turn."""
MAX_PROCESSES: Final = 2
"""Maximum number of processes: one for the present plan, one that is late."""
SMALL_LAYERS: Final = 128
SMALL_DEVICES: Final = 8
SMALL_MICROBATCHES: Final = 1024
"""Up to this number, a plan takes a few megabytes and some seconds at most: it is computed in this process."""


class PlanningFailedError(Exception):
    """A plan was not computed, for a reason that does not concern the job."""


def is_small(question: PlanQuestion) -> bool:
    """Return whether a plan is known to take little memory and time, by its sizes."""
    spec = question.spec
    return (
        spec.model.num_hidden_layers <= SMALL_LAYERS
        and len(question.slots) <= SMALL_DEVICES
        and spec.train.microbatches <= SMALL_MICROBATCHES
    )


class PlannerPool:
    """`answer` may be called from several threads; `close` ends running computations."""

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES, time_s: float = TIME_S) -> None:
        self._memory_bytes = memory_bytes
        self._time_s = time_s
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._busy: dict[subprocess.Popen[bytes], float] = {}
        """Start time of each computation."""
        self._late: set[subprocess.Popen[bytes]] = set()
        """Computations that were ended because their time was up, until that is reported."""
        self._is_closed = False

    def answer(self, question: PlanQuestion) -> ClusterPlan | PlanRefused:
        """Return the best plan. Raises PlanningFailedError: no memory, no time, or the process died."""
        return answer(question) if is_small(question) else self._in_process(question)

    def close(self) -> None:
        """Kill every process."""
        with self._lock:
            self._is_closed = True
            processes = [*self._idle, *self._busy]
            self._idle.clear()
        for process in processes:
            _end(process)

    def _in_process(self, question: PlanQuestion) -> ClusterPlan | PlanRefused:
        process = self._take()
        timer = threading.Timer(self._time_s, self._end_late, [process])
        timer.daemon = True
        timer.start()
        reply: object = None
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            write_message(process.stdin, question)
            reply = read_message(process.stdout)
        except (OSError, EOFError) as error:
            raise PlanningFailedError(self._why(process, question)) from error
        finally:
            timer.cancel()
            self._give_back(process, is_usable=isinstance(reply, ClusterPlan | PlanRefused))
        if isinstance(reply, ClusterPlan | PlanRefused):
            return reply
        if isinstance(reply, MemoryError):
            raise PlanningFailedError(self._needs_memory(question))
        raise PlanningFailedError(f"the planner failed: {reply}")

    def _take(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._is_closed:
                raise PlanningFailedError("this daemon no longer leads")
            while len(self._busy) >= MAX_PROCESSES:
                oldest = min(self._busy, key=lambda process: self._busy[process])
                oldest.kill()
                del self._busy[oldest]
            process = next((process for process in self._idle if process.poll() is None), None)
            if process is None:
                process = self._spawn()
            else:
                self._idle.remove(process)
            self._busy[process] = time.monotonic()
            return process

    def _give_back(self, process: "subprocess.Popen[bytes]", *, is_usable: bool) -> None:
        with self._lock:
            self._late.discard(process)
            was_ours = self._busy.pop(process, None) is not None
            if is_usable and was_ours and not self._is_closed:
                self._idle.append(process)
                return
        _end(process)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        own = {"PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "NOTIFY_SOCKET": ""}
        return subprocess.Popen(
            [sys.executable, "-m", "headway.daemon.plan.planner_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **own, MEMORY_VARIABLE: str(self._memory_bytes)},
            start_new_session=True,  # the daemon handles Ctrl-C in a terminal
        )

    def _end_late(self, process: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            if process not in self._busy:
                return
            self._late.add(process)
        process.kill()

    def _why(self, process: "subprocess.Popen[bytes]", question: PlanQuestion) -> str:
        if process in self._late:
            return f"no plan on {len(question.slots)} devices was found within {self._time_s:g} s"
        if process not in self._busy and not self._is_closed:
            return "the plan took so long that later plans needed its place"
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return f"the planning process ended with status {process.returncode}"

    def _needs_memory(self, question: PlanQuestion) -> str:
        layers, devices = question.spec.model.num_hidden_layers, len(question.slots)
        return (
            f"a plan of {layers} layers on {devices} devices takes more than {self._memory_bytes >> 20} MiB of memory"
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


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
