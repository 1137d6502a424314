"""The store of layer files: what comes in is verified, what is not needed goes, and nothing outlives its daemon."""

import errno
import os
import shutil
import stat
import tempfile
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.state_key import StateKey, StoredFile
from headway.stages.state.file_digest import FileDigest
from headway.stages.state.state_file import StateHeader, write_state

KEY = StateKey("j", 1, 5, "head")


def state_file() -> tuple[bytes, str]:
    """A state file of some 7000 bytes, and its checksum."""
    header = StateHeader(job="j", layer="head", boundary=5, timeline=1, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        written = write_state(path, {"weight": torch.arange(1700, dtype=torch.float32)}, header)
        return path.read_bytes(), written.checksum


DATA, CHECKSUM = state_file()
FILE = FileDigest(size_bytes=len(DATA), checksum=CHECKSUM)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = StateStore(tmp_path / "store", quota_bytes=10_000)
    store.open()
    return store


async def receive(store: StateStore, data: bytes, *, checksum: str, key: StateKey = KEY) -> None:
    """Bring a file in, in two chunks."""
    incoming = await store.receive(key, FileDigest(size_bytes=len(data), checksum=checksum))
    incoming.append(data[:100], "b")
    incoming.append(data[100:], "b")
    incoming.verify("b")
    incoming.put_in_place()
    await store.adopt(key, StoredFile(path=incoming.path, size_bytes=len(data), checksum=checksum))


async def test_a_file_comes_in_chunks_and_is_read_from_an_offset(store: StateStore) -> None:
    """Two chunks make a file; a reader that resumes at byte 7 gets the rest."""
    await receive(store, DATA, checksum=CHECKSUM)
    assert b"".join(store.read(KEY, offset=7)) == DATA[7:]
    assert store.size_bytes == len(DATA)


@pytest.mark.parametrize("kind", ["no folder", "nobody may write", "it goes again and again"])
async def test_a_folder_that_cannot_be_made_is_one_error(
    store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A file lies in its way, the disk is read-only, or its parent vanishes for ever: the folder and the reason."""
    if kind == "no folder":
        (tmp_path / "store" / "j").write_bytes(b"")
    else:
        number = errno.EROFS if kind == "nobody may write" else errno.ENOENT

        def refuse(self: Path, **_: object) -> None:
            raise OSError(number, os.strerror(number), str(self))

        monkeypatch.setattr(Path, "mkdir", refuse)
    told = r"store/j/1/5: cannot be made: "
    with pytest.raises(RecoveryError, match=told):
        store.path_of(KEY)
    with pytest.raises(RecoveryError, match=told):
        await store.receive(KEY, replace(FILE, size_bytes=10))
    assert not store.awaited


async def test_a_whole_file_of_other_content_is_refused(store: StateStore) -> None:
    """It is sound, and not the one that was registered."""
    with pytest.raises(RecoveryError, match="has checksum"):
        await receive(store, DATA, checksum="f" * 32)
    assert store.get(KEY) is None


async def test_bytes_from_before_a_break_are_verified_too(store: StateStore) -> None:
    """One byte of the earlier attempt is wrong: the whole file is refused."""
    for first, is_good in ((DATA[:20] + b"!" + DATA[21:100], False), (DATA[:100], True)):
        (await store.receive(KEY, FILE)).append(first, "b")
        again = await store.receive(KEY, FILE)
        again.resume()
        assert again.num_bytes == 100
        with nullcontext() if is_good else pytest.raises(RecoveryError, match="is damaged"):
            again.append(DATA[100:], "b")
    again.verify("b")


async def test_bytes_that_were_refused_are_forgotten(store: StateStore) -> None:
    """The first holder sends an altered file, the second the good one, into the same place: it is taken."""
    incoming = await store.receive(KEY, FILE)
    incoming.append(DATA[:-1] + b"!", "b")
    with pytest.raises(RecoveryError, match="is damaged"):
        incoming.verify("b")
    with pytest.raises(RecoveryError, match="is damaged"):
        incoming.append(b"\xff" * len(DATA), "b")
    incoming.append(DATA[:100], "b")
    incoming.append(DATA[100:], "b")
    incoming.verify("b")


async def test_an_abandoned_fetch_leaves_nothing(store: StateStore, tmp_path: Path) -> None:
    """The fetch is given up: its partial file and its folders go, and its room is free again."""
    (await store.receive(KEY, replace(FILE, size_bytes=9000))).append(DATA[:100], "b")
    other = replace(KEY, layer="embed")
    with pytest.raises(RecoveryError, match="store_quota_bytes allows 10000"):
        await store.receive(other, replace(FILE, size_bytes=9000))
    store.abandon(KEY)
    await store.removed()
    assert list((tmp_path / "store").iterdir()) == []
    assert store.awaited == frozenset()
    await store.receive(other, replace(FILE, size_bytes=9000))


async def test_a_full_file_system_is_one_line(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space is left: the error names the folder, and the partial file does not lie in the way."""
    incoming = await store.receive(KEY, FILE)
    incoming.append(DATA[:100], "b")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(RecoveryError, match="No space left on device") as caught:
            incoming.append(DATA[100:], "b")
    assert "\n" not in str(caught.value)
    assert incoming.num_bytes == 0


async def test_the_quota_is_a_number_in_the_error(store: StateStore) -> None:
    """Of 10000 bytes most are held: 7000 more are refused with the figures; replacing the same file is fine."""
    await receive(store, DATA, checksum=CHECKSUM)
    with pytest.raises(RecoveryError, match=f"would hold {len(DATA) + 7000} bytes, and store_quota_bytes allows 10000"):
        store.require_room(7000, "block.0")
    store.require_room(7000, "head", held=KEY)


async def test_a_sweep_deletes_old_files_that_nobody_knows(store: StateStore, tmp_path: Path) -> None:
    """Beside a held file and one on its way in lie an old stray one and one that is just being written."""
    await receive(store, DATA, checksum=CHECKSUM)
    awaited = replace(KEY, layer="embed")
    (await store.receive(awaited, replace(FILE, size_bytes=10))).append(b"part", "b")
    folder = store.directory_of("j", 1, 7)
    for name in ("old", "new"):
        (folder / name).write_bytes(b"stray")
    partial = store.path_of(awaited).with_suffix(".partial")
    for path in (folder / "old", store.path_of(KEY), partial):
        os.utime(path, (1000, 1000))
    assert store.sweep(store.known_paths(), older_than=2000) == 5
    left = {path.name for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert left == {"head.safetensors", "embed.partial", "new"}


async def test_a_sweep_spares_the_folders_where_workers_write(store: StateStore) -> None:
    """Timeline 1 was left by a worker that died in the middle of a file; on timeline 2 another may write for long."""
    for timeline in (1, 2):
        stray = store.directory_of("j", timeline, 7) / ".head.safetensors.0a.tmp"
        stray.write_bytes(b"torn")
        os.utime(stray, (1000, 1000))
    spared = frozenset([store.timeline_directory_of("j", 2)])
    assert store.sweep(store.known_paths(), older_than=2000, spared=spared) == 4
    assert not store.timeline_directory_of("j", 1).exists()
    assert (store.directory_of("j", 2, 7) / ".head.safetensors.0a.tmp").exists()


def test_a_sweep_meets_folders_that_are_being_deleted(store: StateStore, tmp_path: Path) -> None:
    """Folders of boundaries come and go while it looks: it goes on, and so does whoever makes and deletes them."""
    is_over = threading.Event()
    troubles: list[Exception] = []

    def come_and_go() -> None:
        try:
            while not is_over.is_set():
                for boundary in range(40):
                    path = store.path_of(replace(KEY, boundary=boundary))
                    path.write_bytes(b"x")
                for boundary in range(40):
                    shutil.rmtree(store.timeline_directory_of("j", 1) / str(boundary), ignore_errors=True)
                shutil.rmtree(tmp_path / "store" / "j", ignore_errors=True)
        except OSError as error:
            troubles.append(error)

    deleter = threading.Thread(target=come_and_go)
    deleter.start()
    try:
        for _ in range(400):
            store.sweep(store.known_paths(), older_than=0.0)
    finally:
        is_over.set()
        deleter.join()
    assert troubles == []


def test_a_folder_is_made_while_those_above_it_go(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread deletes the job's empty folder between two steps of making one below it: it is made all the same."""
    make, lost = Path.mkdir, [1, 1]

    def interrupted(path: Path, *arguments: object, **options: object) -> None:
        if lost:
            lost.pop()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        make(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", interrupted)
    assert store.path_of(KEY).parent.is_dir()


async def test_a_file_that_is_larger_than_it_was_said_to_be_is_cut(store: StateStore, tmp_path: Path) -> None:
    """Registered with 150 bytes, and more come: no byte beyond them is written, and the next holder begins anew."""
    incoming = await store.receive(KEY, FileDigest(size_bytes=150, checksum="f" * 64))
    incoming.append(DATA[:100], "b")
    with pytest.raises(RecoveryError, match="has more than its 150 bytes"):
        incoming.append(DATA[100:200], "b")
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
    assert (await store.receive(KEY, FileDigest(size_bytes=150, checksum="f" * 64))).num_bytes == 0


async def test_others_are_told_when_files_come_and_go(store: StateStore) -> None:
    """A file is taken in, and let go: each is told once; letting go of what is not held is nothing."""
    told: list[int] = []
    store.on_change = lambda: told.append(len(store.contents))
    await receive(store, DATA, checksum=CHECKSUM)
    store.delete(KEY)
    store.delete(KEY)
    assert told == [1, 0]


async def test_a_written_file_of_another_size_is_not_adopted(store: StateStore) -> None:
    """The worker said 10 bytes and the file has 3, or none is there: both are told."""
    path = store.path_of(KEY)
    path.write_bytes(b"abc")
    with pytest.raises(RecoveryError, match="has 3 bytes, not the 10"):
        await store.adopt(KEY, StoredFile(path=path, size_bytes=10, checksum=CHECKSUM))
    with pytest.raises(RecoveryError, match="No such file"):
        await store.adopt(KEY, StoredFile(path=path.with_name("none"), size_bytes=10, checksum=CHECKSUM))


async def test_deleting_removes_empty_folders(store: StateStore, tmp_path: Path) -> None:
    """The last file of a job goes, and its folders with it."""
    await receive(store, DATA, checksum=CHECKSUM)
    store.delete(KEY)
    store.delete(KEY)
    assert not store.contents
    await store.removed()
    assert list((tmp_path / "store").iterdir()) == []


def test_opening_wipes_leftovers_and_makes_the_folder_private(tmp_path: Path) -> None:
    """An earlier daemon left a folder that all may enter, with files: both are put right."""
    directory = tmp_path / "store"
    (directory / "old" / "1").mkdir(parents=True)
    (directory / "old" / "1" / "head.safetensors").write_bytes(b"old")
    (directory / "stray").write_bytes(b"old")
    directory.chmod(0o755)
    StateStore(directory).open()
    assert list(directory.iterdir()) == []
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Somebody put a link to another folder where the store belongs: it is not followed, and nothing is wiped."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "store").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="belongs to another user, or is not a folder"):
        StateStore(tmp_path / "store").open()
    assert (tmp_path / "precious" / "file").exists()
