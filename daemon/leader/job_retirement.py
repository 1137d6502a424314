"""Retires jobs that ended long ago: the leader's work. view/retirement.py decides which.

The node's state folder keeps for how long its daemons have seen jobs ended: a restart loses an hour at most. The file
has seconds of steady clocks and no date, so that a wrong date of any machine retires nothing.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from headway.daemon.base.errors import ConflictError, RecoveryError, StoreError
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import RetiredRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.transaction import Compare, Delete, Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.retirement import EndingsSeen, jobs_to_retire, names_to_forget, retired_record
from headway.stages.durable import make_durable

_log = structlog.get_logger()


KEPT_EVERY_S: Final = 3600.0


class EndedAges:
    """The file of one node."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = FileThreads("ended jobs", num_at_once=1, most_hung=1)
        self._kept_at = 0.0

    def read(self) -> dict[str, float]:
        """Return seconds by end of a job; empty if the file is missing or damaged. Blocks."""
        try:
            ages = msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("ended_ages_not_read", path=str(self._path), reason=str(error))
            return {}
        return {ending: age for ending, age in ages.items() if 0.0 <= age < math.inf}

    async def keep(self, ages: Mapping[str, float], *, now: float) -> None:
        """Write them if that is due. now: seconds of a monotonic clock. A disk that refuses is asked again later."""
        if not self._kept_at:
            self._kept_at = now
        if now < self._kept_at + KEPT_EVERY_S:
            return
        self._kept_at = now

        def write(_: Beat) -> None:
            draft = self._path.with_suffix(".draft")
            draft.write_bytes(msgspec.json.encode(ages))
            make_durable(draft)
            draft.replace(self._path)

        try:
            await self._threads.run(str(self._path), write)
        except RecoveryError as error:
            _log.warning("ended_ages_not_kept", path=str(self._path), reason=error.reason)


PERIOD_S: Final = 60.0
AT_ONCE: Final = 20
"""Maximum number of jobs that are retired in one look, so that a long list is no burst of changes for every daemon."""


class JobRetirement:
    """The retirement of one daemon; it acts while the daemon leads."""

    def __init__(
        self,
        etcd: EtcdClient,
        view: ClusterView,
        *,
        is_leading: Callable[[], bool],
        most: int,
        kept_days: float,
        kept_in: EndedAges | None = None,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """most, kept_days: as in `jobs_to_retire`. kept_in: where ages outlive this daemon."""
        self._etcd = etcd
        self._view = view
        self._is_leading = is_leading
        self._most = most
        self._kept_days = kept_days
        self._period_s = period_s
        self._clock = clock
        self._kept_in = kept_in
        self._endings = EndingsSeen(kept_in.read() if kept_in is not None else None)

    async def run(self) -> None:
        """Retire until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.look()

    async def look(self) -> None:
        """Retire what is due now. What etcd does not take is due at the next look."""
        view, now = self._view, time.time()
        if view.steady_since is None:
            return
        # also while another daemon leads, so that the ages go on when this one does
        seen_at = self._clock()
        ended_for_s = self._endings.look(view, now=seen_at)
        if self._is_leading():
            await self._retire(ended_for_s, now=now)
        if self._kept_in is not None:  # last, because a disk may take long to answer, and ages are of this moment
            await self._kept_in.keep(self._endings.ages(now=seen_at), now=seen_at)

    async def _retire(self, ended_for_s: Mapping[str, float], *, now: float) -> None:
        view = self._view
        try:
            jobs = jobs_to_retire(view, ended_for_s=ended_for_s, most=self._most, kept_days=self._kept_days)[:AT_ONCE]
            forgotten = [Keys.retired(name) for name in names_to_forget(view)[:AT_ONCE]]
            # With the list come the revisions that it rests on: a job may be resumed while others are retired.
            retirements = [_Retirement.of(job, view, now=now) for job in jobs]
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
