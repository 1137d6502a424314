"""All rows of a journal, wherever they lie: in the checkpoint's parts and in the newest file."""

import errno
from pathlib import Path
from typing import cast

import pytest

from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs.checkpoint import copy_part, delete_part, list_parts, part_at
from headway.daemon.blobs.checkpoint_names import file_name, part_name
from headway.daemon.blobs.fetch import Source
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.lineage import JournalPart
from headway.daemon.cluster.records import CheckpointRecord, Phase, PhaseRecord, SpecRecord
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.node.job_sources import JournalSource
from headway.stages.ids import Batch, Boundary, Generation, Timeline
from headway.stages.spec import TrainSpec
from headway.stages.state.file_digest import FileDigest
from headway.stages.state.journal import Journal, JournalRow
from headway.stages.state.layer_file import write_journal
from tests.rigs.stored_files import fetch_from

WHERE = "j/u/00000001-0000000030"


def write(path: Path, batches: range, *, job: str = "j") -> FileDigest:
    """Write a journal of these batches, whose losses are their numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        JournalRow(batch=Batch(b), microbatch_losses=(float(b),), tokens=8, seconds=0.5, generation=Generation(1))
        for b in batches
    )
    boundary = Boundary(batches.stop)
    written = write_journal(
        path, Journal(rows), job=job, boundary=boundary, train=TrainSpec(microbatches=1), timeline=Timeline(1)
    )
    return written.digest


def part_of(root: Path, batches: range, *, job: str = "j") -> JournalPart:
    digest = write(root / "j/u/journal" / part_name(1, batches.stop), batches, job=job)
    return JournalPart(timeline=1, boundary=batches.stop, size_bytes=digest.size_bytes, checksum=digest.checksum)


def view_of(root: Path, *parts: JournalPart, rows: range = range(15, 30)) -> ClusterView:
    """A finished job, whose checkpoint has these parts and, in its own file, the newest rows."""
    digest = write(root / WHERE / file_name(JOURNAL), rows)
    record = CheckpointRecord(timeline=1, boundary=30, url=WHERE, files={JOURNAL: digest}, journal_parts=parts)
    spec = JobSpec(job=JobSection(name="j"), fault=FaultSpec(checkpoint_dir="."))
    job = JobView(
        name="j",
        submission=SpecRecord(spec=spec, uid="u"),
        checkpoint=record,
        phase=PhaseRecord(phase=Phase.FINISHED),
    )
    return ClusterView(jobs={"j": job})


def source_of(root: Path, view: ClusterView) -> JournalSource:
    store = StateStore(root / "store")
    return JournalSource(node="a", view=view, store=store, client=cast("NodeClient", None), checkpoint_root=root)


async def told(source: JournalSource, from_batch: int = 0) -> list[tuple[int, float]]:
    """Batch and loss of each row."""
    messages = [rows async for rows in source.rows("j", from_batch=from_batch)]
    return [pair for rows in messages for pair in zip(rows.batch, rows.loss, strict=True)]


async def test_parts_and_the_newest_file_are_one_journal(tmp_path: Path) -> None:
    """Parts that overlap, one of them of a parent job: every batch once, in order."""
    parts = (part_of(tmp_path, range(10), job="parent"), part_of(tmp_path, range(8, 20)))
    source = source_of(tmp_path, view_of(tmp_path, *parts))
    assert await told(source) == [(b, float(b)) for b in range(30)]
    assert await told(source, from_batch=12) == [(b, float(b)) for b in range(12, 30)]


async def test_a_long_journal_comes_in_messages_of_limited_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each 4th batch of 30, two rows a message: every chosen row once, and the last message says that all are there."""
    monkeypatch.setattr("headway.daemon.node.job_sources.ROWS_A_MESSAGE", 2)
    source = source_of(tmp_path, view_of(tmp_path, part_of(tmp_path, range(20))))
    messages = [rows async for rows in source.rows("j", every=4)]
    assert [batch for rows in messages for batch in rows.batch] == list(range(0, 30, 4))
    assert max(len(rows.batch) for rows in messages) == 2
    assert messages[-1].next_batch == 30


async def test_parts_are_read_only_for_who_asks_for_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower asks for new rows all the time: the newest file has them."""
    source = source_of(tmp_path, view_of(tmp_path, part_of(tmp_path, range(10)), part_of(tmp_path, range(8, 20))))
    read: list[int] = []

    def note(url: str, part: JournalPart, threads: FileThreads) -> Source:
        read.append(part.boundary)
        return part_at(url, part, threads)

    monkeypatch.setattr("headway.daemon.node.job_sources.part_at", note)
    await told(source, from_batch=15)
    assert read == []
    await told(source, from_batch=12)
    assert read == [20]


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_lost_part_costs_its_rows_alone(tmp_path: Path, is_gone: bool) -> None:
    """Somebody deleted or altered it: the other rows are shown."""
    parts = (part_of(tmp_path, range(10)), part_of(tmp_path, range(8, 20)))
    path = tmp_path / "j/u/journal" / part_name(1, 10)
    path.unlink() if is_gone else path.write_bytes(path.read_bytes()[:-1] + b"!")
    rows = await told(source_of(tmp_path, view_of(tmp_path, *parts)))
    assert [batch for batch, _ in rows] == list(range(8, 30))


async def test_a_folder_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may read it, so rows are not shown as if they were lost."""
    view = view_of(tmp_path, part_of(tmp_path, range(20)))

    def refuse(*_: object, **__: object) -> bool:
        raise RecoveryError("journal", "cannot be read: it is away")

    monkeypatch.setattr("headway.daemon.node.job_sources.is_there", refuse)
    with pytest.raises(RecoveryError, match="it is away"):
        await told(source_of(tmp_path, view))


async def test_a_journal_of_an_earlier_release_has_all_rows(tmp_path: Path) -> None:
    """Its checkpoint names no parts."""
    rows = await told(source_of(tmp_path, view_of(tmp_path, rows=range(30))))
    assert [batch for batch, _ in rows] == list(range(30))


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder on a local file system, and on one that is reached by URL."""
    return str(tmp_path / "c") if request.param == "local" else f"memory://{tmp_path}"


def test_a_part_is_copied_listed_fetched_and_deleted(folder: str, tmp_path: Path) -> None:
    source, target = tmp_path / "journal", tmp_path / "back"
    digest = write(source, range(10))
    part = JournalPart(timeline=1, boundary=10, size_bytes=digest.size_bytes, checksum=digest.checksum)
    assert list_parts(folder) == []
    copy_part(str(source), f"{folder}/{part_name(1, 10)}", is_inherited=False)
    assert [file.place for file in list_parts(folder)] == [(1, 10)]
    fetch_from(part_at(folder, part, FileThreads("tests")), part, target)
    assert target.read_bytes() == source.read_bytes()
    for _ in range(2):
        delete_part(folder, part_name(1, 10))
    assert list_parts(folder) == []


def test_a_missing_part_of_a_parent_is_left_out_and_an_own_one_is_an_error(tmp_path: Path) -> None:
    target = tmp_path / "c" / part_name(1, 10)
    copy_part(str(tmp_path / "none"), str(target), is_inherited=True)
    with pytest.raises(RecoveryError, match="none"):
        copy_part(str(tmp_path / "none"), str(target), is_inherited=False)
    assert not target.exists()


def test_a_full_disk_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error goes to the leader, which tries again; no file is there, whole or in part."""
    source = tmp_path / "journal"
    write(source, range(10))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headway.daemon.blobs.checkpoint.os.fsync", full)
    with pytest.raises(RecoveryError, match="No space left"):
        copy_part(str(source), str(tmp_path / "c" / part_name(1, 10)), is_inherited=False)
    assert list((tmp_path / "c").iterdir()) == []
