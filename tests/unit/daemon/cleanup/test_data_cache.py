"""What nobody needs leaves the cache of token shards; data of known jobs, and what is new, stays."""

import os
from dataclasses import replace
from pathlib import Path

from headway.daemon.cleanup.data_cache import DATA_KEPT_S, DOWNLOAD_KEPT_S, named, sweeping
from headway.daemon.jobs.job import DataSpec, SourceSpec
from headway.daemon.shards.incoming_data import INCOMING
from headway.stages.data.shard_index import INDEX_NAME
from tests.fakes.simulated_cluster import SimulatedCluster, small_spec

NOW = 1e9
DAY = 86400.0


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
    assert sweeping(tmp_path, {needed}, now=NOW)() == 10
    assert not gone.exists()
    assert all(folder.exists() for folder in stay)
    assert sweeping(tmp_path, {needed}, now=NOW)() == 0


def test_a_data_set_that_was_read_a_moment_ago_is_in_use(tmp_path: Path) -> None:
    """The files are old, and a worker opened the index yesterday."""
    folder = data_set(tmp_path, "a" * 64, age_s=2 * DATA_KEPT_S)
    os.utime(folder / INDEX_NAME, (NOW - DAY, NOW - 2 * DATA_KEPT_S))
    assert sweeping(tmp_path, frozenset(), now=NOW)() == 0
    assert folder.exists()


def test_a_download_that_broke_off_goes_before_a_data_set_would(tmp_path: Path) -> None:
    """After a week, also if a job names it: the job's next attempt begins anew."""
    old = data_set(tmp_path, "b" * 64, age_s=DOWNLOAD_KEPT_S + DAY, index=f"{INCOMING}/part")
    new = data_set(tmp_path, "c" * 64, age_s=DOWNLOAD_KEPT_S - DAY, index=f"{INCOMING}/part")
    assert sweeping(tmp_path, {"b" * 64}, now=NOW)() == 10
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
