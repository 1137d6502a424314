"""The store of layer files: what comes in is verified, what is not needed goes, and nothing outlives its daemon."""

import hashlib
import stat
from pathlib import Path

import pytest

from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.storage.state_key import StateKey
from headway.daemon.storage.state_store import StateStore

KEY = StateKey("j", 1, 5, "head")
DATA = b"weights" * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = StateStore(tmp_path / "store", quota_bytes=10_000)
    store.open()
    return store


def receive(store: StateStore, data: bytes, *, sha256: str, key: StateKey = KEY) -> None:
    """Bring a file in, in two chunks."""
    incoming = store.receive(key)
    incoming.append(data[:100], offset=0)
    incoming.append(data[100:], offset=100)
    incoming.verify(sha256)
    incoming.put_in_place()
    store.adopt(key, incoming.path, size_bytes=len(data), sha256=sha256)


def test_a_file_comes_in_chunks_and_is_read_from_an_offset(store: StateStore) -> None:
    """Two chunks make a file; a reader that resumes at byte 7 gets the rest."""
    receive(store, DATA, sha256=SHA256)
    assert b"".join(store.read(KEY, offset=7)) == DATA[7:]
    assert store.size_bytes == len(DATA)


def test_altered_bytes_are_refused_and_dropped(store: StateStore) -> None:
    """One byte differs: the file is refused, and the next attempt begins at 0."""
    with pytest.raises(RecoveryError, match="arrived with SHA-256"):
        receive(store, b"W" + DATA[1:], sha256=SHA256)
    assert store.get(KEY) is None
    assert store.receive(KEY).offset == 0


def test_a_broken_transfer_resumes_where_it_stopped(store: StateStore) -> None:
    """100 bytes arrived: the next holder is asked from there, and a chunk that leaves a gap is refused."""
    store.receive(KEY).append(DATA[:100], offset=0)
    again = store.receive(KEY)
    assert again.offset == 100
    with pytest.raises(RecoveryError, match="began at byte 200, not 100"):
        again.append(DATA[200:], offset=200)


def test_the_quota_is_a_number_in_the_error(store: StateStore) -> None:
    """7000 of 10000 bytes are held: 7000 more are refused with the figures; replacing the same file is fine."""
    receive(store, DATA, sha256=SHA256)
    with pytest.raises(RecoveryError, match="would hold 14000 bytes, and store_quota_bytes allows 10000"):
        store.require_room(7000, "block.0")
    store.require_room(7000, "head", held=KEY)


def test_a_written_file_of_another_size_is_not_adopted(store: StateStore) -> None:
    """The worker said 10 bytes and the file has 3, or none is there: both are told."""
    path = store.path_of(KEY)
    path.write_bytes(b"abc")
    with pytest.raises(RecoveryError, match="has 3 bytes, not the 10"):
        store.adopt(KEY, path, size_bytes=10, sha256=SHA256)
    with pytest.raises(RecoveryError, match="No such file"):
        store.adopt(KEY, path.with_name("none"), size_bytes=10, sha256=SHA256)


def test_deleting_removes_empty_folders(store: StateStore, tmp_path: Path) -> None:
    """The last file of a job goes, and its folders with it."""
    receive(store, DATA, sha256=SHA256)
    store.delete(KEY)
    store.delete(KEY)
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
    with pytest.raises(ConfigError, match="belongs to somebody else, or is no folder"):
        StateStore(tmp_path / "store").open()
    assert (tmp_path / "precious" / "file").exists()
