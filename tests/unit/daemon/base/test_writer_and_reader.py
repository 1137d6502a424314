"""A daemon's history on disk, and how it is read back with the workers' files beside it."""

import json
import os
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import structlog
import structlog.testing

from headway.daemon.base import logging as events
from headway.daemon.base.errors import ConfigError
from headway.daemon.base.logging import HistoryWriter, LossyLogger, configure_logs
from headway.daemon.cluster.format import encode, to_builtins
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase, PhaseRecord, PlanRecord, WorkerPart
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import PlanLog
from headway.stages.schedule.operations import Forward
from headway.stages.telemetry.history import HistoryFile
from tests.chaos.read_history import read_history

PLAN = PlanRecord(
    generation=3,
    timeline=3,
    boundary=20,
    ancestry=((1, 20),),
    source="nodes",
    source_timeline=1,
    workers=(WorkerPart(node="a", node_incarnation="x", device_index=0, layers=("embed", "head"), depth=2),),
)


def recorded(folder: Path, job: str) -> HistoryFile:
    """A worker's history with one operation of a job's generation 3."""
    history = HistoryFile(folder, f"{job}-x", node="n", incarnation="x")
    history.begin(job=job, timeline=3, generation=3, stage=1, worker=2)
    history.record(Forward(7, 1), version=6, num_versions_live=2, started=1.5, ended=2.0)
    return history


def test_every_event_of_the_history_is_logged_somewhere() -> None:
    """A line that was renamed in the log would be missing from the history without a word."""
    here = Path(events.__file__)
    sources = [path.read_text() for path in here.parents[1].rglob("*.py") if path != here]
    logged = {event for event in events.DAEMON_EVENTS if any(f'"{event}",' in text for text in sources)}
    logged |= {event for event in events.DAEMON_EVENTS if any(f'"{event}")' in text for text in sources)}
    assert logged == events.DAEMON_EVENTS


def test_chosen_log_lines_are_copied_and_others_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log of three lines, one of them about nothing: two in the history, with both clocks and the incarnation."""
    configured = structlog.get_config()
    try:
        configure_logs("info", "json", node="node-1", history=tmp_path)
        log = structlog.get_logger()
        log.info("node_registered", incarnation="abc", address="h:1")
        log.info("tea_made", sugar=2)
        log.warning("worker_exited", worker="cpu:0", pid=7, reason="killed")
    finally:
        for processor in structlog.get_config()["processors"]:
            if isinstance(processor, HistoryWriter):
                processor.file.close()
        structlog.configure(**configured)
        structlog.contextvars.clear_contextvars()
    lines = [json.loads(line) for line in (tmp_path / "daemons/node-1-0000.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["node_registered", "worker_exited"]
    assert all(line["node"] == "node-1" and line["incarnation"] == "abc" for line in lines)
    assert lines[0]["monotonic"] <= lines[1]["monotonic"]
    assert lines[1]["pid"] == 7
    assert "wall" in lines[1]
    assert capsys.readouterr().err.count("\n") == 3, "the log itself keeps every line"


def test_a_history_that_cannot_be_written_ends_with_one_log_line(tmp_path: Path) -> None:
    """The daemon's next log lines continue without a history."""
    writer = HistoryWriter(tmp_path, node="n")
    writer.file._descriptor = os.open("/proc/self/comm", os.O_RDONLY)
    told = writer(None, "info", {"event": "goal_set"})
    assert "daemons/n: " in told["history_ended"]
    assert "history_ended" not in writer(None, "info", {"event": "goal_set"})


def test_a_log_that_cannot_be_written_raises_nothing() -> None:
    """Two lines meet a full disk; the first line that finds room comes with their number."""

    class FullStream(StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    logger = LossyLogger(FullStream())
    logger.msg("one")
    logger.msg("two")
    logger._stream = StringIO()
    logger.msg("three")
    assert logger._stream.getvalue() == "2 log lines were late or lost\nthree\n"


def test_plans_and_operations_of_one_job_are_read(tmp_path: Path) -> None:
    """A worker's file of job `a-b`, one of another job, a daemon's plan: the job's operation and its plan."""
    for job in ("a-b", "other"):
        history = recorded(tmp_path, job)
        history.event("loaded", layer="embed", boundary=20, source="path", source_timeline=1)
        history.close()
    writer = HistoryWriter(tmp_path, node="n")
    for job, plan in (("a-b", PLAN), ("other", replace(PLAN, generation=4))):
        writer(None, "info", {"event": "plan_seen", "job": job, "plan": to_builtins(plan)})
    writer(None, "info", {"event": "phase_seen", "job": "a-b", "phase": "finished"})
    writer.file.close()
    found = read_history(tmp_path, "a-b")
    (operation,) = found.operations
    assert (operation.generation, operation.worker, operation.op) == (3, 2, "forward")
    assert (operation.batch, operation.microbatch, operation.version, operation.started) == (7, 1, 6, 1.5)
    (seen,) = found.plans
    assert (seen.boundary, seen.ancestry, seen.source_timeline) == (20, ((1, 20),), 1)
    assert seen.stages == (("embed", "head"),)
    (load,) = found.loads
    assert (load.generation, load.layer, load.source_timeline) == (3, "embed", 1)
    assert found.is_finished
    assert found.ended_at is not None


def test_a_torn_last_line_is_counted_and_a_broken_line_is_an_error(tmp_path: Path) -> None:
    """A writer may be killed in the middle of a line; garbage inside a file is an error."""
    path = tmp_path / "job-x-0000.jsonl"
    recorded(tmp_path, "job").close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op": "back')
    found = read_history(tmp_path, "job")
    assert (len(found.operations), found.num_torn) == (1, 1)
    path.write_bytes(b'{"op": "back\n' + whole)
    with pytest.raises(ConfigError, match="line 1"):
        read_history(tmp_path, "job")


def test_each_plan_and_phase_is_logged_once(tmp_path: Path) -> None:
    """A view shown twice, then with a new plan and phase: two plans and two phases in the log."""
    view, plan_log = ClusterView(), PlanLog()
    key, phase_key = Keys.of("job", "plan"), Keys.of("job", "phase")

    def show(plan: PlanRecord, phase: Phase, revision: int) -> None:
        record = PhaseRecord(phase=phase, generation=plan.generation)
        view.apply(key, encode(plan), mod_revision=revision, create_revision=1)
        view.apply(phase_key, encode(record), mod_revision=revision, create_revision=1)
        plan_log.note(view)
        plan_log.note(view)

    with structlog.testing.capture_logs() as lines:
        show(PLAN, Phase.RUNNING, 2)
        show(PLAN, Phase.RUNNING, 3)
        show(replace(PLAN, generation=4), Phase.CHANGING, 4)
    assert [(line["event"], line["generation"]) for line in lines] == [
        ("plan_seen", 3),
        ("phase_seen", 3),
        ("plan_seen", 4),
        ("phase_seen", 4),
    ]
