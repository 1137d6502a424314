"""Host memory for snapshots that takes long to allocate."""

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headway.stages.device.streamed import StreamedDevice
from headway.stages.state import host_blocks
from headway.stages.state.host_blocks import HostBlocks, HostMemoryError
from tests.rigs.late_streams import LateStreams


class SlowMemory(LateStreams):
    """Pinned memory that comes when the test says so."""

    def __init__(self) -> None:
        super().__init__(1)
        self.comes = threading.Event()

    def host_buffer(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        assert self.comes.wait(20.0)
        return super().host_buffer(dtype, shape)


def test_a_snapshot_is_missed_rather_than_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel still pins the memory → the copy is refused with the reason; later it is done."""
    monkeypatch.setattr(host_blocks, "ALLOCATING_S", 0.01)
    streams = SlowMemory()
    blocks = HostBlocks(StreamedDevice(streams, on_failure=lambda _: None), block_bytes=64)
    blocks.reserve(40)
    with pytest.raises(HostMemoryError, match="still being allocated"):
        blocks.begin_copy([torch.ones(10)])
    streams.comes.set()
    monkeypatch.setattr(host_blocks, "ALLOCATING_S", 20.0)
    copied = blocks.begin_copy([torch.ones(10)])
    copied.copy.wait(20.0)
    assert torch.equal(copied.pieces[0][0].view(torch.float32), torch.ones(10))
