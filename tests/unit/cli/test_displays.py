"""The demo's own pieces, the plain display and the curve."""

import io
from pathlib import Path

import pytest

from headway.daemon.client.job_report import JobReport, duration, layer_range
from headway.daemon.client.job_watch import traceback_line
from headway.daemon.client.loss_curve import draw_curve
from headway.daemon.client.watch_view import JsonDisplay, PlainDisplay, Snapshot
from headway.daemon.errors import JobFailedError
from headway.daemon.jobs.job_file import parse_job, read_job
from headway.daemon.local.demo import DEMO_JOB, check_metrics, draw_png

DOCS = Path(__file__).resolve().parents[3] / "docs" / "jobs"


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
    assert parse_job(DEMO_JOB) == read_job(DOCS / "demo.toml")


def test_a_lost_or_doubled_batch_is_told(tmp_path: Path) -> None:
    """The demo's check of the metrics refuses a gap and a repetition, and takes a whole file."""
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
    monkeypatch.setattr("headway.daemon.client.watch_view.time.monotonic", lambda: now[0])
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
