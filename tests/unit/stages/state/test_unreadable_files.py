"""A disk that fails while a state file is read: the file is named, so its node drops it and fetches another copy."""

import errno
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.daemon.worker.out_of_memory import damaged_path
from headway.stages.errors import DamagedFileError
from headway.stages.state.state_file import StateHeader, read_state, write_state

HEADER = StateHeader(job="j", layer="head", boundary=5, timeline=1, dtype="float32")


class Disk(io.FileIO):
    """A file whose disk delivers few bytes at a time, and at last an error."""

    fails_at = 1 << 40
    error = errno.EIO
    most = 1 << 40

    def readinto(self, buffer: Any) -> int:
        if self.tell() >= self.fails_at:
            raise OSError(self.error, "Input/output error")
        return super().readinto(memoryview(buffer)[: self.most])

    def read(self, size: int | None = -1) -> bytes:
        wanted = bytearray(size if size and size > 0 else self.most)
        return bytes(wanted[: self.readinto(wanted)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "head.safetensors"
    write_state(path, {"w": torch.arange(32.0)}, HEADER)
    return path


def opened_on(monkeypatch: pytest.MonkeyPatch, **about: int) -> None:
    kind = type("OfThisTest", (Disk,), about)
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: kind(path))


@pytest.mark.parametrize("fails_at", [0, 8, 9, 300])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_failing_disk_is_a_damaged_file(
    monkeypatch: pytest.MonkeyPatch, path: Path, fails_at: int, number: int
) -> None:
    """In the length, the header or the data: the error names the file, which the node then replaces."""
    opened_on(monkeypatch, fails_at=fails_at, error=number, most=100)
    with pytest.raises(DamagedFileError, match=r"head\.safetensors: it cannot be read: Input/output error") as caught:
        read_state(path)
    assert damaged_path(caught.value) == str(path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT, errno.EMFILE, errno.ENOMEM])
def test_only_a_bad_sector_under_a_files_inode_is_its_own_fault(
    monkeypatch: pytest.MonkeyPatch, path: Path, number: int
) -> None:
    """No descriptor or no memory says nothing about the file: it stays, as the error does."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "none left", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    is_damage = number == errno.EIO
    with pytest.raises(
        DamagedFileError if is_damage else OSError, match="it cannot be read" if is_damage else "none left"
    ):
        read_state(path)


@pytest.mark.parametrize("most", [1, 5])
def test_short_reads_are_read_on(monkeypatch: pytest.MonkeyPatch, path: Path, most: int) -> None:
    """A file system may deliver less than asked for, in the header's length too: the file is whole all the same."""
    opened_on(monkeypatch, most=most)
    header, tensors = read_state(path)
    assert header == HEADER
    assert torch.equal(tensors["w"], torch.arange(32.0))


def test_an_error_of_a_write_names_the_file(path: Path) -> None:
    """The disk is full in the middle of the data: the new file's name is in the error, and the old file is there."""

    def fill(_: torch.Tensor) -> list[torch.Tensor]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write_state(path, {"w": torch.arange(32.0)}, HEADER, fetch=fill)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
