"""Layers that are read to a device in pieces: their bits, on the CPU and on a device whose copies are late."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headway.stages.device.cpu import CpuDevice
from headway.stages.errors import DamagedFileError
from headway.stages.state.device_loading import NUM_BLOCKS, DeviceLoading
from headway.stages.state.state_file import StateHeader, read_state, write_state
from tests.rigs.late_streams import late_device

HEADER = StateHeader(job="j", layer="head", boundary=5, timeline=1, dtype="float32")


def write(path: Path) -> dict[str, torch.Tensor]:
    """Write tensors smaller and larger than a block, of several dtypes, one of them empty."""
    tensors = {
        "a": torch.randn(100, 33),
        "b": torch.arange(7),
        "c": torch.randn(5000).to(torch.bfloat16),
        "d": torch.empty(0),
        "e": torch.randn(3),
    }
    write_state(path, tensors, HEADER)
    return tensors


@pytest.mark.parametrize("seed", range(5))
def test_pieces_on_late_copies_are_the_file(tmp_path: Path, seed: int) -> None:
    """Blocks are filled again while copies are late: no byte is lost, and few blocks are ever taken."""
    expected = write(tmp_path / "file")
    device = late_device(seed)
    blocks: list[torch.Tensor] = []

    def take(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        blocks.append(device.streams.host_buffer(dtype, shape))
        return blocks[-1]

    device.host_buffer = take
    header, found = read_state(tmp_path / "file", loading=DeviceLoading(device, block_bytes=1000))
    assert header == HEADER
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len(blocks) == NUM_BLOCKS
    device.close()


def test_a_cpu_reads_straight_into_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is staged and nothing copied."""
    expected = write(tmp_path / "file")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("staged")

    monkeypatch.setattr(CpuDevice, "host_buffer", refuse)
    monkeypatch.setattr(CpuDevice, "copy_in", refuse)
    _, found = read_state(tmp_path / "file", loading=DeviceLoading(CpuDevice()))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_altered_file_is_refused_on_any_device(tmp_path: Path) -> None:
    """The digest is checked over what was read, whatever became of it."""
    path = tmp_path / "file"
    write(path)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    device = late_device(1)
    with pytest.raises(DamagedFileError, match="checksum"):
        read_state(path, loading=DeviceLoading(device, block_bytes=1000))
    device.close()
