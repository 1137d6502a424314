"""The demo's own pieces, the plain display and the curve."""

import asyncio
import io
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, ConsoleDimensions

from headway.daemon.agent.goodput import GoodputBook, superseded
from headway.daemon.base.errors import JobFailedError, StoreUnreachableError
from headway.daemon.base.terminal import fitted
from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.client.job_watch import traceback_line
from headway.daemon.cluster.cluster_records import LeaderRecord, NodeFailureRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import GoodputRecord, Port, ProgressRecord, ReachFact, ReachRecord
from headway.daemon.cluster.records import (
    CheckpointRecord,
    Device,
    EventRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateFile,
    StateRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.failures import awaited_pair, standing_pairs
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.device_defaults import for_devices
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.job_file import parse_job, read_job_file
from headway.daemon.local.demo import DEMO_JOB, check_metrics, weights_hash
from headway.daemon.reports.goodput_report import goodput_line, report_goodput
from headway.daemon.reports.job_report import (
    StageReport,
    arithmetic_settings,
    link_waits,
    report_job,
    report_line,
)
from headway.daemon.reports.node_list import date_and_time, node_lines, plain_sites, reach_lines, time_of_day
from headway.daemon.reports.safety_report import SafetyReport, safety_lines, why_unprotected
from headway.daemon.reports.watch_view import (
    JsonDisplay,
    LiveDisplay,
    LossHistory,
    PlainDisplay,
    Snapshot,
    draw_curve,
    render,
    snapshot,
)
from headway.daemon.worker.goal import Heartbeat, JobGeneration, SnapshotMissed
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.spec import TrainSpec
from tests.rigs import fake_cluster
from tests.rigs.blocked_ways import Scene, fact
from tests.rigs.displays import report
from tests.rigs.fake_cluster import SPEC, cluster_view

DOCS = Path(__file__).resolve().parents[4] / "docs" / "jobs"


def test_the_demos_job_is_the_one_of_the_docs() -> None:
    """What `headway demo` trains is docs/jobs/demo.toml."""
    assert parse_job(DEMO_JOB) == read_job_file(DOCS / "demo.toml")[0]


def test_the_demo_refuses_metrics_with_a_lost_or_doubled_batch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for batches, is_whole in (([0, 1, 2], True), ([0, 2], False), ([0, 1, 1, 2], False), ([], False)):
        path.write_text("".join(f'{{"batch": {batch}, "loss": 1.0}}\n' for batch in batches))
        if is_whole:
            assert check_metrics(path, num_batches=3) == [(0, 1.0), (1, 1.0), (2, 1.0)]
        else:
            with pytest.raises(JobFailedError, match="of 3 batches"):
                check_metrics(path, num_batches=3)


def test_plain_lines_come_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a second only a change of phase is printed at once; the last state is printed at the end."""
    now = [0.0]
    monkeypatch.setattr("headway.daemon.reports.watch_view.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with PlainDisplay(stream) as display:
        for at, batch, phase in (
            (0.0, 0, "running"),
            (0.2, 1, "running"),
            (0.4, 2, "stopping"),
            (1.5, 3, "stopping"),
            (1.6, 4, "stopping"),
        ):
            now[0] = at
            display.show(Snapshot(report=report(batch, phase=phase)))
    printed = [line.split(" · ")[:2] for line in stream.getvalue().splitlines()]
    assert printed == [
        ["demo: running", "batch 1/100"],
        ["demo: stopping", "batch 3/100"],
        ["demo: stopping", "batch 4/100"],
        ["demo: stopping", "batch 5/100"],
    ]


def test_json_lines_come_with_every_change() -> None:
    """An unchanged report is not repeated."""
    stream = io.StringIO()
    with JsonDisplay(stream) as display:
        for batch in (0, 0, 1):
            display.show(Snapshot(report=report(batch)))
    assert stream.getvalue().count("\n") == 2


def test_the_hash_of_the_demo_is_that_of_the_weights_alone(tmp_path: Path) -> None:
    """One flipped bit of one of two files gives another hash; another config does not."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        for shard in ("1.safetensors", "2.safetensors"):
            (tmp_path / name / shard).write_bytes(shard.encode())
    assert weights_hash(tmp_path / "a") == weights_hash(tmp_path / "b")
    (tmp_path / "b" / "2.safetensors").write_bytes(b"2.safetensort")
    assert weights_hash(tmp_path / "a") != weights_hash(tmp_path / "b")


def test_the_line_of_a_traceback_that_names_the_error() -> None:
    """Of a failed worker's text, the line after the last traceback's frames; without one, the last line."""
    text = 'Traceback (most recent call last):\n  File "a"\n    x\nValueError: bad\n\nlast output:\nbatch 3'
    assert traceback_line(text.splitlines()) == "ValueError: bad"
    assert traceback_line(["killed"]) == "killed"
    assert traceback_line([]) == ""


async def test_a_watch_ends_with_an_error_when_etcd_stays_silent() -> None:
    """Work that returns gives its result."""
    session = ClusterSession(ClusterAddress(etcd=("127.0.0.1:1",)), timeout_s=0.2)
    async with session:
        with pytest.raises(StoreUnreachableError, match=r"127\.0\.0\.1:1"):
            await session.while_reachable(asyncio.Event().wait(), patience_s=0.0, probe_every_s=0.01)
        assert await session.while_reachable(asyncio.sleep(0, result=3)) == 3


def test_a_moment_is_a_date_and_a_time() -> None:
    """A moment is formatted by this machine's clock and zone."""
    assert date_and_time(0.0)[:4] in ("1969", "1970")
    assert date_and_time(0.0).endswith(time_of_day(0.0))


@pytest.mark.parametrize("at", [1e308, -1e308, 1e18, float("inf"), float("nan")])
def test_an_impossible_time_is_shown_as_a_question_mark(at: float) -> None:
    """No traceback in `nodes`, `jobs`, `events`, `watch` or `checkpoints`."""
    assert (date_and_time(at), time_of_day(at)) == ("?", "?")
    fact = ReachFact(to="a", to_incarnation="x", port=Port.DAEMON, address="a:1", reason="no", measured_at=at)
    node = NodeRecord(
        name="a", incarnation="x", address="", host="", site="", devices=(), memory_bytes=0, arithmetic_class=""
    )
    view = ClusterView(nodes={"a": node}, reach={"a": ReachRecord(incarnation="x", facts=(fact,))})
    assert reach_lines(view, "a") == ["cannot reach the daemon port of a at a:1: no (since ?)"]


def test_every_setting_that_changes_bits_is_told() -> None:
    """Two jobs of unlike arithmetic have unlike sentences; state that no update uses is left out."""
    trains = [
        TrainSpec(),
        TrainSpec(dtype="bfloat16"),
        TrainSpec(allow_tf32=True),
        TrainSpec(attention_backend="math"),
        TrainSpec(loss_chunk=7),
        TrainSpec(loss_chunk=7, loss_gradient="whole"),
        TrainSpec(compile=True),
        TrainSpec(threads=3),
    ]
    told = {arithmetic_settings(replace(PLAIN, train=train)) for train in trains}
    assert len(told) == len(trains)
    synchronous = replace(PLAIN, train=TrainSpec(schedule="1f1b"), optim=OptimSpec(error_feedback_dtype="bfloat16"))
    assert "error feedback" not in arithmetic_settings(synchronous)
    express = replace(PLAIN.optim.matrices, newton_schulz_coefficients="polar_express")
    told_of = arithmetic_settings(replace(PLAIN, optim=replace(PLAIN.optim, matrices=express)))
    assert "Newton–Schulz in float32 by Polar Express" in told_of


LONG = "gpu-node-17.frankfurt.example.com"


MODEL = "Xeon-8481C-AVX512"


def wide_view() -> ClusterView:
    """The fake cluster, and a node of long names with four devices of one model."""
    view = fake_cluster.cluster_view()
    node = fake_cluster.node("a")
    devices = tuple(replace(node.devices[0], index=index, model=MODEL) for index in range(4))
    record = replace(
        node, name=LONG, address=f"{LONG}:7070", site="frankfurt-rack-7", devices=devices, is_draining=True
    )
    view.apply(Keys.node(LONG), encode(record), mod_revision=5000, create_revision=5000)
    return view


def wide_snapshot() -> Snapshot:
    found = snapshot(wide_view(), "demo", LossHistory())
    assert found is not None
    return found


@given(st.lists(st.text("ab ", max_size=30), max_size=6), st.integers(20, 60))
def test_no_part_is_lost(parts: list[str], width: int) -> None:
    """Whatever the parts, every letter is shown, in order; words that fit are not broken."""
    lines = fitted(parts, width)
    assert "".join("".join(lines).split()) == "".join("".join(parts).split())


def test_a_resized_terminal_shows_one_picture() -> None:
    """80 columns, then 60: the screen is emptied before the new picture is drawn, in its width; once, not each time."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=40, _environ={})
    console._force_terminal = True
    with LiveDisplay(console) as display:
        display.show(wide_snapshot())
        display._live.refresh()
        assert "\x1b[2J" not in stream.getvalue()
        before = len(stream.getvalue())
        console.size = ConsoleDimensions(60, 40)
        display._live.refresh()
        after = stream.getvalue()[before:]
        assert after.index("\x1b[2J") < after.index("headway")
        rows = [line for line in after.splitlines() if "╭" in line or "╰" in line]
        assert len(rows) == 2
        assert all(line.count("─") <= 58 for line in rows)
        display._live.refresh()
        assert stream.getvalue().count("\x1b[2J") == 1


PARTS = (*SPEC.layers, "journal")


class Writer:
    """Changes the fake cluster's view."""

    def __init__(self) -> None:
        self.view: ClusterView = cluster_view()
        self._revision = 1000

    def put(self, key: str, record: object) -> None:
        """Set a key."""
        self._revision += 1
        self.view.apply(key, encode(record), mod_revision=self._revision, create_revision=self._revision)
        assert not self.view.unreadable

    def hold(self, boundary: int, node: str, parts: tuple[str, ...] = PARTS, trouble: str = "") -> None:
        """A node holds parts of a boundary of the plan's timeline."""
        files = {part: StateFile(size_bytes=1, checksum="x") for part in parts}
        record = StateRecord(incarnation=f"{node}-1", generation=3, files=files, trouble=trouble)
        self.put(Keys.state("demo", 1, boundary, node), record)

    def safety(self) -> SafetyReport:
        """Return the report of the job; 50 batches are done."""
        return report_job(self.view.jobs["demo"], self.view.nodes).safety


def test_recomputed_batches_replace_the_old_ones_in_the_curve() -> None:
    """After a rollback from batch 49 to 40 the curve ends at 40, with the new loss."""
    cluster, history = Writer(), LossHistory()
    snapshot(cluster.view, "demo", history)
    assert [batch for batch, _ in history.points] == [48, 49]
    again = ProgressRecord(generation=4, batch=48, loss=9.0, tokens_per_second=1.0, recent=((48, 9.0),))
    cluster.put(Keys.of("demo", "progress"), again)
    shown = snapshot(cluster.view, "demo", history)
    assert shown is not None
    assert shown.losses == ((48, 9.0),)


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


def test_what_a_process_had_told_under_an_older_plan_is_its_own_alone() -> None:
    """It is taken from the plan's seconds once; a process whose seconds have begun at nought has nothing earlier."""
    job = job_with({(1, 0): record("w", {"useful": 40.0}), (2, 0): record("w", {"useful": 100.0})})
    job = replace(job, goodput={**job.goodput, (2, 1): record("dead", {"useful": 70.0})})
    book = GoodputBook()
    for seconds, goodput in ((110.0, job.goodput), (120.0, {})):
        book.add(0, beat(3, useful=seconds), now=seconds)
        [written] = book.changes(replace(job, goodput=goodput), "a").values()
        assert written.earlier == {"useful": 100.0}
    book = GoodputBook()
    book.add(0, beat(3, useful=5.0), now=0.0)
    [written] = book.changes(job, "a").values()
    assert written.earlier == {}


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


PLAN = PlanRecord(
    generation=2,
    timeline=1,
    workers=tuple(
        WorkerPart(node=name, node_incarnation=f"{name}-1", device_index=0, layers=(name,), depth=1) for name in "abc"
    ),
)


def scene(phase: Phase, leaf: str, *, state: WorkerState, proven: Mapping[str, tuple[int, ...]] | None = None) -> Scene:
    """Nodes a, b and c, whose workers are three stages of one job."""
    found = Scene("a", "b", "c")
    found.put(Keys.of("j", "spec"), SpecRecord(spec=JobSpec(job=JobSection(name="j"))))
    found.put(Keys.of("j", "phase"), PhaseRecord(phase=phase, generation=2))
    found.put(Keys.of("j", leaf), PLAN)
    for position, name in enumerate("abc"):
        record = WorkerRecord(
            node=name,
            incarnation="w",
            address=f"{name}:7100",
            pid=1,
            state=state,
            proven=dict.fromkeys((proven or {}).get(name, ()), "w"),
        )
        found.put(Keys.worker("j", 2, position), record)
    return found


def stands(found: Scene, position: int, waits_for: str, awaited_worker: int) -> None:
    record = GoodputRecord(node="abc"[position], incarnation="w", waits_for=waits_for, awaited_worker=awaited_worker)
    found.put(Keys.goodput("j", 2, position), record)


PLAIN = JobSpec(job=JobSection(name="j"))
NARROW = OptimSpec(matrices=GroupSpec(name="muon", momentum_dtype="bfloat16"), error_feedback_dtype="bfloat16")
WIDE_MODEL = replace(PLAIN.model, vocab_size=128_256)
RECORDED = Path(__file__).with_name("displays.txt")


def stage(index: int, node: str, *layers: str, **more: Any) -> StageReport:
    return StageReport(index=index, node=node, device=0, layers=layers, depth=1, worker="running", **more)


def drawn(shown: Snapshot, *, width: int = 80, height: int = 60) -> list[str]:
    """A page, on a screen of this size."""
    stream = io.StringIO()
    Console(file=stream, width=width, height=200).print(render(shown, width=width, height=height))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert len(lines) <= height, "higher than the terminal"
    assert max(map(len, lines)) <= width, "wider than the terminal"
    return lines


def pages() -> Iterator[tuple[str, list[str]]]:
    """`watch` and `status`, on screens of several sizes."""
    for width in (80, 40):
        yield f"watch, {width} columns", drawn(wide_snapshot(), width=width)
    events = tuple(EventRecord(at=0.0, text=f"what happened {number}", generation=1) for number in range(6))
    node = replace(fake_cluster.node("node-0"), site="berlin")
    stages = tuple(stage(index, f"node-{index}", name) for index, name in enumerate(("embed", "block.0", "head")))
    told = replace(report(9), stages=stages, exact_reason="one class", arithmetic=arithmetic_settings(PLAIN))
    full = Snapshot(
        report=told, nodes=(node,), losses=tuple((batch, 3.0 - batch / 10) for batch in range(10)), events=events
    )
    for rows in (20, 16):
        yield f"watch, {rows} rows", drawn(full, height=rows)
    two = stage(0, "a", "embed", "block.0", num_replicas=2, groups=(0, 2))
    other = replace(two, node="b", replica=2, groups=(1,))
    alone = stage(1, "c", "head", recompute="attention")
    layers = ("embed", "block.0", "head")
    shared = replace(report(9), layers=layers, stages=(two, other, alone))
    yield "a stage of two replicas", drawn(Snapshot(report=shared))
    yield "status, which knows one loss: no curve", drawn(Snapshot(report=report(9), losses=((9, 2.0),)))
    yield "a curve that falls", draw_curve([(batch, 10.0 - batch) for batch in range(10)], width=28, height=4)
    yield "a curve of nothing", draw_curve([(0, float("nan"))], width=28, height=4)
    planned = report_line(replace(report(1), planning_since=100.0), now=103.2)
    yield "lines of status", [report_line(report(1), now=103.2), planned]


def lists_of_nodes() -> Iterator[tuple[str, list[str]]]:
    """`nodes`, in a pipe and on a screen, and ways that are blocked."""
    yield "nodes in a pipe", node_lines(wide_view())
    yield "nodes, 60 columns", node_lines(wide_view(), width=60)
    found = Scene("a", "b", "c")
    daemon = ReachFact(to="b", to_incarnation="b-1", port=Port.DAEMON, address="b:7001")
    found.found("a", daemon, fact("b"), fact("c", ""))
    yield "nodes that cannot reach each other", node_lines(found.view)
    cluster, killed = Writer(), NodeFailureRecord(at=1.0, text="worker cpu:0 was killed by signal 9")
    trouble = "worker cpu:0 does not start: port 7100 at 10.0.0.7 is in use"
    told = replace(
        cluster.view.nodes["a"], site="hall", site_is_private=True, down_devices=(0,), worker_trouble=trouble
    )
    yield "no private site", [plain_sites(cluster.view)]
    cluster.put(Keys.node("a"), told)
    for name, number in (("gone", 1), ("b", 1), ("b", 2), ("b", 3)):
        cluster.put(Keys.failure(name, number), killed)
    yield "a worker does not start, a node is in quarantine, one is gone", node_lines(cluster.view)
    yield "a private site", [plain_sites(cluster.view)]
    cluster, leader = Writer(), LeaderRecord(node="b", incarnation="b-1", quarantine_after=2)
    cluster.put(Keys.LEADER, leader)
    for name, number in (("b", 0), ("a", 1)):
        release = f"torch 2.1, headway 1.{number}, AVX"
        cluster.put(Keys.node(name), replace(cluster.view.nodes[name], arithmetic_class=release, protocol=98 + number))
    yield "nodes of two releases", node_lines(cluster.view)
    cluster = Writer()
    for number, job in enumerate("aaab"):
        failed = replace(killed, text=f"its worker failed in job {job}", job=job, is_jobs_error=True)
        cluster.put(Keys.failure("b", number), failed)
    for limit in (3, 2, 0):
        cluster.put(Keys.LEADER, replace(leader, quarantine_after=limit))
        yield f"errors of jobs, with a limit of {limit}", node_lines(cluster.view)[-2:]


def verdicts() -> Iterator[tuple[str, list[str]]]:
    """Whether a finished job was exact, and in what it was computed."""
    for classes, was_rounded in (((), False), (("one",), False), (("one", "two"), False), (("one",), True)):
        last = CheckpointRecord(timeline=1, boundary=150, url="u", arithmetic_classes=classes, was_rounded=was_rounded)
        found = Scene()
        found.put(Keys.of("j", "spec"), SpecRecord(spec=PLAIN))
        found.put(Keys.of("j", "phase"), PhaseRecord(phase=Phase.FINISHED))
        found.put(Keys.of("j", "checkpoint"), last)
        told = report_job(found.view.jobs["j"], found.view.nodes)
        yield f"classes {classes}, rounded {was_rounded}", [f"{told.exact}: {told.exact_reason}"]
    on_cpus = for_devices(PLAIN, [Device(kind="cpu")], source="j", named=set())
    yield "a job on CPUs", [arithmetic_settings(on_cpus)]
    open_job = replace(PLAIN, model=WIDE_MODEL, train=TrainSpec(sequence_length=8192, threads=2), optim=NARROW)
    on_cards = for_devices(open_job, [Device(kind="cuda", capability="9.0")], source="j", named=set())
    yield "an open job on cards", [arithmetic_settings(on_cards)]


def what_a_failure_costs() -> Iterator[tuple[str, list[str]]]:
    """The lines on safety: 50 batches are done."""
    cluster = Writer()
    yield "nothing is written", safety_lines(cluster.safety())
    for node in ("a", "b"):
        cluster.hold(20, node)
    cluster.hold(40, "a")
    cluster.hold(40, "b", SPEC.layers)
    yield "boundary 40 lacks a copy of its journal", safety_lines(cluster.safety())
    cluster.hold(40, "b")
    yield "boundary 40 is whole", safety_lines(cluster.safety())
    cluster.put(Keys.of("demo", "spec"), SpecRecord(spec=SPEC, parent="other, boundary 48"))
    cluster.put(Keys.of("demo", "checkpoint"), CheckpointRecord(timeline=1, boundary=48, url="u"))
    told = report_job(cluster.view.jobs["demo"], cluster.view.nodes)
    numbers = f"lag {told.safety.lag}, of the checkpoint {told.safety.checkpoint_lag}, provisional from"
    yield "a checkpoint at 48", [f"{numbers} {told.provisional_from}, parent {told.parent}"]
    cluster.hold(60, "a", trouble="/mnt/full: cannot be written: No space left on device")
    plan = cluster.view.jobs["demo"].plan
    assert plan is not None
    back = replace(plan, generation=4, timeline=4, ancestry=((1, 20),), boundary=20, furthest=51, reason="node c died")
    cluster.put(Keys.of("demo", "plan"), back)
    yield "a rollback and a full folder", safety_lines(cluster.safety())
    nodes, fault = cluster_view().nodes, SPEC.fault
    jobs = [SPEC, replace(SPEC, fault=replace(fault, copies=1)), replace(SPEC, fault=replace(fault, snapshot_every=0))]
    few = [why_unprotected(SPEC, {}), why_unprotected(SPEC, {"a": nodes["a"]})]
    told_of = [*few, *(why_unprotected(each, nodes) for each in jobs)]
    yield "unprotected: no node, one node, two nodes, one copy, no snapshots", told_of


def losses_of_time() -> Iterator[tuple[str, list[str]]]:
    """Goodput, and the sentence on the largest loss of time."""

    def told(job: JobView) -> list[str]:
        found = report_goodput(job)
        return [goodput_line(found), found.why_slow]

    yield "no worker has reported", told(job_with({}))
    seconds = {"useful": 60.0, "waiting:stage 1 at b:1": 6.0, "waiting:stage 2 at c:1": 4.0}
    several = job_with({(2, 1): record("dead", USEFUL), (3, 0): record("w", seconds, earlier={"useful": 50.0})})
    phase = replace(several.phase, spent_s={"useful": 68.0, "replay": 12.0})
    yield "each worker counts once over its plans", told(replace(several, phase=phase))
    for recent in (
        {"useful": 57.0, "waiting:stage 1 at 10.0.0.7:4242": 43.0},
        {"useful": 50.0, "waiting:the coordinator": 50.0},
        {"useful": 5.0, "replay": 5.0},
        {"useful": 97.0, "idle": 3.0},
        {"useful": 90.0, "telepathy": 10.0},
    ):
        yield f"recently {recent}", told(job_with({(3, 0): record("w", {"useful": 1000.0}, recent=recent)}))
    waits = {"useful": 1.0, "waiting:stage 0 worker 0 at a:5": 9.0}
    view = job_with({(3, 1): record("w", {"useful": 100.0}, recent=waits)})
    assert view.plan is not None
    front, back = view.plan.workers
    stages = (replace(front, groups=(0,)), replace(front, node="c", groups=(1,)), back)
    shared = replace(view, plan=replace(view.plan, workers=stages))
    yield "a replica waits for its sibling", [*told(shared), *(each.name for each in report_job(shared, {}).stages)]


def waits_for_links() -> Iterator[tuple[str, list[str]]]:
    """Who waits for whom, before and while a plan is in force."""
    proven = {"a": (1,), "b": (0,), "c": (1,)}
    found = scene(Phase.PREPARING, "next", state=WorkerState.READY, proven=proven)
    yield "b has not reached c", link_waits(found.view, found.view.jobs["j"])
    found = scene(Phase.RUNNING, "plan", state=WorkerState.RUNNING)
    yield "all are at work", link_waits(found.view, found.view.jobs["j"])
    stands(found, 2, "a neighbour of any name", 1)
    assert awaited_pair(found.view.jobs["j"], PLAN) is None, "two others are at work"
    stands(found, 1, "stage 0 at a:7100", 0)
    yield "c waits for b, and b for a", link_waits(found.view, found.view.jobs["j"])
    stands(found, 0, "stage 1 at an unknown address", 1)
    assert awaited_pair(found.view.jobs["j"], PLAN) in {(0, 1), (1, 0)}, "both ends of one link wait"
    assert standing_pairs(found.view.jobs["j"], PLAN) == {("a", "b"), ("b", "c")}
    found = scene(Phase.RUNNING, "plan", state=WorkerState.RUNNING)
    found.found("a", fact("b"))
    found.found("a", fact("b"), fact("c"))
    yield "a link could not be opened again", link_waits(found.view, found.view.jobs["j"])


SCENES = (pages, lists_of_nodes, verdicts, what_a_failure_costs, losses_of_time, waits_for_links)


def test_displays_are_those_that_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With HEADWAY_RECORD=1 the test writes displays.txt anew, for a human to read what has changed."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    texts = [f"=== {name}\n" + "\n".join([*lines, ""]) for scenes in SCENES for name, lines in scenes()]
    if os.environ.get("HEADWAY_RECORD"):
        RECORDED.write_text("\n".join(texts), encoding="utf-8")
    assert "\n".join(texts) == RECORDED.read_text(encoding="utf-8")
    monkeypatch.undo()
    time.tzset()
