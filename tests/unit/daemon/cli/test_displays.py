"""The demo's own pieces, the plain display and the curve."""

import asyncio
import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.client.job_watch import traceback_line
from headway.daemon.errors import JobFailedError, StoreUnreachableError
from headway.daemon.jobs.job_file import parse_job, read_job_file
from headway.daemon.local.demo import DEMO_JOB, check_metrics, draw_png
from headway.daemon.planning.cluster_plan import layer_range
from headway.daemon.records.records import EventRecord, NodeRecord
from headway.daemon.reports.job_report import JobReport, StageReport, duration, report_line
from headway.daemon.reports.watch_view import JsonDisplay, PlainDisplay, Snapshot, draw_curve, render

DOCS = Path(__file__).resolve().parents[4] / "docs" / "jobs"


def report(batch: int, *, phase: str = "running") -> JobReport:
    """A job after a batch."""
    return JobReport(
        name="demo",
        phase=phase,
        desired="running",
        reason="",
        error="",
        generation=1,
        timeline=1,
        batch=batch,
        batches=100,
        loss=2.0,
        tokens_per_second=None,
        seconds_left=None,
        exact=True,
        exact_reason="",
        plan_reason="",
        layers=("embed", "head"),
        stages=(),
        next_stages=(),
        checkpoint_boundary=None,
        checkpoint_url="",
        submitted_at=0.0,
        since=0.0,
    )


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
