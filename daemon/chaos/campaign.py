"""Runs one campaign: injects the faults at their times, and watches the job until it has recovered from the
last one.
"""

import asyncio
from collections.abc import Callable, Sequence

from headway.daemon.chaos.fault_schedule import Strike
from headway.daemon.chaos.injector import Injector
from headway.daemon.chaos.verdict import Blow, Watcher
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.errors import ConfigError, StoreUnreachableError
from headway.daemon.records.records import TERMINAL_PHASES, Phase
from headway.daemon.view.cluster_view import ClusterView

SETTLE_S = 60.0
"""Seconds without progress after the last fault, after which the job counts as not recovering."""
ETCD_REST_S = 0.3
ACTIVE = frozenset({Phase.PREPARING, Phase.RUNNING, Phase.CHANGING, Phase.RECOVERING})

Tell = Callable[[str, Blow], None]
"""A function that is called at once with (`struck` or `recovered`, blow)."""


class Campaign:
    """A campaign; `run` once."""

    def __init__(
        self,
        session: ClusterSession,
        injector: Injector,
        *,
        job: str,
        strikes: Sequence[Strike],
        tell: Tell,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.watcher = Watcher()
        self.view = ClusterView()
        self._session = session
        self._injector = injector
        self._job = job
        self._strikes = strikes
        self._tell = tell
        self._settle_s = settle_s
        self._changed = asyncio.Event()

    async def run(self) -> Watcher:
        """Inject the faults, and wait until all are overcome, the job is over, or SETTLE_S pass without progress."""
        following = asyncio.create_task(self._follow(), name="follow the job")
        try:
            await self._until(lambda: self.watcher.phase is not None, self._settle_s)
            for strike in self._strikes:
                if await self._until(self._is_over, strike.at_s - self._injector.now_s):
                    break
                blow = await self._injector.strike(strike, self.view)
                if blow is not None:
                    self.watcher.struck(blow)
                    self._tell("struck", blow)
            await self._injector.finish()
            await self._settle()
            return self.watcher
        finally:
            following.cancel()
            await asyncio.wait({following})

    async def _settle(self) -> None:
        while self.watcher.open_blows and not self._is_over():
            if not await self._until(self._got_on(), self._settle_s):
                return

    def _got_on(self) -> Callable[[], bool]:
        """Return whether the job makes progress after now, or ends."""
        before = self.watcher.furthest_progress_s
        return lambda: self.watcher.furthest_progress_s > before or self._is_over()

    def _is_over(self) -> bool:
        return self.watcher.phase in TERMINAL_PHASES

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition on the watched job. Return False if it does not hold in time."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

    async def _follow(self) -> None:
        while True:
            views = self._session.follow()
            try:
                async for view in views:
                    self.view = view
                    if (job := view.jobs.get(self._job)) is not None:
                        for blow in self.watcher.see(job, now_s=self._injector.now_s):
                            self._tell("recovered", blow)
                    self._changed.set()
            except StoreUnreachableError:
                await asyncio.sleep(ETCD_REST_S)  # the strike's end stopped the watch
            finally:
                await views.aclose()


def choose_job(view: ClusterView, name: str | None) -> str:
    """Return the job to disturb: the named one, or the only active one. Raises ConfigError."""
    active = [job.name for job in view.jobs_in_order() if job.phase.phase in ACTIVE]
    if name is not None:
        if name not in active:
            told = f"the active ones are {', '.join(active)}" if active else "no job is active"
            raise ConfigError(f"is not active; {told}", f"job {name}")
        return name
    if len(active) != 1:
        told = (
            f"name one of {', '.join(active)}" if active else "no job is active; `headway submit JOB.toml` starts one"
        )
        raise ConfigError(told, "chaos")
    return active[0]
