"""A journal part that cannot be copied: one error names the file, and nothing half written counts."""

from pathlib import Path

import pytest

from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs.checkpoint import copy_part, list_parts


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file lies where the folder of the parts should be: the error names the part."""
    source, folder = tmp_path / "journal.safetensors", tmp_path / "journal"
    source.write_bytes(b"rows")
    folder.write_bytes(b"")
    with pytest.raises(RecoveryError, match=r"journal/1-8.safetensors.* cannot be written"):
        copy_part(str(source), str(folder / "1-8.safetensors"), is_inherited=False)


def test_a_copy_that_breaks_off_leaves_no_part(tmp_path: Path) -> None:
    """The copy ends after its first bytes: nothing of it is left, and an earlier part is as it was."""
    source, folder = tmp_path / "journal.safetensors", tmp_path / "journal"
    source.write_bytes(b"rows")
    copy_part(str(source), str(folder / "1-4.safetensors"), is_inherited=False)
    num_beats = 0

    def beat() -> None:
        nonlocal num_beats
        num_beats += 1
        if num_beats == 2:
            raise RecoveryError(str(folder), "cannot be written: No space left on device")

    with pytest.raises(RecoveryError, match="No space left"):
        copy_part(str(source), str(folder / "1-8.safetensors"), is_inherited=False, beat=beat)
    assert [path.name for path in folder.iterdir()] == ["1-4.safetensors"]
    assert (folder / "1-4.safetensors").read_bytes() == b"rows"


def test_a_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    """The folder goes between snapshot and part. A part of this job is an error, one of another job is only logged."""
    source, target = str(tmp_path / "gone" / "journal.safetensors"), str(tmp_path / "journal" / "1-8.safetensors")
    with pytest.raises(RecoveryError, match=r"gone/journal.safetensors"):
        copy_part(source, target, is_inherited=False)
    copy_part(source, target, is_inherited=True)
    assert list_parts(str(tmp_path / "journal")) == []
