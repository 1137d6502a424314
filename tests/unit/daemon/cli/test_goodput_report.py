"""A job's seconds: from heartbeats to records, from records to one sentence."""

from dataclasses import replace
from typing import Any

import pytest

from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import GoodputRecord
from headway.daemon.reports.goodput_report import goodput_line, report_goodput
from headway.daemon.reports.job_report import report_job
from headway.daemon.telemetry.goodput import GoodputBook, superseded
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.daemon.workers.goal import Heartbeat, SnapshotMissed
from headway.daemon.workers.status import JobGeneration
from tests.unit.daemon.cli.fake_cluster import cluster_view

USEFUL = {"useful": 9.0, "idle": 1.0}


def job_with(records: dict[tuple[int, int], GoodputRecord]) -> JobView:
    """The job of the fake cluster (plan 3: stage 0 on a, stage 1 on b) with goodput records."""
    view: ClusterView = cluster_view()
    for number, (place, record) in enumerate(records.items(), start=1000):
        key = Keys.goodput("demo", *place)
        view.apply(key, encode(record), mod_revision=number, create_revision=number)
    assert not view.unreadable
    return view.jobs["demo"]


def record(incarnation: str, seconds: dict[str, float], **more: Any) -> GoodputRecord:
    """A worker's record."""
    return GoodputRecord(node="a", incarnation=incarnation, seconds=seconds, **more)


def beat(generation: int, **seconds: float) -> Heartbeat:
    """A worker's heartbeat."""
    return Heartbeat(job="demo", generation=generation, seconds=seconds)


def test_a_worker_counts_once_over_its_plans() -> None:
    """A worker's seconds go on from plan to plan; the newest record says them all, and a dead worker's are added."""
    job = job_with(
        {
            (2, 0): record("w", {"useful": 50.0}),
            (2, 1): record("dead", {"useful": 18.0, "replay": 12.0}),
            (3, 0): record("w", {"useful": 60.0, "waiting:stage 1 at b:1": 6.0, "waiting:stage 2 at c:1": 4.0}),
        }
    )
    report = report_goodput(job)
    assert report.seconds == {"useful": 78.0, "replay": 12.0, "waiting": 10.0}
    assert report.useful_share == pytest.approx(0.78)
    assert goodput_line(report) == "goodput 78 % · replay 12 % · waiting 10 %"


@pytest.mark.parametrize(
    ("recent", "sentence"),
    [
        (
            {"useful": 57.0, "waiting:stage 1 at 10.0.0.7:4242": 43.0},
            "stage 0 on a waited 43 % of the time for stage 1 on b",
        ),
        ({"useful": 50.0, "waiting:the coordinator": 50.0}, "stage 0 on a waited 50 % of the time for the coordinator"),
        ({"useful": 5.0, "replay": 5.0}, "stage 0 on a spent 50 % of the time on recomputing batches after a rollback"),
        (
            {"useful": 97.0, "idle": 3.0},
            "nothing slows the job: no stage lost more than 3 % of the last minute to anything",
        ),
        ({"useful": 90.0, "telepathy": 10.0}, "stage 0 on a spent 10 % of the time on telepathy"),
        ({}, ""),
    ],
)
def test_status_names_the_largest_loss_of_time(recent: dict[str, float], sentence: str) -> None:
    """The sentence has the stage, and the node that the stage waited for."""
    job = job_with({(3, 0): record("w", {"useful": 1000.0}, recent=recent)})
    assert report_goodput(job).why_slow == sentence


def test_of_replicas_the_one_that_waits_and_the_one_waited_for_are_named() -> None:
    """Stage 0 on a and c, stage 1 on b: the second replica waited for its sibling."""
    view = job_with(
        {(3, 1): record("w", {"useful": 100.0}, recent={"useful": 1.0, "waiting:stage 0 worker 0 at a:5": 9.0})}
    )
    assert view.plan is not None
    front, back = view.plan.workers
    stages = (replace(front, groups=(0,)), replace(front, node="c", groups=(1,)), back)
    job = replace(view, plan=replace(view.plan, workers=stages))
    told = "stage 0 on c (replica 2 of 2) waited 90 % of the time for stage 0 on a (replica 1 of 2)"
    assert report_goodput(job).why_slow == told
    names = [(stage.name, stage.groups, stage.num_replicas) for stage in report_job(job, {}).stages]
    assert names == [
        ("stage 0 on a (replica 1 of 2)", (0,), 2),
        ("stage 0 on c (replica 2 of 2)", (1,), 2),
        ("stage 1 on b", (), 1),
    ]


def test_without_worker_records_no_percentage_is_shown() -> None:
    report = report_goodput(job_with({}))
    assert (report.useful_share, goodput_line(report), report.why_slow) == (None, "", "")


def test_heartbeats_become_a_record_of_the_stage() -> None:
    """Device 0 of node a computes stage 0: its record has all seconds and, apart, those of the last minute."""
    book = GoodputBook()
    for now, useful in ((0.0, 100.0), (30.0, 120.0), (70.0, 160.0), (100.0, 180.0)):
        book.add(0, beat(3, useful=useful, idle=7.0), now=now)
    job = job_with({})
    (found,) = book.changes(job, "a").values()
    assert found == GoodputRecord(
        node="a", incarnation="w", seconds={"useful": 180.0, "idle": 7.0}, recent={"useful": 60.0}
    )
    assert list(book.changes(job, "a")) == [Keys.goodput("demo", 3, 0)]
    assert book.changes(job, "b") == {}, "the worker of stage 1 has not registered"


def test_another_plan_or_process_begins_a_new_minute() -> None:
    """After a new generation, and after a process whose seconds began at nought, `recent` counts from there."""
    book = GoodputBook()
    book.add(0, beat(2, useful=100.0), now=0.0)
    book.add(0, beat(3, useful=110.0), now=1.0)
    book.add(0, beat(3, useful=112.0), now=2.0)
    assert book.devices[0].recent == {"useful": pytest.approx(2.0)}
    book.add(0, beat(3, useful=1.0), now=3.0)
    book.add(0, beat(3, useful=1.5), now=4.0)
    assert book.devices[0].recent == {"useful": pytest.approx(0.5)}
    book.add(0, Heartbeat(), now=5.0)
    assert book.devices[0].newest.seconds == {"useful": 1.5}, "a worker without a job says nothing"
    book.forget("demo")
    assert not book.devices


def test_older_records_of_the_same_process_are_taken_away() -> None:
    """Its record of plan 2 goes when that of plan 3 is written; another process's record of plan 2 stays."""
    job = job_with({(2, 0): record("w", USEFUL), (2, 1): record("dead", USEFUL)})
    book = GoodputBook()
    book.add(0, beat(3, useful=1.0), now=0.0)
    assert superseded(job, book.changes(job, "a")) == {Keys.goodput("demo", 2, 0)}


def test_a_missed_snapshot_is_reported() -> None:
    """The reason and the new distance come with the stage's record; one of another plan does not."""
    book = GoodputBook()
    book.add(0, beat(3, useful=1.0), now=0.0)
    missed = SnapshotMissed(job="demo", generation=3, boundary=40, reason="late twice", factor=2)
    book.missed_snapshot(SnapshotMissed(job="demo", generation=2, boundary=20, reason="old"))
    assert book.devices[0].trouble == ""
    book.missed_snapshot(missed)
    (found,) = book.changes(job_with({}), "a").values()
    assert found.trouble == "snapshot at boundary 40: late twice; every 2. is written now"


def test_a_worker_that_stands_still_is_logged_within_seconds_and_repeatedly() -> None:
    """The neighbour is named 6 s after the last operation, then every 5 s."""
    book, told = GoodputBook(), []
    for second in range(20):
        waits = {"waiting_for": "stage 1 on b at b:7100", "awaited_worker": 1} if second else {}
        heartbeat = replace(beat(3, useful=1.0), operations=min(second, 1), **waits)  # type: ignore[arg-type]
        book.add(0, heartbeat, now=float(second))
        told += [(second, each) for each in book.silent_neighbours(now=float(second))]
    assert told == [(second, (JobGeneration("demo", 3), 1)) for second in (6, 11, 16)]
    [written] = book.changes(job_with({}), "a").values()
    assert (written.waits_for, written.awaited_worker) == ("stage 1 on b at b:7100", 1)
    moving = replace(beat(3, useful=2.0), operations=2, waiting_for="stage 1 on b at b:7100")
    book.add(0, moving, now=20.0)
    assert book.silent_neighbours(now=30.0) == []


def test_a_broken_link_is_logged_at_once() -> None:
    """Its worker may stand at a boundary and wait for nobody, and the other side may reach it."""
    book = GoodputBook()
    broken = replace(beat(3, useful=1.0), broken_links=(1,))
    book.add(0, broken, now=0.0)
    neighbour = (JobGeneration("demo", 3), 1)
    assert [book.silent_neighbours(now=float(second)) for second in range(7)] == [
        [neighbour] if second in (0, 5) else [] for second in range(7)
    ]
    [written] = book.changes(job_with({}), "a").values()
    assert written.awaited_worker == -1, "it waits for nobody"
    book.add(0, beat(3, useful=2.0), now=8.0)
    assert book.silent_neighbours(now=20.0) == []
