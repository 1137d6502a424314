"""Finds out whether this node can use the checkpoint folders of its jobs, before a step needs them.

If credentials or a package are missing, other nodes read and write the job's checkpoints instead.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.errors import ConfigError, NoAccessError, RecoveryError
from headway.daemon.jobs.places import is_store
from headway.daemon.storage.checkpoint import probe, resolve_checkpoint_dir
from headway.daemon.storage.file_system import file_system_of
from headway.daemon.storage.file_threads import FileThreads
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView

log = structlog.get_logger()

LOOK_S: Final = 1.0
AGAIN_S: Final = 60.0
"""Pause before an unusable folder is tried again."""
MOST_AT_ONCE: Final = 8
"""Maximum number of file systems checked at once; those that have waited longest come first."""


class CheckpointAccess:
    """Which folders in stores this node can use. A folder in the tree of files is the same for all processes."""

    def __init__(self, *, node: str, view: ClusterView, checkpoint_root: Path | None) -> None:
        self._node = node
        self._view = view
        self._checkpoint_root = checkpoint_root
        self._threads = FileThreads("access to checkpoint folders", silence_s=30.0, most_hung=1)
        self._looked_at: dict[str, float] = {}
        """Time of each job's next check."""
        self._under_way: set[str] = set()
        """File systems that are being checked. One that hangs delays no report about another."""
        self.lacking: dict[str, str] = {}
        """Reason why a job's folder cannot be used here, by job."""
        self.on_change: Callable[[], None] = lambda: None

    def lacks(self, job: str, error: NoAccessError) -> None:
        """Record that a file could not be read or written because access is missing."""
        if job not in self.lacking:
            log.warning("no_access_to_checkpoints", job=job, reason=str(error))
            self.lacking[job] = str(error)
            self._looked_at[job] = time.monotonic() + AGAIN_S
            self.on_change()

    async def run(self) -> None:
        """Check the folder of each job whose plan names this node, until cancelled."""
        self._under_way.clear()  # a check that was cancelled before its first step has not removed itself
        async with asyncio.TaskGroup() as looks:
            while True:
                for file_system, jobs in self._due().items():
                    if len(self._under_way) < MOST_AT_ONCE:
                        self._under_way.add(file_system)
                        looks.create_task(self._look_at(file_system, jobs), name=f"access to {file_system}")
                self._forget_jobs_that_are_gone()
                await asyncio.sleep(LOOK_S)

    def _due(self) -> dict[str, list[JobView]]:
        """Return the due jobs of each idle file system, the one that has waited longest first."""
        due: defaultdict[str, list[JobView]] = defaultdict(list)
        for job in sorted(self._view.jobs.values(), key=lambda job: self._looked_at.get(job.name, 0.0)):
            if self._is_due(job):
                assert job.spec is not None, "asked by _is_due"
                due[file_system_of(job.spec.fault.checkpoint_dir)].append(job)
        return {file_system: jobs for file_system, jobs in due.items() if file_system not in self._under_way}

    async def _look_at(self, file_system: str, jobs: Iterable[JobView]) -> None:
        try:
            for job in jobs:
                await self._look(job.name, job)
        finally:
            self._under_way.discard(file_system)

    def _is_due(self, job: JobView) -> bool:
        plans = [plan for plan in (job.plan, job.next) if plan is not None]
        is_named = any(stage.node == self._node for plan in plans for stage in plan.workers)
        needs_access = job.spec is not None and is_store(job.spec.fault.checkpoint_dir)
        return is_named and needs_access and time.monotonic() >= self._looked_at.get(job.name, 0.0)

    async def _look(self, name: str, job: JobView) -> None:
        assert job.spec is not None, "asked by _is_due"
        self._looked_at[name] = time.monotonic() + AGAIN_S
        try:
            url = resolve_checkpoint_dir(job.spec.fault.checkpoint_dir, self._checkpoint_root)
            await self._threads.run(url, lambda _: probe(url))
        except NoAccessError as error:
            self.lacks(name, error)
        except (RecoveryError, ConfigError) as error:
            # a step that needs the folder reports the error
            log.info("checkpoint_folder_not_reached", job=name, reason=str(error))
        else:
            self._looked_at[name] = float("inf")
            if self.lacking.pop(name, None) is not None:
                self.on_change()

    def _forget_jobs_that_are_gone(self) -> None:
        for name in self._looked_at.keys() - self._view.jobs.keys():
            del self._looked_at[name]
            self.lacking.pop(name, None)
