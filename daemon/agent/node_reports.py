"""Writes a node's reports to etcd: the one way to write them, the batches that are done, and how far a node has read.

Each node that computes for a job verifies its data while training, because any node may have the first stage next. A
node that reads does not count as late.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Any, Final

import structlog

from headway.daemon.base.errors import ConflictError, LeaseLostError, StoreError
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import ProgressRecord, ReadingRecord
from headway.daemon.cluster.records import Phase
from headway.daemon.cluster.transaction import Change, Compare, Delete, Put
from headway.daemon.decide.cluster_watch import Member
from headway.daemon.decide.job_view import JobView
from headway.daemon.worker.goal import BatchDone, Progress

log = structlog.get_logger()

CLUSTER_PER_S: Final = 20.0
"""Maximum rate of one kind of report, of all nodes together, in records per second."""


def interval_s(least_s: float, num_nodes: int) -> float:
    """Return the interval of one node's reports of one kind, in a cluster of so many nodes."""
    return max(least_s, num_nodes / CLUSTER_PER_S)


class Reports:
    """Writes records, and remembers what etcd has of them. `now` is any clock that does not jump.

    A record goes with the node's lease. What was written under another lease, or before etcd's history went back, is
    gone. The view does not tell: it has the leader's records at the leader alone.
    """

    def __init__(self, member: Member, *, are_leased: bool = True) -> None:
        """are_leased: whether the records go with the node's lease."""
        self._member = member
        self._are_leased = are_leased
        self._written: dict[str, Any] = {}
        """What etcd has, by key, under the lease and in the epoch of `_written_in`."""
        self._written_in = (0, 0)
        self._tried_at: dict[str, float] = {}
        """Key to the time of its last attempt."""

    def known(self, key: str) -> Any:
        """Return the record that etcd has from this node; None: none."""
        return self._written.get(key) if self._written_in == self._place() else None

    def age_s(self, key: str, now: float) -> float:
        """Return the seconds since the last attempt to write a record; inf: there was none."""
        return now - self._tried_at.get(key, -inf)

    def keep_only(self, keys: Set[str]) -> None:
        """Forget all other records: their jobs or plans are gone."""
        self._written = {key: record for key, record in self._written.items() if key in keys}
        self._tried_at = {key: at for key, at in self._tried_at.items() if key in keys}

    async def write(
        self,
        records: Mapping[str, object],
        conditions: Sequence[Compare],
        *,
        now: float,
        without: Iterable[str] = (),
    ) -> bool:
        """Write records in one transaction; return whether etcd has them. without: keys that are deleted with it."""
        place = self._place()
        self._tried_at |= dict.fromkeys(records, now)
        changes: list[Change] = [Put(key, encode(record), place[0]) for key, record in records.items()]
        changes += map(Delete, without)
        try:
            await self._member.etcd.transaction(conditions, changes)
        except (ConflictError, LeaseLostError):
            return False  # what they tell of has changed, or the node is about to register again
        except StoreError as error:
            log.warning("report_not_written", keys=[*records], error=str(error))
            return False
        if place != self._written_in:
            self._written, self._written_in = {}, place
        self._written |= records
        return True

    def _place(self) -> tuple[int, int]:
        return self._member.lease_id() if self._are_leased else 0, self._member.view.epoch


PROGRESS_PERIOD_S = 1.0
MAX_RECENT = 256


class ProgressReports:
    """Collects progress of any number of jobs; `run` writes the newest of each, which outlives the node's lease."""

    def __init__(self, member: Member) -> None:
        self._view = member.view
        self._reports = Reports(member, are_leased=False)
        self._entries: dict[tuple[str, int], deque[BatchDone]] = {}
        self._arrived, self._hurry = asyncio.Event(), asyncio.Event()

    def add(self, progress: Progress) -> None:
        """Add a batch; the oldest of very many are not shown."""
        entries = self._entries.setdefault((progress.job, progress.generation), deque(maxlen=MAX_RECENT))
        entries.append(progress.batch)
        self._arrived.set()

    async def run(self) -> None:
        """Write until cancelled. News from an outage of etcd is written, shortened, when etcd is back."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            self._hurry.clear()
            for run_key in list(self._entries):
                entries = self._entries.pop(run_key)
                if entries and not await self._write(*run_key, list(entries)):
                    # What has come meanwhile is newer, and never written yet either.
                    self._entries[run_key] = deque((*entries, *self._entries.get(run_key, ())), maxlen=MAX_RECENT)
            await self._rest()
            if self._entries:
                self._arrived.set()

    def hurry(self) -> None:
        """Write all news now: a worker has stopped, and its plan may soon be over."""
        self._hurry.set()

    async def _rest(self) -> None:
        """Wait for the next round; not at all if someone was in a hurry during this one."""
        try:
            async with asyncio.timeout(PROGRESS_PERIOD_S):
                await self._hurry.wait()
        except TimeoutError:
            return

    async def _write(self, job: str, generation: int, entries: list[BatchDone]) -> bool:
        """Write the entries; return whether nothing is left to do about them."""
        view = self._view.jobs.get(job)
        if view is None or not _is_news(view, generation, entries[-1].batch):
            return True  # the plan is over: the journal has these batches
        seconds = sum(entry.seconds for entry in entries)
        newest = entries[-1]
        record = ProgressRecord(
            generation=generation,
            batch=newest.batch,
            loss=newest.loss,
            tokens_per_second=sum(entry.tokens for entry in entries) / seconds if seconds > 0 else 0.0,
            recent=tuple((entry.batch, entry.loss) for entry in entries),
            evaluations=_evaluations(entries, view.progress),
            gradient_norm=newest.gradient_norm,
            final_eval_loss=newest.final_eval_loss,
            updated_at=time.time(),
        )
        plan_key = Keys.of(job, "plan")
        conditions = [
            Compare.unchanged(plan_key, self._view.revision_of(plan_key)),
            Compare.present(Keys.of(job, "spec")),
        ]
        # After a conflict the view will tell whether the plan has changed, or the job's last plan is over.
        return await self._reports.write({Keys.of(job, "progress"): record}, conditions, now=time.monotonic())


def _evaluations(entries: Sequence[BatchDone], before: ProgressRecord | None) -> tuple[tuple[int, float], ...]:
    """Return the evaluations among the entries, or the last one before them. A rollback takes back those after it."""
    found = tuple((entry.batch, entry.eval_loss) for entry in entries if entry.eval_loss is not None)
    earlier = [] if before is None else [each for each in before.evaluations if each[0] < entries[0].batch]
    return found or tuple(earlier[-1:])


def _is_news(job: JobView, generation: int, batch: int) -> bool:
    """Return whether a plan's batch needs a record: the plan is in force, or was the job's last and has just ended.

    A job's end deletes the plan, often before the last losses are written.

    """
    if job.plan is not None or job.next is not None:
        return job.plan is not None and job.plan.generation == generation
    before = job.progress
    return before is None or (generation >= before.generation and batch > before.batch)


READING_PERIOD_S: Final = 2.0

Look = Callable[[], ReadingRecord | None]
"""Returns how far a read is; None: it has not begun."""


class ReadingReports:
    """The reports of one node."""

    def __init__(self, library: DataLibrary, member: Member) -> None:
        self._library = library
        self._member = member
        self._seen: set[str] = set()
        """Submissions whose data was checked."""
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
            self._seen &= {job.uid for job in self._member.view.jobs.values()}
            for job in list(self._member.view.jobs.values()):
                if self._computes(job) and job.spec is not None and not job.refusal and job.uid not in self._seen:
                    self._seen.add(job.uid)
                    for part in job.spec.data_sets:
                        await self._library.look_ahead(part)
            await asyncio.sleep(READING_PERIOD_S)

    def _computes(self, job: JobView) -> bool:
        stages = job.plan.workers if job.plan is not None and job.phase.phase is Phase.RUNNING else ()
        return any(stage.node == self._member.node for stage in stages)

    @asynccontextmanager
    async def telling(self, job: str, look: Look) -> AsyncIterator[None]:
        """Report while the body reads for a job. A read shorter than READING_PERIOD_S leaves no trace."""
        key = Keys.reading(job, self._member.node)
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
                await self._member.etcd.transaction([], [Delete(key)])
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
            await asyncio.sleep(READING_PERIOD_S)
            record = look()
            if record is None or self._first(key) is not look:
                continue
            with suppress(StoreError):
                put = Put(key, encode(record), self._member.lease_id())
                self._told.add(key)
                await self._member.etcd.transaction([Compare.present(Keys.of(job, "spec"))], [put])
