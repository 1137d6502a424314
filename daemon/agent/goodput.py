"""Gathers how this node's workers spend their seconds, and writes that and what they measure to etcd."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from headway.daemon.agent.node_reports import Reports, interval_s
from headway.daemon.agent.profiling import has_moved, profile_of, with_demand
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import GoodputRecord
from headway.daemon.cluster.records import PlanRecord
from headway.daemon.cluster.transaction import Compare
from headway.daemon.decide.cluster_watch import Member
from headway.daemon.decide.job_view import JobView
from headway.daemon.worker.goal import Heartbeat, JobGeneration, SnapshotMissed

PERIOD_S: Final = 5.0
"""Least interval of one worker's records. Seconds alone are written less often in a large cluster (`interval_s`)."""
LOOK_EVERY_S: Final = 1.0
"""Interval at which a worker's standstill or broken link is checked; its neighbour is then dialled."""
STANDS_AFTER_S: Final = 5.0
"""Seconds without an operation after which a worker that waits for a neighbour stands still."""
RECENT_S: Final = 60.0
"""Seconds that `recent` covers, once a plan has run that long."""

EVENTFUL: Final = ("incarnation", "num_replayed", "num_resumed", "trouble", "waits_for", "awaited_worker", "cuts")
"""Fields of a record whose change the coordinator and people need to see soon."""

Neighbour = tuple[JobGeneration, int]
"""A worker in a plan, by its position."""


@dataclass(slots=True)
class DeviceBook:
    """The heartbeats of one device's worker under one plan."""

    job: str
    generation: int
    newest: Heartbeat
    trouble: str = ""
    moved_at: float = 0.0
    """Time at which an operation was last seen to be done."""
    earlier: dict[str, float] | None = None
    """Seconds by class that etcd has of this process under the plan before; None: not looked up yet."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Those of the last heartbeat under that plan, if they were told: they count if its record went with the lease."""
    samples: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    """(time, seconds by class), oldest first; `recent` counts from the first."""

    def add(self, beat: Heartbeat, now: float) -> None:
        """Add a heartbeat; forget those that are too old to count from."""
        if not self.samples or beat.operations != self.newest.operations:
            self.moved_at = now
        self.newest = beat
        self.samples.append((now, dict(beat.seconds)))
        while len(self.samples) > 1 and self.samples[1][0] <= now - RECENT_S:
            self.samples.popleft()

    @property
    def stands_still(self) -> bool:
        """Return whether the worker has long waited for a neighbour since its last operation."""
        now = self.samples[-1][0] if self.samples else 0.0
        return bool(self.newest.waiting_for) and now - self.moved_at >= STANDS_AFTER_S

    @property
    def waits_for(self) -> str:
        """Return the neighbour for which the worker stands still; empty: the worker is working."""
        return self.newest.waiting_for if self.stands_still else ""

    @property
    def awaited_worker(self) -> int:
        """Return that neighbour's position in the plan; -1: the worker is working, or waits for another reason."""
        return self.newest.awaited_worker if self.stands_still else -1

    @property
    def recent(self) -> dict[str, float]:
        """Return the seconds by class of the last minute."""
        before = self.samples[0][1]
        return {
            kind: spent for kind, total in self.newest.seconds.items() if (spent := total - before.get(kind, 0)) > 0
        }


class GoodputBook:
    """The newest heartbeats of every device. No IO; `now` is any clock that does not jump."""

    def __init__(self) -> None:
        self._books: dict[int, DeviceBook] = {}
        self._told: dict[Neighbour, float] = {}
        """Silent neighbours, each with the time of its last report."""
        self.lacking: dict[str, str] = {}
        """Job to the reason why this node cannot use its checkpoint folder."""

    @property
    def devices(self) -> Mapping[int, DeviceBook]:
        """Return the records by device index."""
        return self._books

    def add(self, device_index: int, beat: Heartbeat, *, now: float) -> None:
        """Add a heartbeat. One without a job, or without seconds, adds nothing."""
        if not beat.job or not beat.seconds:
            return
        book = self._books.get(device_index)
        goes_on = (
            book is not None
            and book.job == beat.job
            and sum(beat.seconds.values()) >= sum(book.newest.seconds.values())
        )
        if book is None or not goes_on or book.generation != beat.generation:
            was_told = book is not None and goes_on and book.earlier is not None
            before = book.newest.seconds if book is not None and was_told else {}
            book = self._books[device_index] = DeviceBook(beat.job, beat.generation, beat, before=before)
        book.add(beat, now)

    def silent_neighbours(self, *, now: float) -> list[Neighbour]:
        """Return the neighbours of standstills and broken links: each when that begins, then every `PERIOD_S`."""
        silent = {
            (JobGeneration(book.job, book.generation), position)
            for book in self._books.values()
            for position in (book.awaited_worker, *book.newest.broken_links)
            if position >= 0
        }
        self._told = {neighbour: at for neighbour, at in self._told.items() if neighbour in silent}
        due = [each for each in silent if each not in self._told or now >= self._told[each] + PERIOD_S]
        self._told |= dict.fromkeys(due, now)
        return due

    def missed_snapshot(self, missed: SnapshotMissed) -> None:
        """Note a periodic snapshot that was not written, or so late that the next ones are further apart."""
        apart = f"; every {missed.factor}. is written now" if missed.factor > 1 else ""
        for book in self._books.values():
            if (book.job, book.generation) == (missed.job, missed.generation):
                book.trouble = f"snapshot at boundary {missed.boundary}: {missed.reason}{apart}"

    def _access_of(self, job: str) -> str:
        reason = self.lacking.get(job)
        return f"{reason}; other nodes read and write checkpoints instead" if reason else ""

    def forget(self, job: str) -> None:
        """Drop the knowledge of a job that is gone."""
        self._books = {index: book for index, book in self._books.items() if book.job != job}

    def changes(self, job: JobView, node: str) -> dict[str, GoodputRecord]:
        """Return key to record for every worker of the job's plan that is on this node."""
        found = {}
        for index, book in self._books.items():
            if job.plan is None or (book.job, book.generation) != (job.name, job.plan.generation):
                continue
            position = _position_of(job.plan, node, index)
            worker = job.workers.get((job.plan.generation, position)) if position is not None else None
            if position is None or worker is None:
                continue
            if book.earlier is None:
                book.earlier = _earlier(job, book, worker.incarnation) or _rounded(book.before)
            found[Keys.goodput(job.name, book.generation, position)] = GoodputRecord(
                node=node,
                incarnation=worker.incarnation,
                seconds=_rounded(book.newest.seconds),
                earlier=book.earlier,
                recent=_rounded(book.recent),
                typical_s=book.newest.typical_s,
                num_replayed=book.newest.num_replayed,
                num_resumed=book.newest.num_resumed,
                trouble=book.trouble or self._access_of(job.name),
                waits_for=book.waits_for,
                awaited_worker=book.awaited_worker,
                cuts=book.newest.cuts,
            )
        return found


def _earlier(job: JobView, book: DeviceBook, incarnation: str) -> dict[str, float]:
    """Return what a worker process had told under older plans; nothing if its seconds have begun at nought since."""
    told = {
        place: record.seconds
        for place, record in job.goodput.items()
        if record.incarnation == incarnation and place[0] < book.generation
    }
    newest = told[max(told)] if told else {}
    return newest if sum(newest.values()) <= sum(book.newest.seconds.values()) + 0.1 else {}


def is_news(before: GoodputRecord | None, after: GoodputRecord) -> bool:
    """Return whether a record says more than that seconds have passed."""
    return before is None or any(getattr(before, name) != getattr(after, name) for name in EVENTFUL)


def superseded(job: JobView, records: Mapping[str, GoodputRecord]) -> set[str]:
    """Return the keys of older plans' records of these worker processes: the new records contain their seconds."""
    living = {record.incarnation for record in records.values()}
    older = {Keys.goodput(job.name, *place) for place, record in job.goodput.items() if record.incarnation in living}
    return older - set(records)


class WorkerReports:
    """`run` writes what the workers' heartbeats tell: once for every worker that has news."""

    def __init__(self, member: Member) -> None:
        self.book = GoodputBook()
        self.on_silence: Callable[[JobGeneration, int], None] = lambda *_: None
        """Called with the plan and the position of a neighbour from which a worker of ours hears nothing."""
        self._view = member.view
        self._node = member.node
        self._reports = Reports(member)

    async def run(self, heartbeats: Callable[[], Mapping[int, Heartbeat]]) -> None:
        """Write until cancelled. heartbeats: the newest of each worker, by device index.

        A record that etcd does not take now is part of the next one, because seconds only add up.
        """
        written_at = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now, beats = time.monotonic(), heartbeats()
            for index, beat in beats.items():
                self.book.add(index, beat, now=now)
            silent = self.book.silent_neighbours(now=now)
            for neighbour in silent:
                self.on_silence(*neighbour)
            for index, beat in beats.items():
                await self._write_profile(index, beat, now)
            if silent or now >= written_at + PERIOD_S:
                written_at = now
                await self._write_all()

    async def _write_profile(self, index: int, beat: Heartbeat, now: float) -> None:
        job = self._view.jobs.get(beat.job)
        if job is None or job.submission is None or not beat.layers:
            return
        key = Keys.profile(job.name, self._node, index)
        record = with_demand(profile_of(beat), job, self._view.nodes.get(self._node), index)
        if self._reports.age_s(key, now) >= PERIOD_S and has_moved(job.profiles.get((self._node, index)), record):
            await self._reports.write({key: record}, [self._unchanged(job, "spec")], now=now)

    async def _write_all(self) -> None:
        present: set[str] = set()
        for index, book in list(self.book.devices.items()):
            job = self._view.jobs.get(book.job)
            if job is None or job.submission is None:
                self.book.forget(book.job)
            else:
                present.add(Keys.profile(job.name, self._node, index))
        for name in {book.job for book in self.book.devices.values()}:
            present |= await self._write(self._view.jobs[name])
        self._reports.keep_only(present)

    async def _write(self, job: JobView) -> Set[str]:
        """Write how the workers of a job spent their seconds; return the keys of this node, written or not."""
        records, now, reports = self.book.changes(job, self._node), time.monotonic(), self._reports
        pause_s = interval_s(PERIOD_S, len(self._view.nodes)) - LOOK_EVERY_S / 2
        new = {
            key: record
            for key, record in records.items()
            if is_news(known := reports.known(key), record) or (known != record and reports.age_s(key, now) >= pause_s)
        }
        if new:
            await reports.write(new, [self._unchanged(job, "plan")], now=now, without=superseded(job, records))
        return records.keys()

    def _unchanged(self, job: JobView, leaf: str) -> Compare:
        key = Keys.of(job.name, leaf)
        return Compare.unchanged(key, self._view.revision_of(key))


def _position_of(plan: PlanRecord, node: str, device_index: int) -> int | None:
    here = (node, device_index)
    return next((at for at, stage in enumerate(plan.workers) if (stage.node, stage.device_index) == here), None)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(value, 2) for kind, value in seconds.items()}
