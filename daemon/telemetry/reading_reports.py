"""Reports in etcd how far this node has read a job's data or its model's folder, so that it does not count as late.

Each node that computes for a job verifies its data while training, because any node may have the first stage next.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from headway.daemon.errors import StoreError
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.etcd.transaction import Compare, Delete, Put
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import ReadingRecord
from headway.daemon.records.records import Phase
from headway.daemon.shards.library import DataLibrary
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView

PERIOD_S: Final = 2.0

Look = Callable[[], ReadingRecord | None]
"""Returns how far a read is; None: it has not begun."""


class ReadingReports:
    """The reports of one node."""

    def __init__(
        self, library: DataLibrary, view: ClusterView, etcd: EtcdClient, *, node: str, lease_id: Callable[[], int]
    ) -> None:
        self._library = library
        self._view = view
        self._seen: set[str] = set()
        """Submissions whose data was checked."""
        self._etcd = etcd
        self._node = node
        self._lease_id = lease_id
        self._told: set[str] = set()
        """Keys that etcd may have: of running reads, and of records that could not be withdrawn."""
        self._looks: dict[str, list[Look]] = {}
        """How far each present read is, by key; the first of a key that has begun is told."""

    async def run_ahead(self) -> None:
        """Look at the data of the jobs that this node computes for, until cancelled."""
        while True:
            for key in self._told - self._looks.keys():
                if key not in self._looks:  # nor since the last record was withdrawn
                    await self._take_back(key)
            self._seen &= {job.uid for job in self._view.jobs.values()}
            for job in list(self._view.jobs.values()):
                if self._computes(job) and job.spec is not None and not job.refusal and job.uid not in self._seen:
                    self._seen.add(job.uid)
                    for part in job.spec.data.parts:
                        await self._library.look_ahead(part)
            await asyncio.sleep(PERIOD_S)

    def _computes(self, job: JobView) -> bool:
        stages = job.plan.stages if job.plan is not None and job.phase.phase is Phase.RUNNING else ()
        return any(stage.node == self._node for stage in stages)

    @asynccontextmanager
    async def telling(self, job: str, look: Look) -> AsyncIterator[None]:
        """Report while the body reads for a job. A read shorter than PERIOD_S leaves no trace."""
        key = Keys.reading(job, self._node)
        telling = asyncio.create_task(self._tell(job, key, look), name=f"reading of {job}")
        self._looks.setdefault(key, []).append(look)
        try:
            yield
        finally:
            telling.cancel()
            try:
                await asyncio.wait({telling})
            finally:
                self._looks[key].remove(look)
                if not self._looks[key]:
                    del self._looks[key]
            if not telling.cancelled():
                telling.exception()
            if key in self._told and key not in self._looks:
                await self._take_back(key)

    async def _take_back(self, key: str) -> None:
        """Withdraw a record. While etcd is unreachable this stays due: the record would last as long as this node's
        lease.
        """
        is_done = False
        self._told.discard(key)  # first, because another read may note it again
        try:
            with suppress(StoreError):
                await self._etcd.transaction([], [Delete(key)])
                is_done = True
        finally:
            self._told |= set() if is_done else {key}

    def of_data(self, sha256: str) -> Look:
        """Return how to look at a read of data."""

        def look() -> ReadingRecord | None:
            reading = self._library.reading.get(sha256)
            if reading is None:
                return None
            return ReadingRecord(num_bytes=reading.num_bytes, total_bytes=reading.total_bytes)

        return look

    def _first(self, key: str) -> Look | None:
        """Return the first read of a key that has begun: one that still waits for its giver hides no other."""
        return next((look for look in self._looks[key] if look() is not None), None)

    async def _tell(self, job: str, key: str, look: Look) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            record = look()
            if record is None or self._first(key) is not look:
                continue
            with suppress(StoreError):
                put = Put(key, encode(record), self._lease_id())
                self._told.add(key)
                await self._etcd.transaction([Compare.present(Keys.of(job, "spec"))], [put])
