"""The last losses of a job reach etcd, also when its plan is over before they are written."""

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from headway.daemon.errors import ConflictError
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.etcd.transaction import Put
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.records.format import decode, encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import ProgressRecord
from headway.daemon.records.records import PlanRecord, SpecRecord
from headway.daemon.telemetry import reports as telemetry_reports
from headway.daemon.telemetry.reports import ProgressReports
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.workers.goal import BatchDone, Progress

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
    return Progress("demo", generation, (entry,))


async def said(reports: ProgressReports, etcd: FakeEtcd, what: Progress, *, rounds: int = 1) -> None:
    """Hand a report over, and let it be tried so many times."""
    reports.add(what)
    task = asyncio.create_task(reports.run())
    try:
        for _ in range(rounds):
            reports.hurry()
            await asyncio.sleep(0)
            async with asyncio.timeout(5):
                while reports._entries:
                    reports.hurry()
                    await asyncio.sleep(0.001)
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_reports, "PROGRESS_PERIOD_S", 0.001)


async def test_the_last_loss_is_written_though_the_plan_is_over() -> None:
    """Batch 29 of 30 arrives when the end has deleted the plan: it replaces batch 19's record."""
    etcd = FakeEtcd()
    before = ProgressRecord(generation=3, batch=19, loss=2.5, tokens_per_second=1.0)
    reports = ProgressReports(view_of(progress=before), cast(EtcdClient, etcd))
    await said(reports, etcd, progress(3, 29))
    (record,) = etcd.written
    assert (record.batch, round(record.loss, 6)) == (29, 1.71)


async def test_a_conflict_is_looked_at_again() -> None:
    """The plan goes while the record is on its way: it is written in the second attempt."""
    etcd = FakeEtcd(num_conflicts=1)
    view = view_of(plan=PlanRecord(generation=3, timeline=1))
    reports = ProgressReports(view, cast(EtcdClient, etcd))
    reports.add(progress(3, 29))
    task = asyncio.create_task(reports.run())
    async with asyncio.timeout(5):
        await etcd.is_news.wait()
        view.apply(Keys.of("demo", "plan"), None, mod_revision=100, create_revision=0)
        while not etcd.written:
            reports.hurry()
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait({task})
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
    reports = ProgressReports(view, cast(EtcdClient, etcd))
    reports.add(progress(3, 28))
    task = asyncio.create_task(reports.run())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task})
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
    reports = ProgressReports(view_of(**records), cast(EtcdClient, etcd))
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
