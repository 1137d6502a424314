"""Owns a daemon's activities: an exception ends one attempt of one activity, and nothing else.

An activity that raises is restarted after a pause (restart_policy.py). Its traceback is logged once for each new error.
Only `InvariantLostError` passes through: daemon/errors.py lists its causes.
"""

import asyncio
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import structlog

from headway.daemon.errors import InvariantLostError, first_of, in_one_line, shortened
from headway.daemon.fault_points import fault_point, is_armed
from headway.daemon.runtime.restart_policy import HEALTHY_AFTER_S, Health

log = structlog.get_logger()

Run = Callable[[], Awaitable[None]]

CALLBACKS: Final = "callbacks"
"""Name of the code that runs in the event loop outside of any activity."""
FAULT_POLL_S: Final = 0.2


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
