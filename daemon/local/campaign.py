"""Runs one campaign: injects the faults at their times, and watches until the job has recovered from the last one.

A fault is overcome when the job progresses again: in a new generation if the fault took one of the plan's workers,
otherwise in the present generation.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.daemon.base.errors import ConfigError, StoreUnreachableError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.cluster.records import TERMINAL_PHASES, Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.local.fault_schedule import Blow, Strike
from headway.daemon.local.injector import Injector

SETTLE_S = 60.0
"""Seconds without progress after the last fault, after which the job counts as not recovering."""
ETCD_REST_S = 0.3
ACTIVE = frozenset({Phase.PREPARING, Phase.RUNNING, Phase.CHANGING, Phase.RECOVERING})


@dataclass(slots=True)
class Watcher:
    """Watches the job's records."""

    blows: list[Blow] = field(default_factory=list)
    generation: int = 0
    batch: int = -1
    furthest_progress_s: float = 0.0
    """Time at which the job was last seen to progress."""
    phase: Phase | None = None
    reason: str = ""

    def struck(self, blow: Blow) -> None:
        """Record that a fault was injected just now."""
        blow.generation, blow.batch = self.generation, self.batch
        self.blows.append(blow)

    def see(self, job: JobView, *, now_s: float) -> list[Blow]:
        """Look at the job; return the faults that are overcome by now."""
        self.phase, self.reason = job.phase.phase, job.phase.reason
        if job.progress is not None and (job.progress.generation, job.progress.batch) > (self.generation, self.batch):
            self.generation, self.batch = job.progress.generation, job.progress.batch
            self.furthest_progress_s = now_s
        overcome = [blow for blow in self.blows if blow.recovered_s is None and self._is_overcome(blow, now_s)]
        for blow in overcome:
            blow.recovered_s = now_s
            if self.generation > blow.generation:
                blow.new_generation = self.generation
                is_counted = any(other.new_generation == self.generation for other in self.blows if other is not blow)
                if job.plan is not None and job.plan.generation == self.generation and not is_counted:
                    blow.recomputed = max(0, job.plan.furthest - job.plan.boundary)
        return overcome

    def _is_overcome(self, blow: Blow, now_s: float) -> bool:
        if self.phase is Phase.FINISHED or self.generation > blow.generation:
            return True
        is_over = blow.until_s is not None and self.furthest_progress_s > blow.until_s
        return is_over and not blow.takes_worker and self.batch > blow.batch and now_s > blow.at_s

    @property
    def open_blows(self) -> list[Blow]:
        """Return the faults that are not overcome yet."""
        return [blow for blow in self.blows if blow.recovered_s is None]

    @property
    def failures(self) -> tuple[str, ...]:
        """Return why the cluster did not hold; empty: every fault was overcome."""
        found = []
        if self.phase is None:
            found.append("the job was never seen")
        elif self.phase in TERMINAL_PHASES - {Phase.FINISHED}:
            found.append(f"the job is {self.phase.value}: {self.reason}")
        for blow in self.open_blows:
            found.append(f"fault {blow.number} ({blow.kind}, {blow.target}): no progress was seen after it")
        return tuple(found)


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
