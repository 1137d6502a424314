"""Logs of jobs are pruned, in a folder of files whose times the test sets."""

import os
from pathlib import Path

import pytest

from headway.daemon.cleanup.job_logs import pruning, unfinished
from headway.daemon.records.records import Phase, PhaseRecord
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView

DAY_S = 86400.0
NOW = 1e9
AGES_DAYS = {"new.log": 1, "week.log": 7, "week.log.1": 8, "old.log": 40, "quiet.log": 50, "quiet.log.1": 60}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six files of 100 bytes, written and read so many days ago."""
    for name, age_days in AGES_DAYS.items():
        (tmp_path / name).write_bytes(b"l" * 100)
        os.utime(tmp_path / name, (NOW - age_days * DAY_S,) * 2)
    return tmp_path


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_logs_unused_for_a_month_are_deleted(folder: Path) -> None:
    """Logs of an active job stay, even when its workers print nothing."""
    assert pruning(folder, {"quiet"}, now=NOW)() == 100
    assert left(folder) == AGES_DAYS.keys() - {"old.log"}
    assert pruning(folder, frozenset(), now=NOW)() == 200
    assert left(folder) == {"new.log", "week.log", "week.log.1"}


def test_logs_beyond_the_limit_go_by_last_use(folder: Path) -> None:
    """With room for three, the active job's two stay and one more; without room, all go."""
    assert pruning(folder, {"quiet"}, now=NOW, most_bytes=300)() == 300
    assert left(folder) == {"new.log", "quiet.log", "quiet.log.1"}
    assert pruning(folder, frozenset(), now=NOW, most_bytes=0)() == 300
    assert not left(folder)


def test_a_log_used_within_an_hour_stays(folder: Path) -> None:
    """Its job ended half an hour ago, and people may still read why."""
    os.utime(folder / "new.log", (NOW - 1800.0,) * 2)
    pruning(folder, frozenset(), now=NOW, most_bytes=0)()
    assert left(folder) == {"new.log"}


def test_a_job_that_can_be_resumed_keeps_its_logs() -> None:
    phases = {"a": Phase.RUNNING, "b": Phase.FINISHED, "c": Phase.PAUSED, "d": Phase.CANCELLED, "e": Phase.QUEUED}
    jobs = {name: JobView(name=name, phase=PhaseRecord(phase=phase)) for name, phase in phases.items()}
    assert unfinished(ClusterView(jobs=jobs)) == {"a", "c", "e"}
