"""Deletes what nobody needs any more: the leader's work. Checkpoints that were never completed; the oldest ended jobs.

A write that was given up may end later, and leave a file where the leader no longer looks. The daemon that made the
write looks there itself, as leader or not. A stale folder stays stale, so two daemons may both delete it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.base.errors import ConfigError, ConflictError, RecoveryError, StoreError
from headway.daemon.blobs.checkpoint import (
    delete_checkpoint,
    delete_part,
    list_boundaries,
    list_parts,
    resolve_checkpoint_dir,
)
from headway.daemon.blobs.checkpoint_names import JOURNAL_PARTS, PartFile, folder_name, submission_url
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import RetiredRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.lineage import Lineage
from headway.daemon.cluster.records import CheckpointRecord, Phase
from headway.daemon.cluster.transaction import Compare, Delete, Put
from headway.daemon.decide.boundaries import age, lineage_of
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView, Place
from headway.daemon.decide.retirement import jobs_to_retire, names_to_forget, retired_record

_log = structlog.get_logger()


OVER: Final = frozenset({Phase.FINISHED, Phase.CANCELLED})
"""Final phases: no row leads out of them."""


@dataclass(frozen=True, slots=True)
class BoundaryFolder:
    """One boundary's folder of a submission in durable storage."""

    timeline: int
    boundary: int
    has_manifest: bool

    @property
    def place(self) -> Place:
        """The place as (timeline, boundary)."""
        return self.timeline, self.boundary


def stale_checkpoints(view: ClusterView, job: JobView, found: Iterable[BoundaryFolder]) -> list[BoundaryFolder]:
    """Return a job's folders that may be deleted.

    A stale folder stays stale: pasts only lose boundaries of older timelines, and checkpoints only get newer. So a view
    that lags behind names no folder that a present or later plan could complete or load from.
    """
    if job.submission is None or not job.submission.uid:
        return []  # without the submission's id, the folder may also belong to another job
    named = [url for other in view.jobs.values() for url in _named_by(other)]
    own = f"{job.name}/{job.submission.uid}"
    return [
        folder
        for folder in found
        if _is_stale(job, folder) and not any(url.endswith(f"{own}/{folder_name(*folder.place)}") for url in named)
    ]


def stale_parts(view: ClusterView, job: JobView, found: Iterable[PartFile]) -> list[PartFile]:
    """Return the files of a job's journal parts that may be deleted: no record names them, and no checkpoint will.

    Each checkpoint names the parts of the one before it, so the newest one names all that any checkpoint needs. All of
    these were whole before its record. So a partial file of such a part is of no use, whoever may still write to it.
    """
    if job.submission is None or not job.submission.uid:
        return []
    checkpoints = [other.checkpoint for other in view.jobs.values() if other.checkpoint is not None]
    named = {part.place for checkpoint in checkpoints for part in checkpoint.journal_parts}
    own = _own_checkpoint(job)
    whole = {part.place for part in own.journal_parts} if own is not None else frozenset()
    return [
        file
        for file in found
        if (file.place in whole and not file.is_whole) or (file.place not in named and _is_part_stale(job, file.place))
    ]


def _is_part_stale(job: JobView, place: Place) -> bool:
    return _is_stale(job, BoundaryFolder(*place, has_manifest=False)) or age(place) == _newest(job)


def _named_by(job: JobView) -> tuple[str, ...]:
    """Return the checkpoints from which a job may start; some may belong to another job, at other addresses."""
    checkpoint = job.checkpoint
    return tuple(url.rstrip("/") for url in (checkpoint.url, *checkpoint.earlier)) if checkpoint is not None else ()


def _is_stale(job: JobView, folder: BoundaryFolder) -> bool:
    checkpoint = _own_checkpoint(job)
    past = lineage_of(job)
    if past is None and checkpoint is not None:
        past = Lineage(timeline=checkpoint.timeline, ancestry=checkpoint.ancestry)
    if past is None or folder.timeline > past.timeline:
        return False  # as far as this daemon knows, nothing has run yet
    if not past.has(*folder.place):
        return True
    return age(folder.place) < _newest(job) or (job.phase.phase in OVER and not folder.has_manifest)


def _own_checkpoint(job: JobView) -> CheckpointRecord | None:
    """Return the job's newest checkpoint, unless another job wrote it."""
    return job.checkpoint if job.checkpoint is not None and not job.checkpoint.origin_job else None


def _newest(job: JobView) -> tuple[int, int]:
    """Return the age of the job's newest checkpoint."""
    checkpoint = _own_checkpoint(job)
    return age((checkpoint.timeline, checkpoint.boundary)) if checkpoint is not None else (-1, -1)


SWEEP_PERIOD_S: Final = 120.0
TIMEOUT_S: Final = 60.0
NUM_LOOKS: Final = 2
"""Number of looks at a job without a plan: a copy that was on its way may end after the first look."""


class CheckpointSweep:
    """The sweep of one daemon; it acts while the daemon leads."""

    def __init__(self, view: ClusterView, *, is_leading: Callable[[], bool], checkpoint_root: Path | None) -> None:
        self._view = view
        self._is_leading = is_leading
        self._checkpoint_root = checkpoint_root
        self._threads = FileThreads("checkpoint sweep", num_at_once=1, silence_s=TIMEOUT_S, most_hung=1)
        self._looks: dict[str, tuple[int, int]] = {}
        """For each job the revision of its phase, and the number of looks since then that found nothing."""
        self._complaints: dict[str, str] = {}
        self._written_late: set[str] = set()
        """Jobs to whose folder this daemon finished a write after the write was given up."""
        self._is_written_late = asyncio.Event()

    def wrote_late(self, job: str) -> None:
        """Note that a write into a job's folder ended after it was given up: its files may be stale."""
        self._written_late.add(job)
        self._is_written_late.set()

    async def run(self) -> None:
        """Sweep until cancelled."""
        clock = asyncio.get_running_loop().time
        all_due_at = clock() + SWEEP_PERIOD_S
        while True:
            names: Iterable[str] | None = None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(all_due_at):
                    await self._is_written_late.wait()
                    names = set(self._written_late)
            if clock() >= all_due_at:  # late writes may wake this loop often
                names, all_due_at = None, clock() + SWEEP_PERIOD_S
            self._is_written_late.clear()
            await self.sweep(names)

    async def sweep(self, names: Iterable[str] | None = None) -> None:
        """Sweep these jobs, or all, once."""
        self._looks = {name: looks for name, looks in self._looks.items() if name in self._view.jobs}
        self._complaints = {name: reason for name, reason in self._complaints.items() if name in self._view.jobs}
        self._written_late &= self._view.jobs.keys()
        for name in sorted(self._view.jobs if names is None else names):
            job = self._view.jobs.get(name)
            if job is None or self._is_done_with(job):
                continue
            is_late = name in self._written_late
            self._written_late.discard(name)
            try:
                num_left = await self._sweep_job(job, is_late=is_late)
                self._complaints.pop(name, None)
            except (RecoveryError, ConfigError) as error:
                self._written_late |= {name} if is_late else set()
                if self._complaints.get(name) != str(error):
                    self._complaints[name] = str(error)
                    _log.warning("checkpoint_sweep_failed", job=name, reason=str(error))
                continue
            revision, looks = self._revision(job), self._looks.get(name, (0, 0))
            self._looks[name] = (revision, 0 if num_left or looks[0] != revision else looks[1] + 1)

    async def _sweep_job(self, job: JobView, *, is_late: bool) -> int:
        """Sweep one job; return the number of folders deleted."""
        submission = job.submission
        if submission is None or not submission.uid:
            return 0
        url = submission_url(submission.spec.fault.checkpoint_dir, job.name, uid=submission.uid)
        url = resolve_checkpoint_dir(url, self._checkpoint_root)
        found = [BoundaryFolder(*entry) for entry in await self._threads.run(url, lambda _: list_boundaries(url))]
        num_deleted = 0
        for folder in stale_checkpoints(self._view, job, found):
            now = self._view.jobs.get(job.name)
            if now is None or now.submission != submission or not self._may_act(is_late=is_late):
                break
            if not stale_checkpoints(self._view, now, [folder]):
                continue
            target = f"{url}/{folder_name(*folder.place)}"
            await self._delete(target)
            _log.info("left_folder_deleted", job=job.name, url=target)
            num_deleted += 1
        return num_deleted + await self._sweep_parts(job, url, is_late=is_late)

    async def _sweep_parts(self, job: JobView, url: str, *, is_late: bool) -> int:
        """Delete files of journal parts of a submission's folder that no checkpoint needs; return their number."""
        folder = f"{url}/{JOURNAL_PARTS}"
        num_deleted = 0
        for file in stale_parts(self._view, job, await self._threads.run(folder, lambda _: list_parts(folder))):
            now = self._view.jobs.get(job.name)
            if now is None or now.submission != job.submission or not self._may_act(is_late=is_late):
                break
            if stale_parts(self._view, now, [file]):
                await self._delete_part(folder, file)
                _log.info("left_part_deleted", job=job.name, url=folder, place=file.place)
                num_deleted += 1
        return num_deleted

    async def _delete(self, url: str) -> None:
        await self._threads.run(url, lambda _: delete_checkpoint(url))

    async def _delete_part(self, folder: str, file: PartFile) -> None:
        await self._threads.run(folder, lambda _: delete_part(folder, file.name))

    def _may_act(self, *, is_late: bool) -> bool:
        return (is_late or self._is_leading()) and self._view.steady_since is not None

    def _is_done_with(self, job: JobView) -> bool:
        is_late = job.name in self._written_late
        is_still = job.plan is None and job.next is None and not is_late
        revision, num_looks = self._looks.get(job.name, (0, 0))
        is_settled = is_still and revision == self._revision(job) and num_looks >= NUM_LOOKS
        return is_settled or not self._may_act(is_late=is_late)

    def _revision(self, job: JobView) -> int:
        return self._view.revision_of(Keys.of(job.name, "phase"))


RETIREMENT_PERIOD_S: Final = 60.0
AT_ONCE: Final = 20
"""Maximum number of jobs that are retired in one look, so that a long list is no burst of changes for every daemon."""


class JobRetirement:
    """The retirement of very many ended jobs by one daemon; it acts while the daemon leads."""

    def __init__(
        self,
        etcd: EtcdClient,
        view: ClusterView,
        *,
        is_leading: Callable[[], bool],
        most: int,
        period_s: float = RETIREMENT_PERIOD_S,
    ) -> None:
        """most: as in `jobs_to_retire`."""
        self._etcd = etcd
        self._view = view
        self._is_leading = is_leading
        self._most = most
        self._period_s = period_s

    async def run(self) -> None:
        """Retire until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.look()

    async def look(self) -> None:
        """Retire what is due now. What etcd does not take is due at the next look."""
        view = self._view
        if view.steady_since is None or not self._is_leading():
            return
        try:
            jobs = jobs_to_retire(view, most=self._most)[:AT_ONCE]
            forgotten = [Keys.retired(name) for name in names_to_forget(view)[:AT_ONCE]]
            # With the list come the revisions that it rests on: a job may be resumed while others are retired.
            retirements = [_Retirement.of(job, view, now=time.time()) for job in jobs]
            known = [Compare.unchanged(key, view.revision_of(key)) for key in forgotten]
            for each in retirements:
                await self._etcd.transaction(each.compare, each.changes)
                _log.info("job_retired", job=each.job, phase=each.record.phase, checkpoint=each.record.checkpoint)
            for key, unchanged in zip(forgotten, known, strict=True):
                await self._etcd.transaction([unchanged], [Delete(key)])
        except ConflictError as error:
            _log.info("retirement_overtaken", keys=error.target)
        except StoreError as error:
            _log.warning("job_not_retired", reason=str(error))


@dataclass(frozen=True, slots=True)
class _Retirement:
    """One record in place of all of a job's, unless anything about it has changed, or another daemon leads."""

    job: str
    record: RetiredRecord
    compare: tuple[Compare, ...]
    changes: tuple[Put | Delete, ...]

    @classmethod
    def of(cls, job: JobView, view: ClusterView, *, now: float) -> "_Retirement":
        """Return the retirement of a job as it is in the view."""
        told = [Keys.of(job.name, leaf) for leaf in ("spec", "desired", "phase", "plan", "next", "checkpoint")]
        record = retired_record(view, job, now=now)
        return cls(
            job.name,
            record,
            tuple(Compare.unchanged(key, view.revision_of(key)) for key in (*told, Keys.LEADER)),
            (Put(Keys.retired(job.name), encode(record)), Delete(Keys.job(job.name), is_prefix=True)),
        )
