"""A store of layer files on a disk that hangs: nobody waits for it for long, and nothing is held before it is there."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.agent.files import StateKeeper
from headway.daemon.agent.steps import Upload
from headway.daemon.base.activities import Activities
from headway.daemon.base.errors import RecoveryError, StorageAwayError
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.records import SpecRecord
from headway.daemon.cluster.state_key import StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.net.rate_limit import OutgoingTransfers
from headway.daemon.node import membership as membership_module
from headway.daemon.node.membership import Membership
from headway.stages.state.file_digest import FileDigest
from tests.rigs.moody_file_system import moody

KEY = StateKey("j", 1, 5, "head")
PATIENCE_S = 10.0


class Disk:
    """The file system of the store: calls of Path wait while it hangs."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.callers: set[threading.Thread] = set()

    def hang(self) -> None:
        """For some seconds at most: pytest, too, uses these calls when it tells of a failure."""
        self.answers.clear()
        timer = threading.Timer(2 * PATIENCE_S, self.answers.set)
        timer.daemon = True
        timer.start()

    def serve(self) -> None:
        """Note the caller, and let it wait."""
        self.callers.add(threading.current_thread())
        self.answers.wait()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()

    def slow(call: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            disk.serve()
            return call(*arguments, **options)

        return wrapped

    for name in ("mkdir", "stat", "unlink", "rmdir", "open", "replace", "exists"):
        monkeypatch.setattr(Path, name, slow(getattr(Path, name)))
    yield disk
    disk.answers.set()


@pytest.fixture
def store(tmp_path: Path, disk: Disk) -> StateStore:
    store = StateStore(tmp_path / "store", silence_s=0.2)
    store.open()
    disk.callers.clear()
    return store


def write(store: StateStore, key: StateKey = KEY) -> Path:
    """As a worker writes."""
    path = store.timeline_directory_of(key.job, key.timeline) / str(key.boundary) / f"{key.layer}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"state")
    return path


async def test_no_call_on_the_disk_is_made_in_the_loop(store: StateStore, disk: Disk) -> None:
    """Files come, are given up, are taken in and go: every call of the file system comes from a thread."""
    path = write(store)
    disk.callers.clear()
    incoming = await store.receive(replace(KEY, layer="embed"), FileDigest(size_bytes=10, checksum="f" * 64))
    await store.in_thread(lambda _: incoming.append(b"part", "b"))
    store.abandon(replace(KEY, layer="embed"))
    await store.adopt(KEY, StoredFile(path=path, size_bytes=5, checksum="x"))
    store.delete(KEY)
    await store.removed()
    await store.discard([path])
    await store.check()
    await store.close()
    assert disk.callers
    assert threading.current_thread() not in disk.callers


async def test_a_disk_that_hangs_is_an_error_and_the_loop_goes_on(store: StateStore, disk: Disk) -> None:
    """Meanwhile the loop turns; the next call is refused at once; when the disk answers, all is as before."""
    path = write(store)
    disk.hang()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    turning = asyncio.create_task(turn())
    with pytest.raises(StorageAwayError, match=r"has not answered for 0\.2 s"):
        await store.receive(KEY, FileDigest(size_bytes=10, checksum="f" * 64))
    with pytest.raises(StorageAwayError):
        await store.adopt(KEY, StoredFile(path=path, size_bytes=5, checksum="x"))
    assert turns > 5
    assert not store.contents
    assert not store.awaited
    disk.answers.set()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(StorageAwayError):
                await store.adopt(KEY, StoredFile(path=path, size_bytes=5, checksum="x"))
                break
            await asyncio.sleep(0.01)
    turning.cancel()
    assert KEY in store.contents


@pytest.fixture
def may_unlink(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Deletions alone wait until it is set."""
    found, unlink = threading.Event(), Path.unlink

    def late(path: Path, **options: Any) -> None:
        found.wait(PATIENCE_S)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", late)
    yield found
    found.set()


async def test_a_late_deletion_does_not_take_the_next_file(store: StateStore, may_unlink: threading.Event) -> None:
    """A damaged file goes, on a slow disk, and another is to be written in its place: it waits until the first is
    gone.
    """
    path = write(store)
    await store.adopt(KEY, StoredFile(path=path, size_bytes=5, checksum="x"))
    store.delete(KEY)
    placing = asyncio.create_task(store.place_for(KEY))
    await asyncio.sleep(0.05)
    assert not placing.done()
    may_unlink.set()
    (await placing).write_bytes(b"another")
    await store.removed()
    assert path.read_bytes() == b"another"


async def test_a_file_that_a_late_deletion_takes_is_not_held(store: StateStore, may_unlink: threading.Event) -> None:
    """A worker writes a file again while the deletion of the one before is on its way: nobody is told of it."""
    path = write(store)
    await store.adopt(KEY, StoredFile(path=path, size_bytes=5, checksum="x"))
    store.delete(KEY)
    path.write_bytes(b"again")
    adopting = asyncio.create_task(store.adopt(KEY, StoredFile(path=path, size_bytes=5, checksum="y")))
    await asyncio.sleep(0.05)
    may_unlink.set()
    with pytest.raises(RecoveryError, match="No such file"):
        await adopting
    assert KEY not in store.contents


async def test_a_cancelled_call_ends_before_its_file_is_used_again(store: StateStore, disk: Disk) -> None:
    """A fetch ends while a piece is on its way to the disk: the next attempt begins behind that piece."""
    incoming = await store.receive(KEY, FileDigest(size_bytes=10, checksum="f" * 64))
    disk.hang()
    appending = asyncio.create_task(store.in_thread(lambda _: incoming.append(b"part", "b")))
    await asyncio.sleep(0.05)
    appending.cancel()
    await asyncio.sleep(0.05)
    assert not appending.done()
    disk.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await appending
    again = await store.receive(KEY, FileDigest(size_bytes=10, checksum="f" * 64))
    await store.in_thread(lambda beat: again.resume(beat))
    assert again.num_bytes == 4


async def test_a_node_whose_store_hangs_asks_to_be_left_out(
    store: StateStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record and its ailments name the folder, without seconds that would change them; with the disk they go."""
    monkeypatch.setattr(membership_module, "STORE_CHECK_S", 0.05)
    record = SimpleNamespace(stays_out="")
    changes: list[str] = []

    def change(stays_out: str) -> None:
        changes.append(stays_out)
        record.stays_out = stays_out

    registration = SimpleNamespace(record=record, change=change)
    activities = Activities()
    membership = Membership.__new__(Membership)
    membership._services = SimpleNamespace(store=store, activities=activities, library=SimpleNamespace(decay=""))  # type: ignore[assignment]
    membership._registration, membership._troubles = registration, {}  # type: ignore[assignment]
    keeping = asyncio.create_task(membership._keep_store())
    disk.hang()
    told = f"store_dir {store.directory} cannot be written: its file system does not answer"
    async with asyncio.timeout(PATIENCE_S):
        while not record.stays_out:
            await asyncio.sleep(0.01)
        assert activities.ailments == {"layer store": told}
        await asyncio.sleep(0.5)
        assert changes == [told]
        disk.answers.set()
        while record.stays_out:
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert activities.ailments == {}


@pytest.mark.parametrize("hangs", ["store", "checkpoint"])
async def test_a_copy_that_hangs_names_the_file_system_that_does_not_answer(
    store: StateStore, disk: Disk, hangs: str
) -> None:
    """A checkpoint is read from the store and written at a URL, in one call: the silence alone does not say where."""
    path = write(store)
    await store.adopt(KEY, StoredFile(path=path, size_bytes=5, checksum="x"))
    spec = JobSpec(job=JobSection(name="j"), fault=FaultSpec(checkpoint_dir="moody://bucket/c"))
    around: dict[str, Any] = {"client": None, "checkpoint_root": None, "outgoing": OutgoingTransfers(0.0)}
    view = ClusterView(jobs={"j": JobView(name="j", submission=SpecRecord(spec=spec, uid="u"))})
    keeper = StateKeeper(node="a", view=view, store=store, **around)
    keeper._copies = FileThreads("copies", silence_s=0.2)
    with moody() as mood:
        if hangs == "store":
            disk.hang()
        else:
            mood.gate.clear()
        with pytest.raises(StorageAwayError) as caught:
            await keeper.copy_to_checkpoint(Upload(KEY))
        named = {"store": str(store.directory), "checkpoint": "moody://bucket/c"}
        assert caught.value.item.startswith(named[hangs])
        disk.answers.set()
        mood.gate.set()
