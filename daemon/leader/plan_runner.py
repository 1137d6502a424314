"""Computes the plans that the leader's decisions need, in threads, so that the daemon's loop continues.

A plan of few devices takes milliseconds, and a job may stand still for it: the loop waits that long, so that one
decision follows another at once. A longer computation is left to its thread, and its end is an event among others.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final

import structlog

from headway.daemon.base.errors import in_one_line
from headway.daemon.decide.plans import Outcome, PlanCache, PlanRequest, Purpose
from headway.daemon.plan.plan_question import PlanQuestion
from headway.daemon.plan.planner import PlanRefused, answer
from headway.daemon.plan.planner_pool import PlanningFailedError

AT_ONCE_S: Final = 0.05
"""Maximum time for which the loop may stand still for all plans of one decision."""
PLAN_DEADLINE_S: Final = 60.0
"""Deadline of one plan. After it the job has no plan for now, and others have their turn."""
RETRY_S: Final = 60.0
"""Pause after a plan could not be computed; doubles with each further failure, up to LONGEST_RETRY_S."""
LONGEST_RETRY_S: Final = 3600.0

_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class _Work:
    """A plan that is being computed."""

    request: PlanRequest
    began_at: float
    done: asyncio.Future[Outcome]
    is_late: bool = False


@dataclass(slots=True)
class _Failure:
    """A plan that could not be computed, and when to retry if nothing changes before."""

    num: int = 0
    retry_at: float = 0.0
    request: PlanRequest | None = None
    """The request; None: it has been repeated."""


class PlanRunner:
    """The plan runner of one leader: `take_up` requests, wait for `under_way`, `collect`, decide again.

    Threads cannot be ended. When leadership is lost, the runner is discarded and late results are ignored.
    """

    def __init__(
        self,
        cache: PlanCache,
        *,
        compute: Callable[[PlanQuestion], Outcome] = answer,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = PLAN_DEADLINE_S,
    ) -> None:
        self._cache = cache
        self._compute = compute
        self._clock = clock
        self._deadline_s = deadline_s
        self._work: list[_Work] = []
        self._failures: dict[tuple[str, Purpose], _Failure] = {}
        self._num_begun = 0
        self._begun: dict[tuple[str, Purpose], int] = {}
        """Which computation was the last one for a plan."""

    @property
    def under_way(self) -> tuple[asyncio.Future[Outcome], ...]:
        """Return the computations to wait for, until `wake_at`."""
        return tuple(work.done for work in self._work)

    @property
    def wake_at(self) -> float | None:
        """Return when a plan is late, or a failed one is retried, by the clock; None: never."""
        late = [work.began_at + self._deadline_s for work in self._work if not work.is_late]
        again = [failure.retry_at for failure in self._failures.values() if failure.request is not None]
        return min([*late, *again], default=None)

    def collect(self) -> None:
        """Store results that are done or late. An error of the planner becomes a refused plan of that job."""
        for work in [work for work in self._work if work.done.done()]:
            self._work.remove(work)
            self._cache.answered(work.request, self._outcome(work.request, work.done.result))
            _log.info("plan_computed", **_names(work.request), seconds=round(self._clock() - work.began_at, 3))
        self._failures = {key: failure for key, failure in self._failures.items() if self._cache.knows(*key)}
        self._begun = {key: number for key, number in self._begun.items() if self._cache.knows(*key)}
        for failure in self._failures.values():
            if failure.request is not None and self._clock() >= failure.retry_at:
                self._cache.forget(failure.request)
                failure.request = None
        for work in self._work:
            if not work.is_late and self._clock() >= work.began_at + self._deadline_s:
                work.is_late = True
                names = _names(work.request)
                reason = f"no plan on {names['num_devices']} devices was found within {self._deadline_s:g} s"
                self._cache.answered(work.request, PlanRefused(reason=reason))
                _log.error("plan_late", **names, deadline_s=self._deadline_s)

    def take_up(self, missing: Sequence[PlanRequest], stale: Sequence[PlanRequest] = (), *, until: float) -> bool:
        """Start the first missing plan, if none is being computed. Return whether the plan is already available.

        stale: plans that are there, of older measurements. If none is missing, the one that was computed least recently
        is next: measurements that never cease would otherwise leave all others as they are.
        until: the end of the wait for it, at most `AT_ONCE_S`, by the clock.

        """
        late = [work.request for work in self._work]
        in_turn = sorted(stale, key=lambda request: self._begun.get((request.job, request.purpose), 0))
        request = next((request for request in (*missing, *in_turn) if request not in late), None)
        if request is None or any(not work.is_late for work in self._work):
            return False
        self._num_begun += 1
        self._begun[request.job, request.purpose] = self._num_begun
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()
        began_at = self._clock()

        def work() -> None:
            try:
                future.set_result(self._compute(request.question))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name=f"plan of {request.job}", daemon=True).start()
        if not wait([future], timeout=min(max(until - began_at, 0.0), AT_ONCE_S)).done:
            done = asyncio.wrap_future(future)
            self._work.append(_Work(request=request, began_at=began_at, done=done))
            return False
        self._cache.answered(request, self._outcome(request, future.result))
        return True

    def _outcome(self, request: PlanRequest, result: Callable[[], Outcome]) -> Outcome:
        """Return the planner's answer. A failure becomes a refused plan of that job, and is retried later."""
        key = (request.job, request.purpose)
        try:
            outcome = result()
        except Exception as error:
            is_told = isinstance(error, PlanningFailedError)
            reason = str(error) if is_told else f"the planner failed: {in_one_line(error)}"
            failure = self._failures.setdefault(key, _Failure())
            pause_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(failure.num, 30))
            failure.num, failure.retry_at, failure.request = failure.num + 1, self._clock() + pause_s, request
            told = {} if is_told else {"exc_info": error}
            _log.error("plan_failed", **_names(request), reason=reason, retry_in_s=pause_s, **told)
            return PlanRefused(reason=reason)
        self._failures.pop(key, None)
        return outcome


def _names(request: PlanRequest) -> dict[str, object]:
    """Return the names for the log."""
    return {"job": request.job, "purpose": request.purpose.value, "num_devices": len(request.question.slots)}
