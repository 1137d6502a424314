"""What nobody needs is deleted once a day, from folders of files whose times the test sets."""

import os
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from headway.daemon.agent.sweeps import (
    DATA_KEPT_S,
    DOWNLOAD_KEPT_S,
    KEPT_S,
    code_needed_since,
    named,
    prune,
    prune_logs,
    sweep_daily,
    sweep_data,
    unfinished,
)
from headway.daemon.blobs.download import INCOMING
from headway.daemon.cluster.records import Phase, PhaseRecord, SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec, SourceSpec
from headway.stages.data.shard_index import INDEX_NAME
from headway.stages.spec import TrainSpec
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

DAY = 86400.0
NOW = 1e9
AGES_DAYS = {"aa/new.so": 0.5, "bb/week.so": 7, "cc/used.so": 29, "fxgraph/dd/old/entry": 31, "ee/older.cpp": 90}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five files of 100 bytes, last used so many days ago; half of them were written long before."""
    for number, (name, age_days) in enumerate(AGES_DAYS.items()):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"c" * 100)
        used_at = NOW - age_days * DAY
        os.utime(path, (used_at, used_at - number % 2 * 100 * DAY))
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
    assert prune(folder, now=NOW, needed_since=NOW - 40 * DAY, most_bytes=0) == 100
    assert left(folder) == AGES_DAYS.keys() - {"ee/older.cpp"}


def test_folders_that_stay_empty_for_a_month_are_deleted(folder: Path) -> None:
    """A folder that was emptied just now may still be written to."""
    present = folder.stat().st_mtime
    assert prune(folder, now=present) == 500
    assert {path.name for path in folder.iterdir()} == {"aa", "bb", "cc", "ee", "fxgraph", "locks"}
    assert prune(folder, now=present + KEPT_S + DAY) == 0
    assert {path.name for path in folder.iterdir()} == {"locks"}
    assert prune(folder / "nowhere", now=NOW) == 0


def test_only_jobs_that_compile_and_are_not_over_need_code() -> None:
    """Submitted first: finished; second: does not compile; third: is paused → the third's time counts."""
    spec = JobSpec(job=JobSection(name="j"), train=TrainSpec(compile=True))
    plain = replace(spec, train=TrainSpec())
    view = ClusterView()
    assert code_needed_since(view) == inf
    phases = (Phase.FINISHED, Phase.RUNNING, Phase.PAUSED, Phase.RUNNING)
    for at, of_job, phase in zip((1.0, 2.0, 3.0, 4.0), (spec, plain, spec, spec), phases, strict=True):
        submission = SpecRecord(spec=of_job, submitted_at=at)
        view.jobs[str(at)] = JobView(name=str(at), submission=submission, phase=PhaseRecord(phase=phase))
    assert code_needed_since(view) == 3.0


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

    monkeypatch.setattr("headway.daemon.agent.sweeps.asyncio.sleep", sleep)
    monkeypatch.setattr("headway.daemon.agent.sweeps.time.time", lambda: NOW)
    with pytest.raises(EnoughError):
        await sweep_daily(view, code=folder, logs=folder / "logs", data=folder / "data")
    assert slept == [60.0, 60.0, DAY]
    assert left(folder) == {"aa/new.so", "bb/week.so", "cc/used.so"}


LOG_AGES_DAYS = {"new.log": 1, "week.log": 7, "week.log.1": 8, "old.log": 40, "quiet.log": 50, "quiet.log.1": 60}


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Six files of 100 bytes, written and read so many days ago."""
    for name, age_days in LOG_AGES_DAYS.items():
        (tmp_path / name).write_bytes(b"l" * 100)
        os.utime(tmp_path / name, (NOW - age_days * DAY,) * 2)
    return tmp_path


def test_logs_unused_for_a_month_are_deleted(logs: Path) -> None:
    """Logs of an active job stay, even when its workers print nothing."""
    assert prune_logs(logs, {"quiet"}, now=NOW) == 100
    assert {path.name for path in logs.iterdir()} == LOG_AGES_DAYS.keys() - {"old.log"}
    assert prune_logs(logs, frozenset(), now=NOW) == 200
    assert {path.name for path in logs.iterdir()} == {"new.log", "week.log", "week.log.1"}


def test_logs_beyond_the_limit_go_by_last_use(logs: Path) -> None:
    """With room for three, the active job's two stay and one more; without room, all go."""
    assert prune_logs(logs, {"quiet"}, now=NOW, most_bytes=300) == 300
    assert {path.name for path in logs.iterdir()} == {"new.log", "quiet.log", "quiet.log.1"}
    assert prune_logs(logs, frozenset(), now=NOW, most_bytes=0) == 300
    assert not {path.name for path in logs.iterdir()}


def test_a_log_used_within_an_hour_stays(logs: Path) -> None:
    """Its job ended half an hour ago, and people may still read why."""
    os.utime(logs / "new.log", (NOW - 1800.0,) * 2)
    prune_logs(logs, frozenset(), now=NOW, most_bytes=0)
    assert {path.name for path in logs.iterdir()} == {"new.log"}


def test_a_job_that_can_be_resumed_keeps_its_logs() -> None:
    phases = {"a": Phase.RUNNING, "b": Phase.FINISHED, "c": Phase.PAUSED, "d": Phase.CANCELLED, "e": Phase.QUEUED}
    jobs = {name: JobView(name=name, phase=PhaseRecord(phase=phase)) for name, phase in phases.items()}
    assert unfinished(ClusterView(jobs=jobs)) == {"a", "c", "e"}


def data_set(cache: Path, name: str, *, age_s: float, index: str = INDEX_NAME) -> Path:
    """A folder of 8 bytes of shards, last used some time ago."""
    folder = cache / name
    (folder / index).parent.mkdir(parents=True)
    (folder / index).write_text("{}")
    (folder / "shard-0.bin").write_bytes(bytes(8))
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (NOW - age_s, NOW - age_s))
    return folder


def test_a_data_set_goes_when_no_job_names_it_any_more(tmp_path: Path) -> None:
    """Forgotten for more than a month → deleted; named by a job, used since, or the built-in text → there."""
    forgotten, needed, recent = ("f" * 64, "e" * 64, "d" * 64)
    gone = data_set(tmp_path, forgotten, age_s=DATA_KEPT_S + DAY)
    stay = [
        data_set(tmp_path, needed, age_s=DATA_KEPT_S + DAY),
        data_set(tmp_path, recent, age_s=DATA_KEPT_S - DAY),
        data_set(tmp_path, "python-stdlib", age_s=DATA_KEPT_S + DAY),
    ]
    assert sweep_data(tmp_path, {needed}, now=NOW) == 10
    assert not gone.exists()
    assert all(folder.exists() for folder in stay)
    assert sweep_data(tmp_path, {needed}, now=NOW) == 0


def test_a_data_set_that_was_read_a_moment_ago_is_in_use(tmp_path: Path) -> None:
    """The files are old, and a worker opened the index yesterday."""
    folder = data_set(tmp_path, "a" * 64, age_s=2 * DATA_KEPT_S)
    os.utime(folder / INDEX_NAME, (NOW - DAY, NOW - 2 * DATA_KEPT_S))
    assert sweep_data(tmp_path, frozenset(), now=NOW) == 0
    assert folder.exists()


def test_a_download_that_broke_off_goes_before_a_data_set_would(tmp_path: Path) -> None:
    """After a week, also if a job names it: the job's next attempt begins anew."""
    old = data_set(tmp_path, "b" * 64, age_s=DOWNLOAD_KEPT_S + DAY, index=f"{INCOMING}/part")
    new = data_set(tmp_path, "c" * 64, age_s=DOWNLOAD_KEPT_S - DAY, index=f"{INCOMING}/part")
    assert sweep_data(tmp_path, {"b" * 64}, now=NOW) == 10
    assert not old.exists()
    assert new.exists()


def test_every_source_of_a_job_is_named() -> None:
    """One source, and a mixture of two."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(replace(small_spec("one"), data=DataSpec(source="/data", sha256="1" * 64)))
    parts = tuple(SourceSpec(source=f"/data/{digit}", sha256=digit * 64, weight=1.0) for digit in "23")
    cluster.submit(replace(small_spec("two"), data=DataSpec(source="", sha256="9" * 64, sources=parts)))
    assert named(cluster.truth()) == {digit * 64 for digit in "123"}
