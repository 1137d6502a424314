"""Data is hashed once for each state of its files, and never trained on in a state that was not hashed."""

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from headway.daemon.base.errors import RecoveryError, StorageAwayError
from headway.daemon.blobs import verified_shards
from headway.daemon.blobs.library import DataLibrary, Reading
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.verified_shards import VerifiedShards
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import ReadingRecord
from headway.daemon.cluster.records import SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.deadlines import Deadlines
from headway.daemon.decide.job_view import MOST_READINGS, JobView
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec, preparation_s
from headway.stages.data.shard_index import fingerprint, read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of 5000 tokens each."""
    folder = tmp_path / "data"
    with writing_shards(folder, DataForm(vocab_size=256, most_tokens=5000)) as writer:
        writer.append(np.arange(10_000, dtype=np.int64) % 256)
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read to be hashed."""
    names: list[str] = []
    real = verified_shards._sha256

    def note(file: Path, advance: verified_shards.Advance) -> str:
        names.append(file.name)
        return real(file, advance)

    monkeypatch.setattr(verified_shards, "_sha256", note)
    return names


def library(folder: Path, memory: Path) -> DataLibrary:
    return DataLibrary(folder.parent / "cache", cast(NodeClient, None), list, memory=memory)


def shards(folder: Path) -> list[Path]:
    return [folder / shard.file for shard in read_index(folder).shards]


def spec_of(folder: Path) -> DataSpec:
    return DataSpec(source=str(folder), sha256=read_index(folder).sha256)


async def test_each_state_of_a_file_is_hashed_once(folder: Path, tmp_path: Path, hashed: list[str]) -> None:
    """Opened twice, by a daemon and by the one after it: read once. One shard gets another time: that one is read."""
    memory, data = tmp_path / "memory.json", spec_of(folder)
    first = library(folder, memory)
    for _ in range(2):
        await first.open(data)
    await library(folder, memory).open(data)
    assert len(hashed) == len(shards(folder)) == 2
    os.utime(shards(folder)[1])
    await library(folder, memory).open(data)
    assert hashed[2:] == [shards(folder)[1].name]


@pytest.mark.parametrize("keeps_its_time", [False, True])
async def test_an_altered_file_is_hashed_again_and_refused(
    folder: Path, tmp_path: Path, hashed: list[str], keeps_its_time: bool
) -> None:
    """A byte is changed after the file was verified, with its old time or not: the next plan does not begin."""
    opened = library(folder, tmp_path / "memory.json")
    await opened.open(spec_of(folder))
    file = shards(folder)[0]
    before = file.stat()
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    if keeps_its_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(RecoveryError, match="was changed or damaged"):
        await opened.open(spec_of(folder))


async def test_a_shard_that_decayed_under_its_note_is_found_beside_training(
    folder: Path, tmp_path: Path, hashed: list[str]
) -> None:
    """A bit is lost, and the file's state looks as it was: the next daemon's training finds it, and says so.

    Its note is gone, so that the next plan reads the shard, and fetches another. What was hashed just now is not read.
    """
    memory, file = tmp_path / "memory.json", shards(folder)[0]
    first = library(folder, memory)
    place = await first.open(spec_of(folder))
    await first._read_again(place)
    assert (len(hashed), first.decay) == (2, "")
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    VerifiedShards(memory).remember(file, next(iter(read_index(folder).files)).sha256)
    second = library(folder, memory)
    place = await second.open(spec_of(folder))
    await second._read_again(place)
    assert f"{file}: has decayed: its SHA-256 is" in second.decay
    with pytest.raises(RecoveryError, match="was changed or damaged"):
        await second.open(spec_of(folder))


def test_a_worker_takes_the_state_that_was_verified_and_no_other(folder: Path) -> None:
    """Same files → opened without reading them. One was written to since → refused, whatever it holds."""
    VerifiedShards().verify(folder, lambda _: None)
    state = fingerprint(folder)
    assert TokenShards.open(folder, verified=state).num_tokens == 10_000
    file = shards(folder)[0]
    file.write_bytes(file.read_bytes())
    with pytest.raises(DataError, match="was written to since it was verified"):
        TokenShards.open(folder, verified=state)


@pytest.mark.parametrize("garbage", [b"", b"[", b"[1]", b'{"a": 1}', b'{"a": ["x", [1, 2]]}', b"[" * 100_000])
def test_an_unreadable_memory_of_verified_shards_is_ignored(folder: Path, tmp_path: Path, garbage: bytes) -> None:
    """Half a file, or another format: everything is hashed again and remembered."""
    memory = tmp_path / "memory.json"
    memory.write_bytes(garbage)
    verified = VerifiedShards(memory)
    assert verified.num_bytes_to_read(folder) == 10_000
    verified.verify(folder, lambda _: None)
    assert VerifiedShards(memory).num_bytes_to_read(folder) == 0


async def test_concurrent_requests_share_one_pass_and_its_progress(
    folder: Path, tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plans and a look ahead ask at once: the files are read once."""
    monkeypatch.setattr(verified_shards, "CHUNK_BYTES", 1000)
    opened, data = library(folder, tmp_path / "memory.json"), spec_of(folder)
    seen: list[Reading] = []
    real = verified_shards._sha256

    def watch(file: Path, advance: verified_shards.Advance) -> str:
        def noted(num_bytes: int) -> None:
            advance(num_bytes)
            seen.append(opened.reading[data.sha256])

        return real(file, noted)

    monkeypatch.setattr(verified_shards, "_sha256", watch)
    await asyncio.gather(opened.open(data), opened.open(data), opened.look_ahead(data))
    assert len(hashed) == 2
    assert [reading.num_bytes for reading in seen] == list(range(1000, 10_001, 1000))
    assert {reading.total_bytes for reading in seen} == {10_000}
    assert opened.reading == {}


async def test_the_same_data_in_two_folders_has_two_states(folder: Path, tmp_path: Path) -> None:
    """Another job names a copy of it: a worker of the first still takes what was verified in its own folder."""
    opened, copy = library(folder, tmp_path / "memory.json"), tmp_path / "copy"
    shutil.copytree(folder, copy)
    for each in (folder, copy):
        await opened.open(spec_of(each))
    assert [opened.state_of(str(each)) for each in (folder, copy)] == [fingerprint(folder), fingerprint(copy)]


async def test_one_job_s_wrong_path_is_not_another_s_error(folder: Path, tmp_path: Path) -> None:
    """Two jobs ask for the same data at once, and one names a missing folder: the other opens its own."""
    opened, data = library(folder, tmp_path / "memory.json"), spec_of(folder)
    wrong = DataSpec(source=str(tmp_path / "nowhere"), sha256=data.sha256)
    asked = [opened.open(each) for each in (wrong, data, wrong)]
    first, found, last = await asyncio.gather(*asked, return_exceptions=True)
    assert found == folder
    assert "nowhere" in str(first)
    assert "nowhere" in str(last)


@pytest.mark.parametrize("kind", ["a folder above", "a name that is too long", "a circle of links"])
async def test_a_wrong_path_is_a_mistake_and_no_outage(folder: Path, tmp_path: Path, kind: str) -> None:
    """The data lies in a folder below it."""
    opened, data = library(folder, tmp_path / "memory.json"), spec_of(folder)
    await opened.open(data)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    wrong = {
        "a folder above": tmp_path,
        "a name that is too long": tmp_path / ("x" * 300),
        "a circle of links": tmp_path / "circle",
    }[kind]
    with pytest.raises(RecoveryError) as caught:
        await opened.open(DataSpec(source=str(wrong), sha256=data.sha256))
    assert not isinstance(caught.value, StorageAwayError)


def reading(view: ClusterView, node: str, num_bytes: int, *, now: float, total: int = 9) -> None:
    revision = 5 if not view.revisions else 1 + max(view.last_revision_of(Keys.reading("j", name)) for name in "ab")
    record = encode(ReadingRecord(num_bytes=num_bytes, total_bytes=total))
    view.apply(Keys.reading("j", node), record, mod_revision=revision, create_revision=5, now=now)


@dataclass(frozen=True)
class Waiting:
    """The deadlines of a job, as the view has it at the moment."""

    view: ClusterView
    spec: JobSpec

    @property
    def prepare(self) -> float:
        """When its workers have to be ready."""
        return Deadlines(self.view.jobs["j"], self.view, self.spec).prepare


@pytest.fixture
def waiting() -> tuple[ClusterView, Waiting]:
    """A job whose workers are to be ready, since 10."""
    view, spec = ClusterView(steady_since=0.0), JobSpec(job=JobSection(name="j"))
    view.jobs["j"] = JobView(name="j", submission=SpecRecord(spec=spec, uid="u"), entered_at=10.0)
    return view, Waiting(view, spec)


def test_a_node_that_reads_is_not_late(waiting: tuple[ClusterView, Waiting]) -> None:
    """The time for the workers to be ready counts from the last byte that a node has got on by."""
    view, deadlines = waiting
    within_s = preparation_s(deadlines.spec.train)
    assert deadlines.prepare == 10.0 + within_s
    reading(view, "a", 1, now=500.0)
    assert deadlines.prepare == 500.0 + within_s
    assert view.jobs["j"].readings == {"a": ReadingRecord(num_bytes=1, total_bytes=9)}
    reading(view, "a", 2, now=510.0)
    reading(view, "b", 1, now=520.0)
    assert deadlines.prepare == 520.0 + within_s


def test_a_node_without_progress_gets_no_more_time(waiting: tuple[ClusterView, Waiting]) -> None:
    """Repeated reports of the same progress do not count, even after the node was away."""
    view, deadlines = waiting
    reading(view, "a", 5, now=500.0)
    until = deadlines.prepare
    reading(view, "a", 5, now=600.0)
    view.apply(Keys.reading("j", "a"), None, mod_revision=50, create_revision=5, now=610.0)
    reading(view, "b", 5, now=500.0)
    reading(view, "a", 5, now=620.0)
    assert deadlines.prepare == until
    reading(view, "a", 0, total=3, now=630.0)
    assert deadlines.prepare == 630.0 + preparation_s(deadlines.spec.train), "a file is done: fewer bytes are left"


def test_a_node_that_replaces_a_damaged_copy_is_not_late(waiting: tuple[ClusterView, Waiting]) -> None:
    """The copy is read to its end and is damaged: fetching it again from another node gets as much time."""
    view, deadlines = waiting
    within_s = preparation_s(deadlines.spec.train)
    for num_bytes, now in ((1, 500.0), (9, 510.0), (0, 520.0), (1, 600.0), (8, 700.0)):
        reading(view, "a", num_bytes, now=now)
        assert deadlines.prepare == now + within_s


def test_a_node_that_starts_over_again_and_again_is_late(waiting: tuple[ClusterView, Waiting]) -> None:
    """Only a few restarts count as progress."""
    view, deadlines = waiting
    now = 500.0
    for _ in range(MOST_READINGS):
        for num_bytes in (0, 4, 8):
            now += 10.0
            reading(view, "a", num_bytes, now=now)
    until = deadlines.prepare
    assert until == now + preparation_s(deadlines.spec.train)
    for num_bytes in (0, 4, 8) * 2:
        now += 10.0
        reading(view, "a", num_bytes, now=now)
    assert deadlines.prepare == until
