"""The demo's own pieces, the plain display and the curve."""

import asyncio
import dataclasses
import io
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
from headway.daemon.cluster.format import decode, encode
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
from headway.daemon.local.demo import DEMO_JOB, check_metrics, draw_png
from headway.daemon.plan.cluster_plan import layer_range
from headway.daemon.reports.goodput_report import goodput_line, report_goodput
from headway.daemon.reports.job_report import (
    JobReport,
    StageReport,
    arithmetic_settings,
    duration,
    link_waits,
    report_job,
    report_line,
)
from headway.daemon.reports.node_list import alike, date_and_time, node_lines, reach_lines, report_nodes, time_of_day
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
from tests.rigs.blocked_ways import REFUSED, Scene, fact
from tests.rigs.displays import report
from tests.unit.daemon.cli import fake_cluster
from tests.unit.daemon.cli.fake_cluster import SPEC, cluster_view

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


def test_the_curve_falls_from_left_to_right() -> None:
    """A falling loss is drawn from the top left to the bottom right; no finite point draws nothing."""
    lines = draw_curve([(batch, 10.0 - batch) for batch in range(10)], width=28, height=4)
    assert [line[:8].strip() for line in lines] == ["10.000", "", "", "1.000"]
    assert lines[0][8] != "\u2800"
    assert lines[-1][-1] != "\u2800"
    assert lines[0][-1] == lines[-1][8] == "\u2800"
    assert draw_curve([(0, float("nan"))], width=28, height=4) == []


def test_the_picture_is_written(tmp_path: Path) -> None:
    """The loss curve becomes a PNG file."""
    path = draw_png([(0, 3.0), (1, 2.0)], tmp_path / "loss.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


def test_layers_and_durations_for_people() -> None:
    """Consecutive layers and seconds in few characters."""
    assert layer_range(("embed", "block.0", "block.1")) == "embed, block.0-1"
    assert layer_range(("block.7", "head")) == "block.7, head"
    assert [duration(seconds) for seconds in (4.4, 65, 3725)] == ["4 s", "1:05", "1:02:05"]


def test_the_line_of_a_traceback_that_names_the_error() -> None:
    """Of a failed worker's text, the line after the last traceback's frames; without one, the last line."""
    text = 'Traceback (most recent call last):\n  File "a"\n    x\nValueError: bad\n\nlast output:\nbatch 3'
    assert traceback_line(text.splitlines()) == "ValueError: bad"
    assert traceback_line(["killed"]) == "killed"
    assert traceback_line([]) == ""


@pytest.mark.parametrize(("rows", "sees_nodes", "num_events"), [(60, True, 4), (20, False, 1), (16, False, 0)])
def test_a_low_terminal_shows_less_but_never_half(rows: int, sees_nodes: bool, num_events: int) -> None:
    """With few rows the nodes go first, then events and curve; the picture is never higher than the terminal."""
    stages = tuple(
        StageReport(index=index, node=f"node-{index}", device=0, layers=(name,), depth=1, worker="running")
        for index, name in enumerate(("embed", "block.0", "head"))
    )
    events = tuple(EventRecord(at=0.0, text=f"what happened {number}", generation=1) for number in range(6))
    node = NodeRecord(
        name="node-0",
        incarnation="i",
        address="a:1",
        host="a",
        site="berlin",
        devices=(),
        memory_bytes=0,
        arithmetic_class="c",
    )
    picture = render(
        Snapshot(
            report=dataclasses.replace(report(9), stages=stages),
            nodes=(node,),
            losses=tuple((batch, 3.0 - batch / 10) for batch in range(10)),
            events=events,
        ),
        width=80,
        height=rows,
    )
    console = Console(file=io.StringIO(), width=80, height=200)
    console.print(picture)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n") <= rows
    assert ("berlin" in text, text.count("what happened")) == (sees_nodes, num_events)
    assert text.rstrip().endswith("╯")


def test_replicas_share_the_bar_of_their_stage() -> None:
    """Two nodes hold embed: they share one bar, and each has its own line, with its reduction groups."""
    layers = ("embed", "block.0")
    first = StageReport(
        index=0, node="a", device=0, layers=layers, depth=1, worker="running", num_replicas=2, groups=(0, 2)
    )
    second = dataclasses.replace(first, node="b", replica=2, groups=(1,))
    alone = StageReport(index=1, node="c", device=0, layers=("head",), depth=1, worker="running", recompute="attention")
    stages = (first, second, alone)
    console = Console(file=io.StringIO(), width=80)
    shown = dataclasses.replace(report(9), layers=("embed", "block.0", "head"), stages=stages)
    console.print(render(Snapshot(report=shown), width=80))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert " a + b " in text
    assert "stage 0 on b (replica 2 of 2): embed, block.0  groups 1  depth 1  running" in text
    assert "stage 1 on c: head  depth 1  computes attention again  running" in text


def test_one_loss_is_no_curve() -> None:
    """`status` knows the newest loss only; it draws no curve of one point."""
    console = Console(file=io.StringIO(), width=80)
    console.print(render(Snapshot(report=report(9), losses=((9, 2.0),)), width=80))
    assert "2.000 " not in console.file.getvalue()  # type: ignore[attr-defined]


async def test_a_watch_ends_with_an_error_when_etcd_stays_silent() -> None:
    """Work that returns gives its result."""
    session = ClusterSession(ClusterAddress(etcd=("127.0.0.1:1",)), timeout_s=0.2)
    async with session:
        with pytest.raises(StoreUnreachableError, match=r"127\.0\.0\.1:1"):
            await session.while_reachable(asyncio.Event().wait(), patience_s=0.0, probe_every_s=0.01)
        assert await session.while_reachable(asyncio.sleep(0, result=3)) == 3


def test_a_job_that_waits_for_its_plan_says_since_when() -> None:
    """`status` counts from when the plan was asked for; a job that waits for none has no such line."""
    waiting = dataclasses.replace(report(1), planning_since=100.0)
    assert "planning since 3 s" in report_line(waiting, now=103.2)
    assert "planning" not in report_line(report(1), now=103.2)


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


def finished(checkpoint: CheckpointRecord) -> JobReport:
    """Return the report of a job whose plan is gone."""
    records: dict[str, object] = {
        Keys.of("j", "spec"): SpecRecord(spec=JobSpec(job=JobSection(name="j"))),
        Keys.of("j", "phase"): PhaseRecord(phase=Phase.FINISHED),
        Keys.of("j", "checkpoint"): checkpoint,
    }
    view = ClusterView()
    for revision, (key, record) in enumerate(records.items(), start=1):
        view.apply(key, encode(record), mod_revision=revision, create_revision=revision)
    return report_job(view.jobs["j"], view.nodes)


@pytest.mark.parametrize(
    ("classes", "is_exact", "reason"),
    [
        ((), None, ""),
        (("one",), True, "all its workers had one arithmetic class (one)"),
        (("one", "two"), False, "it ran on several arithmetic classes: one; two"),
    ],
)
def test_a_finished_job_tells_whether_it_was_exact(
    classes: tuple[str, ...], is_exact: bool | None, reason: str
) -> None:
    """A finished job has no plan; the verdict comes from the arithmetic classes of its last checkpoint."""
    report = finished(CheckpointRecord(timeline=1, boundary=150, url="u", arithmetic_classes=classes))
    assert (report.exact, report.exact_reason) == (is_exact, reason)


def test_a_job_that_wire_compression_has_rounded_is_not_exact() -> None:
    """The job is finished and of one arithmetic class, but one of its plans compressed a link."""
    told = CheckpointRecord(timeline=1, boundary=150, url="u", arithmetic_classes=("one",), was_rounded=True)
    report = finished(told)
    assert report.exact is False
    assert report.exact_reason == "wire compression has rounded what some of its links carried"


PLAIN = JobSpec(job=JobSection(name="j"))


def test_a_job_on_a_cpu() -> None:
    """The defaults, resolved for CPUs."""
    spec = for_devices(PLAIN, [Device(kind="cpu")], source="j", named=set())
    assert arithmetic_settings(spec) == (
        "computes in float32, Newton–Schulz in float32, attention by flash, TF32 off, 1 thread per worker; "
        "all algorithms are deterministic"
    )


def test_an_open_job_on_cards_says_what_the_cards_decided() -> None:
    """bfloat16 with masters, chunks, narrow state and two threads."""
    open_job = replace(
        PLAIN,
        model=replace(PLAIN.model, vocab_size=128_256),
        train=TrainSpec(sequence_length=8192, threads=2),
        optim=OptimSpec(matrices=GroupSpec(name="muon", momentum_dtype="bfloat16"), error_feedback_dtype="bfloat16"),
    )
    spec = for_devices(open_job, [Device(kind="cuda", capability="9.0")], source="j", named=set())
    assert arithmetic_settings(spec) == (
        "computes in bfloat16 with float32 masters, Newton–Schulz in bfloat16, momentum and error feedback kept in "
        "bfloat16, attention by flash, logits of 512 tokens at once, TF32 off, 2 threads per worker; all algorithms "
        "are deterministic"
    )


def test_every_setting_that_changes_bits_is_told() -> None:
    """Two jobs of unlike arithmetic have unlike sentences; state that no update uses is left out."""
    trains = [
        TrainSpec(),
        TrainSpec(dtype="bfloat16"),
        TrainSpec(allow_tf32=True),
        TrainSpec(attention_backend="math"),
        TrainSpec(loss_chunk=7),
        TrainSpec(compile=True),
        TrainSpec(threads=3),
    ]
    told = {arithmetic_settings(replace(PLAIN, train=train)) for train in trains}
    assert len(told) == len(trains)
    synchronous = replace(PLAIN, train=TrainSpec(schedule="1f1b"), optim=OptimSpec(error_feedback_dtype="bfloat16"))
    assert "error feedback" not in arithmetic_settings(synchronous)


def test_the_page_shows_it_below_the_verdict() -> None:
    """One line after `exact: yes`."""
    console = Console(file=io.StringIO(), width=200, height=60)
    told = replace(report(3), exact_reason="one class", arithmetic=arithmetic_settings(PLAIN))
    console.print(render(Snapshot(report=told), width=200, height=60))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "arithmetic: computes in float32" in shown
    assert shown.index("exact: yes") < shown.index("arithmetic:")


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


@pytest.mark.parametrize("width", [80, 60, 40])
def test_watch_shows_every_number_on_a_narrow_screen(width: int) -> None:
    """Nothing is cut off at the right: batch, loss, rate, time left, the node's name; no line is too wide."""
    stream = io.StringIO()
    Console(file=stream, width=width).print(render(wide_snapshot(), width=width))
    shown = stream.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for text in ("batch 50/150", "provisional from 0", "loss 2.5000", "4,096 tokens/s", "1:40 left"):
        assert text in shown
    assert "…" not in shown


@pytest.mark.parametrize("width", [80, 60])
def test_nodes_fit_a_narrow_screen(width: int) -> None:
    """A node's facts on several lines, indented, each of them whole."""
    lines = node_lines(wide_view(), width=width)
    assert max(map(len, lines)) <= width
    for text in (LONG, f"{LONG}:7070", "site frankfurt-rack-7", f"4 × cpu {MODEL}", "(draining)"):
        assert any(text in line for line in lines), text
    assert len([line for line in lines if not line.startswith(" ")]) == 3


def test_in_a_pipe_a_node_is_one_line() -> None:
    """Programs read one line a node, however long."""
    assert len(node_lines(wide_view())) == 3
    assert alike(["H200"] * 8 + ["cpu"]) == "8 × H200, cpu"


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


def test_a_boundary_counts_when_every_part_has_its_copies() -> None:
    """Boundary 20 lies on both nodes, 40 lacks the journal's copy: a failure would go back 30 batches."""
    cluster = Writer()
    for node in ("a", "b"):
        cluster.hold(20, node)
    cluster.hold(40, "a")
    cluster.hold(40, "b", SPEC.layers)
    found = cluster.safety()
    assert (found.restorable, found.copies, found.lag, found.unprotected) == ((20,), 2, 30, "")
    assert report_job(cluster.view.jobs["demo"], cluster.view.nodes).provisional_from == 20
    cluster.hold(40, "b")
    assert cluster.safety().restorable == (40, 20)
    assert cluster.safety().lag == 10
    assert safety_lines(cluster.safety()) == ["restorable: boundary 40, 20 (2 copies), 10 batches ago"]


def test_without_any_boundary_everything_would_be_lost() -> None:
    """50 batches are done, nothing is written, then a checkpoint is."""
    cluster = Writer()
    assert cluster.safety().lag == 50
    assert safety_lines(cluster.safety()) == ["restorable: nothing newer than 50 batches ago"]
    cluster.put(Keys.of("demo", "checkpoint"), CheckpointRecord(timeline=1, boundary=48, url="u"))
    found = cluster.safety()
    assert (found.lag, found.checkpoint_lag) == (2, 2)


def test_one_node_or_one_copy_is_unprotected() -> None:
    """The reason is told; with two nodes and two copies there is none."""
    nodes = cluster_view().nodes
    assert why_unprotected(SPEC, nodes) == ""
    assert why_unprotected(SPEC, {"a": nodes["a"]}).startswith("one node")
    assert why_unprotected(SPEC, {}) == "no node is up"
    alone = replace(SPEC, fault=replace(SPEC.fault, copies=1))
    assert why_unprotected(alone, nodes).startswith("copies = 1")
    without = replace(SPEC, fault=replace(SPEC.fault, snapshot_every=0))
    assert why_unprotected(without, nodes).startswith("snapshot_every = 0")


def test_trouble_and_rollbacks_are_shown() -> None:
    """A full checkpoint folder and the last rollback stand among the lines."""
    cluster = Writer()
    cluster.hold(20, "a", trouble="/mnt/full: cannot be written: No space left on device")
    plan = cluster.view.jobs["demo"].plan
    assert plan is not None
    back = replace(plan, generation=4, timeline=4, ancestry=((1, 20),), boundary=20, furthest=51, reason="node c died")
    assert decode(encode(back), PlanRecord) == back
    cluster.put(Keys.of("demo", "plan"), back)
    lines = safety_lines(cluster.safety())
    assert "rollbacks: 1; the last to boundary 20, 31 batches recomputed (node c died)" in lines
    assert any(line.startswith("warning: boundary 20 on a: /mnt/full") for line in lines)


def test_a_job_from_a_checkpoint_names_its_parent() -> None:
    """What was submitted says whose checkpoint it began with; later checkpoints of its own do not hide that."""
    cluster = Writer()
    assert report_job(cluster.view.jobs["demo"], cluster.view.nodes).parent == ""
    cluster.put(Keys.of("demo", "spec"), SpecRecord(spec=SPEC, parent="other, boundary 48"))
    cluster.put(Keys.of("demo", "checkpoint"), CheckpointRecord(timeline=1, boundary=60, url="u"))
    assert report_job(cluster.view.jobs["demo"], cluster.view.nodes).parent == "other, boundary 48"


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


PLAN = PlanRecord(
    generation=2,
    timeline=1,
    workers=tuple(
        WorkerPart(node=name, node_incarnation=f"{name}-1", device_index=0, layers=(name,), depth=1) for name in "abc"
    ),
)


def scene(phase: Phase, leaf: str, *, state: WorkerState, proven: dict[str, tuple[int, ...]] | None = None) -> Scene:
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
            proven=(proven or {}).get(name, ()),
        )
        found.put(Keys.worker("j", 2, position), record)
    return found


def stands(found: Scene, position: int, waits_for: str, awaited_worker: int) -> None:
    record = GoodputRecord(node="abc"[position], incarnation="w", waits_for=waits_for, awaited_worker=awaited_worker)
    found.put(Keys.goodput("j", 2, position), record)


def test_nodes_shows_each_way_that_is_blocked() -> None:
    found = Scene("a", "b", "c")
    daemon = ReachFact(to="b", to_incarnation="b-1", port=Port.DAEMON, address="b:7001")
    found.found("a", daemon, fact("b"), fact("c", ""))
    lines = "\n".join(node_lines(found.view))
    assert f"cannot reach the worker port of b at b:7100: {REFUSED}" in lines
    [told] = [node for node in report_nodes(found.view) if node["name"] == "a"]
    assert {entry["reason"] for entry in told["reach"]} == {"", REFUSED}
    assert all("measured_at" in entry for entry in told["reach"])


def test_status_names_who_has_not_reached_whom_before_a_plan_is_in_force() -> None:
    found = scene(Phase.PREPARING, "next", state=WorkerState.READY, proven={"a": (1,), "b": (0,), "c": (1,)})
    assert link_waits(found.view, found.view.jobs["j"]) == ["waiting for stage 1 on b to reach stage 2 on c at c:7100"]


def test_a_job_that_stands_still_names_the_pair_at_the_end_of_the_chain() -> None:
    """c waits for b, and b for a, which is at work: the sentence names a, however many stages are between."""
    found = scene(Phase.RUNNING, "plan", state=WorkerState.RUNNING)

    def job() -> JobView:
        return found.view.jobs["j"]

    assert link_waits(found.view, job()) == []
    stands(found, 2, "a neighbour of any name", 1)
    assert awaited_pair(job(), PLAN) is None, "two others are at work"
    stands(found, 1, "stage 0 at a:7100", 0)
    assert link_waits(found.view, job()) == ["no progress: stage 1 on b waits for stage 0 on a"]
    stands(found, 0, "stage 1 at an unknown address", 1)
    assert awaited_pair(job(), PLAN) in {(0, 1), (1, 0)}, "both ends of one link wait"
    assert standing_pairs(job(), PLAN) == {("a", "b"), ("b", "c")}


def test_a_link_that_could_not_be_reopened_is_shown_first() -> None:
    found = scene(Phase.RUNNING, "plan", state=WorkerState.RUNNING)
    found.found("a", fact("b"))
    found.found("a", fact("b"), fact("c"))
    [told] = link_waits(found.view, found.view.jobs["j"])
    assert "a cannot reach the worker port of b at b:7100" in told
