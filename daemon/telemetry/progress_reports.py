"""Writes the batches that the lead of the last stage reports to etcd, at most once a second."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import structlog

from headway.daemon.errors import ConflictError, StoreError
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.etcd.transaction import Compare, Put
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import ProgressRecord
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.proto import control_pb2

log = structlog.get_logger()

PERIOD_S = 1.0
MAX_RECENT = 256


class ProgressReports:
    """Collects progress of any number of jobs; `run` writes the newest of each."""

    def __init__(self, view: ClusterView, etcd: EtcdClient) -> None:
        self._view = view
        self._etcd = etcd
        self._entries: dict[tuple[str, int], deque[control_pb2.JournalEntry]] = {}
        self._arrived, self._hurry = asyncio.Event(), asyncio.Event()

    def add(self, progress: control_pb2.Progress) -> None:
        """Add a worker's report; the oldest of very many batches are not shown."""
        entries = self._entries.setdefault((progress.job, progress.generation), deque(maxlen=MAX_RECENT))
        entries.extend(progress.entries)
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
            async with asyncio.timeout(PERIOD_S):
                await self._hurry.wait()
        except TimeoutError:
            return

    async def _write(self, job: str, generation: int, entries: list[control_pb2.JournalEntry]) -> bool:
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
            updated_at=time.time(),
        )
        plan_key = Keys.of(job, "plan")
        conditions = [
            Compare.unchanged(plan_key, self._view.revision_of(plan_key)),
            Compare.present(Keys.of(job, "spec")),
        ]
        try:
            await self._etcd.transaction(conditions, [Put(Keys.of(job, "progress"), encode(record))])
        except ConflictError:
            return False  # the view will tell whether the plan has changed, or the job's last plan is over
        except StoreError as error:
            log.warning("progress_not_written", job=job, error=str(error))
            return False
        return True


def _evaluations(
    entries: Sequence[control_pb2.JournalEntry], before: ProgressRecord | None
) -> tuple[tuple[int, float], ...]:
    """Return the evaluations among the entries, or the last one before them. A rollback takes back those after it."""
    found = tuple((entry.batch, entry.eval_loss) for entry in entries if entry.HasField("eval_loss"))
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
