"""Reads tensors from a file to a device, piece by piece: while one piece is copied in, the next one is read.

The pieces pass through a few blocks of pinned memory, allocated once for a load. So the host never holds a whole layer.
"""

from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Final

import torch
from torch import Tensor

from headway.stages.device.device import DeviceCopy, DeviceLateError, StageDevice

BLOCK_BYTES: Final = 64 << 20
NUM_BLOCKS: Final = 3
PATIENCE_S: Final = 60.0
POLL_S: Final = 0.0002


class DeviceLoading:
    """One load, in the computing thread."""

    def __init__(self, device: StageDevice, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._under_way: dict[int, tuple[Tensor, DeviceCopy]] = {}
        """Per block the place on the device of what it holds, and its copy."""
        self._number = 0

    def read(self, dtype: torch.dtype, shape: Sequence[int], fill: Callable[[Tensor], None]) -> Tensor:
        """Return a tensor on the device; it is complete after `finish`. fill: reads the next bytes of the file."""
        if self._device.is_immediate:
            tensor = torch.empty(tuple(shape), dtype=dtype)
            fill(tensor.reshape(-1).view(torch.uint8))
            return tensor
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device.torch_device)
        flat = tensor.reshape(-1).view(torch.uint8)
        for begin in range(0, len(flat), self._block_bytes):
            place = flat[begin : begin + self._block_bytes]
            piece = self._free_block()[: len(place)]
            fill(piece)
            self._under_way[self._number] = (place, self._device.copy_in([piece]))
        return tensor

    def finish(self) -> None:
        """Return when all that was read is on the device. Raises DeviceLateError."""
        for number in list(self._under_way):
            self._settle(number)

    def _free_block(self) -> Tensor:
        """Return the block that was filled longest ago, once its content is on the device."""
        self._number = (self._number + 1) % NUM_BLOCKS
        if len(self._blocks) < NUM_BLOCKS:
            self._blocks.append(self._device.host_buffer(torch.uint8, (self._block_bytes,)))
            self._number = len(self._blocks) - 1
        self._settle(self._number)
        return self._blocks[self._number]

    def _settle(self, number: int) -> None:
        if number not in self._under_way:
            return
        place, copy = self._under_way.pop(number)
        place.copy_(copy.take()[0])
        until = monotonic() + PATIENCE_S
        while not copy.is_done:  # the block may be filled again only then
            if monotonic() > until:
                raise DeviceLateError(self._device.name, "a copy of a layer", PATIENCE_S)
            sleep(POLL_S)
