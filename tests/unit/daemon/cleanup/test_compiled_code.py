"""Compiled code is pruned, in a folder of files whose times the test sets."""

import os
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from headway.daemon.cleanup.compiled_code import KEPT_S, keep_small, needed_since, prune
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.records.records import Phase, PhaseRecord, SpecRecord
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.stages.spec import TrainSpec

DAY_S = 86400.0
NOW = 1e9
AGES_DAYS = {"aa/new.so": 0.5, "bb/week.so": 7, "cc/used.so": 29, "fxgraph/dd/old/entry": 31, "ee/older.cpp": 90}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five files of 100 bytes, last used so many days ago; half of them were written long before."""
    for number, (name, age_days) in enumerate(AGES_DAYS.items()):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"c" * 100)
        used_at = NOW - age_days * DAY_S
        os.utime(path, (used_at, used_at - number % 2 * 100 * DAY_S))
    lock = tmp_path / "locks" / "a.lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, 0))
    return tmp_path


def left(folder: Path) -> set[str]:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert "locks/a.lock" in files
    return files - {"locks/a.lock"}


def test_compiled_code_unused_for_a_month_is_deleted(folder: Path) -> None:
    """Old code that was used since stays, and so does a compiler's lock of any age."""
    assert prune(folder, now=NOW) == 200
    assert left(folder) == {"aa/new.so", "bb/week.so", "cc/used.so"}
    assert prune(folder, now=NOW) == 0


def test_compiled_code_beyond_the_limit_goes_by_last_use(folder: Path) -> None:
    """With room for two files, the newest two stay. Code that was used just now stays even without room."""
    assert prune(folder, now=NOW, most_bytes=250) == 300
    assert left(folder) == {"aa/new.so", "bb/week.so"}
    assert prune(folder, now=NOW, most_bytes=0) == 100
    assert left(folder) == {"aa/new.so"}


def test_code_that_an_active_job_may_use_stays(folder: Path) -> None:
    """The job was submitted 40 days ago, so its workers loaded their code since then."""
    assert prune(folder, now=NOW, needed_since=NOW - 40 * DAY_S, most_bytes=0) == 100
    assert left(folder) == AGES_DAYS.keys() - {"ee/older.cpp"}


def test_folders_that_stay_empty_for_a_month_are_deleted(folder: Path) -> None:
    """A folder that was emptied just now may still be written to."""
    present = folder.stat().st_mtime
    assert prune(folder, now=present) == 500
    assert {path.name for path in folder.iterdir()} == {"aa", "bb", "cc", "ee", "fxgraph", "locks"}
    assert prune(folder, now=present + KEPT_S + DAY_S) == 0
    assert {path.name for path in folder.iterdir()} == {"locks"}
    assert prune(folder / "nowhere", now=NOW) == 0


def test_only_jobs_that_compile_and_are_not_over_need_code() -> None:
    """Submitted first: finished; second: does not compile; third: is paused → the third's time counts."""
    spec = JobSpec(job=JobSection(name="j"), train=TrainSpec(compile=True))
    plain = replace(spec, train=TrainSpec())
    view = ClusterView()
    assert needed_since(view) == inf
    phases = (Phase.FINISHED, Phase.RUNNING, Phase.PAUSED, Phase.RUNNING)
    for at, of_job, phase in zip((1.0, 2.0, 3.0, 4.0), (spec, plain, spec, spec), phases, strict=True):
        submission = SpecRecord(spec=of_job, submitted_at=at)
        view.jobs[str(at)] = JobView(name=str(at), submission=submission, phase=PhaseRecord(phase=phase))
    assert needed_since(view) == 3.0


async def test_nothing_is_deleted_while_etcd_is_unreachable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cleanup retries soon; once etcd is back, old code goes, and the next look is a day later."""
    view, slept = ClusterView(), list[float]()

    class EnoughError(Exception):
        """Ends the loop."""

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            assert left(folder) == AGES_DAYS.keys()
            view.steady_since = 0.0
        if len(slept) == 3:
            raise EnoughError

    monkeypatch.setattr("headway.daemon.cleanup.compiled_code.asyncio.sleep", sleep)
    monkeypatch.setattr("headway.daemon.cleanup.compiled_code.time.time", lambda: NOW)
    with pytest.raises(EnoughError):
        await keep_small(folder, view)
    assert slept == [60.0, 60.0, DAY_S]
    assert left(folder) == {"aa/new.so", "bb/week.so", "cc/used.so"}
