"""Retires the oldest of very many ended jobs: the leader's work. decide/retirement.py decides which."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from headway.daemon.base.errors import ConflictError, StoreError
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import RetiredRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.transaction import Compare, Delete, Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.retirement import jobs_to_retire, names_to_forget, retired_record

_log = structlog.get_logger()


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
        period_s: float = PERIOD_S,
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
