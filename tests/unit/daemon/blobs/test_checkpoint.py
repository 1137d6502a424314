"""Checkpoints: where they lie, that manifests come whole or not at all, and what is said when they cannot be had."""

import tempfile
from pathlib import Path

import fsspec
import pytest
import torch

from headway.daemon.base.errors import ConfigError, DamagedCopyError, RecoveryError, StorageAwayError
from headway.daemon.blobs.checkpoint import (
    copy_to_checkpoint,
    delete_checkpoint,
    probe,
    read_manifest,
    resolve_checkpoint_dir,
    set_aside,
    write_manifest,
)
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.records import CheckpointRecord
from headway.stages.state.file_digest import FileDigest
from headway.stages.state.state_file import StateHeader, write_state
from tests.rigs.stored_files import fetch_layer


def state_file() -> tuple[bytes, FileDigest]:
    """A small state file."""
    header = StateHeader(job="j", layer="head", boundary=5, timeline=1, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        written = write_state(path, {"weight": torch.arange(500, dtype=torch.float32)}, header)
        return path.read_bytes(), written.digest


DATA, FILE = state_file()


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A checkpoint folder on a local file system, and on one that is reached by URL."""
    return str(tmp_path / "c") if request.param == "local" else f"memory://{tmp_path}"


def test_a_layer_comes_back_as_it_was(folder: str, tmp_path: Path) -> None:
    """Copied there and fetched again: the same bytes, and no partial file beside them."""
    source, target = tmp_path / "head", tmp_path / "back"
    source.write_bytes(DATA)
    copy_to_checkpoint(source, folder, "head")
    fetch_layer(folder, "head", FILE, target)
    assert target.read_bytes() == DATA
    file_system, path = fsspec.core.url_to_fs(folder)
    assert [Path(name).name for name in file_system.ls(path, detail=False)] == ["head.safetensors"]


def test_an_altered_layer_is_refused(folder: str, tmp_path: Path) -> None:
    """A byte was changed in the checkpoint: the fetch names the file, and leaves nothing behind."""
    source, target = tmp_path / "head", tmp_path / "back"
    source.write_bytes(DATA[:-1] + b"!")
    copy_to_checkpoint(source, folder, "head")
    with pytest.raises(RecoveryError, match=r"head\.safetensors: is damaged"):
        fetch_layer(folder, "head", FILE, target)
    assert not target.exists()


def test_a_layer_that_finds_no_place_here_is_no_outage_there(folder: str, tmp_path: Path) -> None:
    """The checkpoint can be read, and this node's own folder cannot be written."""
    (tmp_path / "head").write_bytes(DATA)
    copy_to_checkpoint(tmp_path / "head", folder, "head")
    with pytest.raises(RecoveryError, match=r"nowhere: ") as caught:
        fetch_layer(folder, "head", FILE, tmp_path / "nowhere" / "back")
    assert not isinstance(caught.value, StorageAwayError)


def test_a_manifest_reads_back_as_it_was_written(folder: str) -> None:
    """Written and read: the same record. Without it there is no checkpoint."""
    record = CheckpointRecord(timeline=1, boundary=5, url=folder, files={"head": FILE})
    with pytest.raises(RecoveryError, match=r"manifest\.json: cannot be read"):
        read_manifest(folder)
    write_manifest(folder, encode(record))
    assert read_manifest(folder) == record


@pytest.mark.parametrize("missing", ["manifest.json", "head.safetensors"])
@pytest.mark.parametrize("num_looks", [1, 3, 99])
def test_what_is_missing_for_a_moment_is_not_damaged(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, num_looks: int
) -> None:
    """A store says "not there" and finds the file again: the checkpoint is away. It stays away: it is damaged."""
    (tmp_path / "head").write_bytes(DATA)
    copy_to_checkpoint(tmp_path / "head", f"{folder}/5", "head")
    write_manifest(f"{folder}/5", encode(CheckpointRecord(timeline=1, boundary=5, url=folder)))
    file_system, path = fsspec.core.url_to_fs(f"{folder}/5/{missing}")
    file_system.mv(path, f"{path}.hidden")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == num_looks:
            file_system.mv(f"{path}.hidden", path)

    monkeypatch.setattr("time.sleep", sleep)

    def read() -> None:
        if missing == "manifest.json":
            read_manifest(f"{folder}/5")
        else:
            fetch_layer(f"{folder}/5", "head", FILE, tmp_path / "back")

    with pytest.raises(StorageAwayError if num_looks < 5 else DamagedCopyError, match=missing):
        read()
    if num_looks < 5:
        read()


def test_nothing_is_set_aside_on_a_share_that_is_not_mounted(folder: str) -> None:
    """The folders are not there: an error to try again after, and no folder is made that looks like a checkpoint's."""
    with pytest.raises(StorageAwayError, match=r"5: has no manifest\.json now, so nothing is set aside"):
        set_aside(f"{folder}/5", "a bit is wrong")
    file_system, path = fsspec.core.url_to_fs(folder)
    assert not file_system.exists(path)


def test_a_damaged_checkpoint_is_set_aside_once(folder: str) -> None:
    """Its manifest gets another name; a second call changes nothing."""
    write_manifest(f"{folder}/5", b"{}")
    for _ in range(2):
        set_aside(f"{folder}/5", "a bit is wrong")
    file_system, path = fsspec.core.url_to_fs(f"{folder}/5")
    names = sorted(Path(name).name for name in file_system.ls(path, detail=False))
    assert names == ["manifest.set-aside.json", "set-aside.txt"]


def test_a_deleted_checkpoint_loses_its_manifest_first(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder goes; a checkpoint beside it stays; deleting it again is no error."""
    (tmp_path / "head").write_bytes(DATA)
    for name in ("a", "b"):
        copy_to_checkpoint(tmp_path / "head", f"{folder}/{name}", "head")
        write_manifest(f"{folder}/{name}", encode(CheckpointRecord(timeline=1, boundary=5, url=name)))
    file_system, path = fsspec.core.url_to_fs(folder)
    removed: list[str] = []
    remove = file_system.rm

    def note(name: str, **options: bool) -> None:
        removed.append(Path(name).name)
        remove(name, **options)

    monkeypatch.setattr(file_system, "rm", note)
    delete_checkpoint(f"{folder}/a")
    assert removed == ["manifest.json", "a"]
    delete_checkpoint(f"{folder}/a")
    assert sorted(Path(name).name for name in file_system.find(path)) == ["head.safetensors", "manifest.json"]
    assert read_manifest(f"{folder}/b").url == "b"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A file lies where the folder should be."""
    (tmp_path / "c").touch()
    with pytest.raises(RecoveryError, match="cannot be written") as caught:
        probe(str(tmp_path / "c"))
    assert "\n" not in str(caught.value)


def test_a_probe_leaves_nothing(folder: str) -> None:
    """The folder can be written to, and is empty afterwards."""
    probe(folder)
    file_system, path = fsspec.core.url_to_fs(folder)
    assert file_system.find(path) == []


def test_an_unknown_protocol_is_one_line() -> None:
    """A URL of a file system that is not installed."""
    with pytest.raises(RecoveryError, match="nowhere"):
        probe("nowhere://bucket/path")


def test_relative_folders_belong_to_clusters_on_one_machine(tmp_path: Path) -> None:
    """Below the root where there is one; refused elsewhere; URLs and absolute paths stay as they are."""
    assert resolve_checkpoint_dir("checkpoints", tmp_path) == str(tmp_path / "checkpoints")
    assert resolve_checkpoint_dir("/data/c/", None) == "/data/c"
    assert resolve_checkpoint_dir("s3://bucket/c", None) == "s3://bucket/c"
    with pytest.raises(ConfigError, match="is relative, which only a cluster on one machine allows"):
        resolve_checkpoint_dir("checkpoints", None)
