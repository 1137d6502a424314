"""Logs of jobs are pruned, in a folder of files whose times the test sets."""

import os
from pathlib import Path

import pytest

from headway.daemon.cleanup.job_logs import pruning, unfinished
from headway.daemon.records.records import Phase, PhaseRecord
from headway.daemon.view.cluster_view import ClusterView, JobView

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


def test_logs_that_nobody_has_used_for_a_month_go(folder: Path) -> None:
    """But those of a job that is not over: its workers have printed nothing for long."""
    assert pruning(folder, {"quiet"}, now=NOW)() == 100
    assert left(folder) == AGES_DAYS.keys() - {"old.log"}
    assert pruning(folder, frozenset(), now=NOW)() == 200
    assert left(folder) == {"new.log", "week.log", "week.log.1"}


def test_logs_that_are_too_much_go_by_their_last_use(folder: Path) -> None:
    """Room for three: the quiet job's two stay, and one more; room for none: all of them go."""
    assert pruning(folder, {"quiet"}, now=NOW, most_bytes=300)() == 300
    assert left(folder) == {"new.log", "quiet.log", "quiet.log.1"}
    assert pruning(folder, frozenset(), now=NOW, most_bytes=0)() == 300
    assert not left(folder)


def test_what_was_just_used_stays(folder: Path) -> None:
    """Its job ended half an hour ago: there is time to read why."""
    os.utime(folder / "new.log", (NOW - 1800.0,) * 2)
    pruning(folder, frozenset(), now=NOW, most_bytes=0)()
    assert left(folder) == {"new.log"}


def test_a_job_that_may_go_on_is_not_over() -> None:
    phases = {"a": Phase.RUNNING, "b": Phase.FINISHED, "c": Phase.PAUSED, "d": Phase.CANCELLED, "e": Phase.QUEUED}
    jobs = {name: JobView(name=name, phase=PhaseRecord(phase=phase)) for name, phase in phases.items()}
    assert unfinished(ClusterView(jobs=jobs)) == {"a", "c", "e"}
