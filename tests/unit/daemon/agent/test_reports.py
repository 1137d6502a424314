"""A node reports the data that it reads: the record goes when the read ends, also after an outage of etcd."""

import asyncio
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.agent import node_reports as telemetry_reports
from headway.daemon.agent.node_reports import ProgressReports, ReadingReports
from headway.daemon.base.errors import ConflictError, StoreUnreachableError
from headway.daemon.blobs.library import Reading
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import ProgressRecord, ReadingRecord
from headway.daemon.cluster.records import PlanRecord, SpecRecord
from headway.daemon.cluster.transaction import Compare, Delete, Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.worker.goal import BatchDone, Progress
from tests.rigs.cluster_member import member
from tests.rigs.running import running

KEY = Keys.reading("j", "a")
LEASE = 7
DEADLINE_S = 20.0


class Etcd:
    """What is there, and by which lease. Each write may be lost before it is done, or its answer after."""

    def __init__(self) -> None:
        self.view = ClusterView()
        self.revision = 0
        self.is_away = False
        self.leases: dict[str, int] = {}
        self.answers_are_lost = False
        self._show(Keys.of("j", "spec"), encode(SpecRecord(spec=JobSpec(job=JobSection(name="j")))))

    async def transaction(self, conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:
        await asyncio.sleep(0)
        if self.is_away:
            raise StoreUnreachableError("etcd", "is away")
        if any(not self.view.revision_of(condition.key) for condition in conditions):
            raise ConflictError("j", "was removed")
        for change in changes:
            self._show(change.key, change.value if isinstance(change, Put) else None)
            if isinstance(change, Put):
                self.leases[change.key] = change.lease_id
        if self.answers_are_lost:
            raise StoreUnreachableError("etcd", "gave no answer")
        return self.revision

    def end_lease(self) -> None:
        """As when the node's process has died."""
        for key in [key for key, lease in self.leases.items() if lease == LEASE]:
            del self.leases[key]
            self._show(key, None)

    def _show(self, key: str, value: bytes | None) -> None:
        self.revision += 1
        self.view.apply(key, value, mod_revision=self.revision, create_revision=self.revision)

    @property
    def told(self) -> int | None:
        """Return the bytes that node a has read, by a reader's view; None: it reads nothing."""
        reading = self.view.jobs["j"].readings.get("a")
        return reading.num_bytes if reading is not None else None

    async def until(self, told: int | None) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.told != told:
                await asyncio.sleep(0.001)


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Etcd:
    monkeypatch.setattr(telemetry_reports, "READING_PERIOD_S", 0.005)
    return Etcd()


@pytest.fixture
def library() -> Any:
    return SimpleNamespace(reading={"sha": Reading(10, 100)})


@pytest.fixture(name="reports")
def reading_reports(etcd: Etcd, library: Any) -> ReadingReports:
    return ReadingReports(library, member(view=etcd.view, etcd=etcd, lease_id=lambda: LEASE))


async def test_what_is_read_is_told_and_taken_back(etcd: Etcd, reports: ReadingReports, library: Any) -> None:
    async with reports.telling("j", reports.of_data("sha")):
        await etcd.until(10)
        library.reading["sha"] = Reading(50, 100)
        await etcd.until(50)
    assert etcd.told is None


async def test_a_read_that_has_not_begun_hides_no_other(etcd: Etcd, reports: ReadingReports) -> None:
    """The data waits for a giver, and the model's folder is being read: the folder is told."""
    folder = ReadingRecord(num_bytes=7, total_bytes=9, url="hub")
    async with reports.telling("j", reports.of_data("nobody has it")), reports.telling("j", lambda: folder):
        await etcd.until(7)
    assert etcd.told is None


async def test_a_node_that_dies_between_its_writes_reads_nothing_any_more(etcd: Etcd, reports: ReadingReports) -> None:
    """It has told and not taken back: the record goes with the node's lease."""
    async with running(_tell_for_ever(reports)):
        await etcd.until(10)
        etcd.is_away = True
    assert etcd.told == 10
    etcd.end_lease()
    assert etcd.told is None


@pytest.mark.parametrize("answers_are_lost", [False, True])
async def test_what_could_not_be_taken_back_is_taken_back_later(
    etcd: Etcd, reports: ReadingReports, answers_are_lost: bool
) -> None:
    """etcd is away as the reading ends, or its answer to the first write was lost: nobody reads when it is back."""
    etcd.answers_are_lost = answers_are_lost
    async with running(reports.run_ahead()):
        async with reports.telling("j", reports.of_data("sha")):
            await etcd.until(10)
            etcd.is_away = True
        assert etcd.told == 10
        etcd.is_away = etcd.answers_are_lost = False
        await etcd.until(None)


async def test_what_is_left_of_an_earlier_reading_is_not_taken_from_a_new_one(
    etcd: Etcd, reports: ReadingReports, library: Any
) -> None:
    """etcd was away as the first reading ended, and the second is under way as it comes back."""
    async with reports.telling("j", reports.of_data("sha")):
        await etcd.until(10)
        etcd.is_away = True
    async with running(reports.run_ahead()):
        library.reading["sha"] = Reading(70, 100)
        async with reports.telling("j", reports.of_data("sha")):
            etcd.is_away = False
            await etcd.until(70)
            for _ in range(5):
                await asyncio.sleep(0.005)
                assert etcd.told == 70
        await etcd.until(None)


async def test_a_reading_that_tells_while_one_is_taken_back_is_taken_back_too(
    etcd: Etcd, reports: ReadingReports, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is deleted, the answer is slow, and the next reading tells meanwhile: that is taken back as well."""
    write, answers, is_slow = etcd.transaction, asyncio.Event(), asyncio.Event()

    async def slow(conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:
        revision = await write(conditions, changes)
        if isinstance(changes[0], Delete):
            is_slow.set()
            await answers.wait()
        return revision

    monkeypatch.setattr(etcd, "transaction", slow)
    first = asyncio.create_task(_tell_for_ever(reports))
    await etcd.until(10)
    first.cancel()
    await asyncio.wait_for(is_slow.wait(), DEADLINE_S)
    library.reading["sha"] = Reading(70, 100)
    async with reports.telling("j", reports.of_data("sha")):
        await etcd.until(70)
        answers.set()
        await asyncio.wait({first})
    assert etcd.told is None


async def _tell_for_ever(reports: ReadingReports) -> None:
    async with reports.telling("j", reports.of_data("sha")):
        await asyncio.Event().wait()


PROGRESS = Keys.of("demo", "progress")


class FakeEtcd:
    """Takes transactions; the first ones may conflict."""

    def __init__(self, *, num_conflicts: int = 0) -> None:
        self.num_conflicts = num_conflicts
        self.written: list[ProgressRecord] = []
        self.is_news = asyncio.Event()

    async def transaction(self, _compare: Iterable[Any], changes: Iterable[Put]) -> int:
        self.is_news.set()
        if self.num_conflicts:
            self.num_conflicts -= 1
            raise ConflictError(PROGRESS, "changed by another process")
        self.written += [decode(change.value, ProgressRecord) for change in changes]
        return 1


def view_of(**records: object) -> ClusterView:
    """A job with records by their leaf."""
    view = ClusterView()
    leaves = {"spec": SpecRecord(spec=JobSpec(job=JobSection(name="demo"))), **records}
    for number, (leaf, record) in enumerate(leaves.items(), start=1):
        view.apply(Keys.of("demo", leaf), encode(record), mod_revision=number, create_revision=number)
    return view


def progress(generation: int, batch: int) -> Progress:
    entry = BatchDone(batch=batch, loss=2.0 - batch / 100, tokens=8, seconds=0.5)
    return Progress("demo", generation, entry)


async def said(reports: ProgressReports, etcd: FakeEtcd, what: Progress, *, rounds: int = 1) -> None:
    """Hand a report over, and let it be tried so many times."""
    reports.add(what)
    async with running(reports.run()):
        for _ in range(rounds):
            reports.hurry()
            await asyncio.sleep(0)
            async with asyncio.timeout(5):
                while reports._entries:
                    reports.hurry()
                    await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_reports, "PROGRESS_PERIOD_S", 0.001)


async def test_the_last_loss_is_written_though_the_plan_is_over() -> None:
    """Batch 29 of 30 arrives when the end has deleted the plan: it replaces batch 19's record."""
    etcd = FakeEtcd()
    before = ProgressRecord(generation=3, batch=19, loss=2.5, tokens_per_second=1.0)
    reports = ProgressReports(member(view=view_of(progress=before), etcd=etcd))
    await said(reports, etcd, progress(3, 29))
    (record,) = etcd.written
    assert (record.batch, round(record.loss, 6)) == (29, 1.71)


async def test_a_conflict_is_looked_at_again() -> None:
    """The plan goes while the record is on its way: it is written in the second attempt."""
    etcd = FakeEtcd(num_conflicts=1)
    view = view_of(plan=PlanRecord(generation=3, timeline=1))
    reports = ProgressReports(member(view=view, etcd=etcd))
    reports.add(progress(3, 29))
    async with running(reports.run()):
        async with asyncio.timeout(5):
            await etcd.is_news.wait()
            view.apply(Keys.of("demo", "plan"), None, mod_revision=100, create_revision=0)
            while not etcd.written:
                reports.hurry()
                await asyncio.sleep(0.001)
    assert [record.batch for record in etcd.written] == [29]


@pytest.mark.parametrize("num_conflicts", [0, 1])
async def test_a_batch_that_comes_during_a_write_is_written_at_once(
    monkeypatch: pytest.MonkeyPatch, num_conflicts: int
) -> None:
    """It is the last of a small job, whose worker then stops: nothing would ever write it later."""
    monkeypatch.setattr(telemetry_reports, "PROGRESS_PERIOD_S", 3600.0)
    view = view_of(plan=PlanRecord(generation=3, timeline=1))

    class Slow(FakeEtcd):
        async def transaction(self, compare: Iterable[Any], changes: Iterable[Put]) -> int:
            if not self.is_news.is_set():
                reports.add(progress(3, 29))
                reports.hurry()
            return await super().transaction(compare, changes)

    etcd = Slow(num_conflicts=num_conflicts)
    reports = ProgressReports(member(view=view, etcd=etcd))
    reports.add(progress(3, 28))
    async with running(reports.run()):
        await asyncio.sleep(0.05)
    assert [batch for record in etcd.written for batch, _ in record.recent] == [28, 29]


@pytest.mark.parametrize(
    "records",
    [
        {"plan": PlanRecord(generation=4, timeline=4)},
        {"next": PlanRecord(generation=4, timeline=4)},
        {"progress": ProgressRecord(generation=4, batch=2, loss=2.0, tokens_per_second=1.0)},
        {"progress": ProgressRecord(generation=3, batch=29, loss=2.0, tokens_per_second=1.0)},
    ],
)
async def test_what_is_no_news_is_dropped(records: dict[str, object]) -> None:
    """Another plan is in force or comes, or a newer record is there: an old worker's words change nothing."""
    etcd = FakeEtcd()
    reports = ProgressReports(member(view=view_of(**records), etcd=etcd))
    await said(reports, etcd, progress(3, 29))
    assert etcd.written == []


def entry(batch: int, eval_loss: float | None = None) -> BatchDone:
    return BatchDone(batch=batch, loss=2.0, tokens=8, seconds=0.5, eval_loss=eval_loss)


@pytest.mark.parametrize(
    ("entries", "evaluations"),
    [
        ([entry(10, 1.5), entry(11), entry(12, 1.25)], ((10, 1.5), (12, 1.25))),
        ([entry(13), entry(14)], ((9, 3.0),)),
        ([entry(8), entry(9)], ((6, 4.0),)),
    ],
    ids=["new ones", "none: the last before", "a rollback takes back"],
)
def test_the_newest_evaluations_are_kept(entries: list[BatchDone], evaluations: tuple[tuple[int, float], ...]) -> None:
    """Of the entries, or the last one before them."""
    before = ProgressRecord(generation=1, batch=9, loss=2.0, tokens_per_second=1.0, evaluations=((6, 4.0), (9, 3.0)))
    assert telemetry_reports._evaluations(entries, before) == evaluations
    assert telemetry_reports._evaluations([entry(3)], None) == ()
