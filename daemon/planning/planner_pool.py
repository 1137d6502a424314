"""Where plans are computed: small ones here, large ones in a process that may run out of memory, or of time, alone."""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Final

from headway.daemon.planning.cluster_plan import ClusterPlan, PlanRefused
from headway.daemon.planning.plan_question import PlanQuestion
from headway.daemon.planning.planner import answer
from headway.daemon.planning.planning_process import MEMORY_VARIABLE, read_message, write_message

MEMORY_BYTES: Final = 2 << 30
"""For one plan, beside what the process has when it begins: a thousand layers on a hundred devices take a tenth."""
TIME_S: Final = 300.0
"""For one plan. Long before, its job counts as refused for now and others have their turn."""
MAX_PROCESSES: Final = 2
"""One for the present plan, one that is late."""
SMALL_LAYERS: Final = 128
SMALL_DEVICES: Final = 8
SMALL_MICROBATCHES: Final = 1024
"""Up to here a plan takes a few megabytes and at most some seconds: it is computed here, without a process."""


class PlanningFailedError(Exception):
    """A plan was not computed, for a reason that is not the job's."""


def is_small(question: PlanQuestion) -> bool:
    """Whether a plan is known to take little memory and time, by its sizes."""
    spec = question.spec
    return (
        spec.model.num_hidden_layers <= SMALL_LAYERS
        and len(question.seats) <= SMALL_DEVICES
        and spec.train.microbatches <= SMALL_MICROBATCHES
    )


class PlannerPool:
    """`answer` may be called from several threads; `close` ends what is under way."""

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES, time_s: float = TIME_S) -> None:
        self._memory_bytes = memory_bytes
        self._time_s = time_s
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._busy: dict[subprocess.Popen[bytes], float] = {}
        """Since when each computes."""
        self._late: set[subprocess.Popen[bytes]] = set()
        """Ended here because their time was up, until that is told."""
        self._is_closed = False

    def answer(self, question: PlanQuestion) -> ClusterPlan | PlanRefused:
        """The best plan. Raises PlanningFailedError: no memory, no time, or the process died."""
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
                raise PlanningFailedError("this daemon does not lead any more")
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
            [sys.executable, "-m", "headway.daemon.planning.planning_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **own, MEMORY_VARIABLE: str(self._memory_bytes)},
            start_new_session=True,  # Ctrl-C in a terminal is the daemon's to act on
        )

    def _end_late(self, process: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            if process not in self._busy:
                return
            self._late.add(process)
        process.kill()

    def _why(self, process: "subprocess.Popen[bytes]", question: PlanQuestion) -> str:
        if process in self._late:
            return f"no plan on {len(question.seats)} devices was found within {self._time_s:g} s"
        if process not in self._busy and not self._is_closed:
            return "the plan took so long that plans asked for later needed its place"
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return f"the planning process ended with status {process.returncode}"

    def _needs_memory(self, question: PlanQuestion) -> str:
        layers, devices = question.spec.model.num_hidden_layers, len(question.seats)
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
