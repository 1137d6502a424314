"""Owns a daemon's activities: an exception ends one attempt of one activity, and nothing else.

An activity that raises is restarted after a pause (restart_policy.py). Its traceback is logged once for each new error.
Only `InvariantLostError` passes through: daemon/base/errors.py lists its causes.
"""

import asyncio
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import structlog

from headway.daemon.base.errors import InvariantLostError, first_of, in_one_line, shortened
from headway.daemon.base.fault_points import fault_point, is_armed
from headway.daemon.base.restart_policy import HEALTHY_AFTER_S, Health

log = structlog.get_logger()

Run = Callable[[], Awaitable[None]]

CALLBACKS: Final = "callbacks"
"""Name of the code that runs in the event loop outside of any activity."""
FAULT_POLL_S: Final = 0.2
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
KEPT_S: Final = 10.0
"""Time within which a replaced plan asks again, and finds the work under way."""


class Activities:
    """Runs activities, restarts those that fail, and knows what ails this daemon."""

    def __init__(self, *, node: str = "") -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when `ailments` may have changed."""
        self._node = node
        self._health: dict[str, Health] = {}
        self._troubles: dict[str, str] = {}

    @property
    def ailments(self) -> dict[str, str]:
        """Return this daemon's ailments: activity to sentence. Empty when all is well."""
        now = time.monotonic()
        failing = {name: health.sentence for name, health in self._health.items() if health.is_ailing(now)}
        return dict(sorted((failing | self._troubles).items()))

    @property
    def num_failures(self) -> Mapping[str, int]:
        """Return how often each activity has failed since the daemon started."""
        return {name: health.num_failures for name, health in sorted(self._health.items())}

    def trouble(self, name: str, reason: str) -> None:
        """Note a condition that ails this daemon; an empty reason ends it."""
        if self._troubles.get(name, "") == reason:
            return
        if reason:
            log.error("node_ails", what=name, reason=reason)
            self._troubles[name] = shortened(reason)
        else:
            log.info("node_recovered", what=name)
            del self._troubles[name]
        self.on_change()

    async def run(self, wanted: Mapping[str, Run]) -> None:
        """Keep all activities running until cancelled. Raises InvariantLostError."""
        try:
            async with asyncio.TaskGroup() as group:
                for name, run in wanted.items():
                    group.create_task(self.keep(name, run), name=name)
        except* InvariantLostError as lost:
            raise first_of(lost) from lost

    async def keep(self, name: str, run: Run) -> None:
        """Run one activity until it returns, or until cancelled; restart it when it raises.

        Raises InvariantLostError.
        """
        while True:
            began_at = time.monotonic()
            try:
                await self._attempt(name, run)
                return
            except InvariantLostError:
                raise
            except asyncio.CancelledError as error:
                # grpc sometimes cancels calls by itself: only a task that was told to end may end by cancellation
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self._failed(name, error, began_at=began_at)
            except Exception as error:
                self._failed(name, error, began_at=began_at)
            await asyncio.sleep(max(self._health[name].resumes_at - time.monotonic(), 0.0))

    def watch_callbacks(self) -> None:
        """Log and report errors of callbacks of the running event loop, as those of activities."""
        asyncio.get_running_loop().set_exception_handler(self._callback_failed)

    async def _attempt(self, name: str, run: Run) -> None:
        """Run the activity once. In a test, a fault may strike it at any moment."""
        if not is_armed():
            await run()
            return
        running = asyncio.ensure_future(run())
        try:
            while not running.done():
                fault_point("activity", name=name, node=self._node)
                await asyncio.wait({running}, timeout=FAULT_POLL_S)
            running.result()
        finally:
            running.cancel()
            await asyncio.wait({running})

    def _failed(self, name: str, error: BaseException, *, began_at: float) -> None:
        before, now = self._health.get(name, Health()), time.monotonic()
        reason = in_one_line(error)
        health = before.failed(reason, began_at=began_at, now=now, chance=random.random())
        self._health[name] = health
        is_new = health.reason != before.reason
        log.error(
            "activity_failed",
            activity=name,
            num_failures=health.num_failures,
            restarts_in_s=round(health.resumes_at - now, 2),
            reason=health.reason,
            **({"traceback": "".join(traceback.format_exception(error))} if is_new else {}),
        )
        self.on_change()
        asyncio.get_running_loop().call_later(health.resumes_at - now + HEALTHY_AFTER_S + 1.0, self.on_change)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self._failed(CALLBACKS, error, began_at=time.monotonic())
        elif error is None:
            log.warning("event_loop_complains", reason=str(context.get("message", "")))
        else:
            loop.default_exception_handler(context)


@dataclass(slots=True)
class _Work(Generic[T]):
    task: "asyncio.Task[T]"
    num_waiting: int = 0
    ending: asyncio.TimerHandle | None = None
    is_cancelled: bool = False

    def end(self) -> None:
        self.is_cancelled = True
        self.task.cancel()


class SharedWork(Generic[K, T]):
    """At most one task for each key."""

    def __init__(self, *, kept_s: float = KEPT_S) -> None:
        """kept_s: how long work goes on for which nobody waits."""
        self._kept_s = kept_s
        self._under_way: dict[K, _Work[T]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, key: K) -> bool:
        return key in self._under_way

    async def result(self, key: K, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the running work, or of the work that begins now. A caller may be cancelled alone."""
        while (work := self._under_way.get(key)) is not None and work.is_cancelled:
            await asyncio.wait({work.task})
        if work is None:
            work = self._under_way[key] = _Work(asyncio.create_task(begin(), name=f"shared work {key}"))
            work.task.add_done_callback(lambda done: done.cancelled() or done.exception())
            work.task.add_done_callback(lambda _: self._under_way.pop(key, None))
        work.num_waiting += 1
        if work.ending is not None:
            work.ending.cancel()
        try:
            return await asyncio.shield(work.task)
        finally:
            work.num_waiting -= 1
            if not work.num_waiting and not work.task.done():
                work.ending = asyncio.get_running_loop().call_later(self._kept_s, work.end)
