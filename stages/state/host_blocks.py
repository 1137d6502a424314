"""Host memory for a copy of a stage's state, from which a snapshot is hashed and written while training goes on.

It is allocated once, in a thread, in blocks of one size: torch rounds pinned memory up to a power of two.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headway.stages.device.device import HostCopy, StageDevice

BLOCK_BYTES: Final = 64 << 20
ALLOCATING_S: Final = 1.0
"""Maximum wait for blocks that are still being allocated: pinning takes seconds, and an update would wait for them."""


@dataclass
class HostMemoryError(Exception):
    """The host has no memory for the copy."""

    num_bytes: int
    reason: str

    def __str__(self) -> str:
        return f"the host has no memory for a copy of {self.num_bytes} bytes: {self.reason}"


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Tensors on their way to the blocks."""

    copy: HostCopy
    pieces: Sequence[tuple[Tensor, ...]]
    """For each tensor its bytes, in order, complete once the copy is done."""


class HostBlocks:
    """The blocks of one worker. They hold one copy; the next one overwrites it. Belongs to the computing thread."""

    def __init__(self, device: StageDevice, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._allocating: threading.Thread | None = None
        self._trouble = ""

    def reserve(self, num_bytes: int) -> None:
        """Allocate, in a thread, what a copy of so many bytes takes. Blocks that are there already are kept.

        Does nothing while an earlier call is still allocating: a copy asks again for what it misses then.
        """
        if not self._is_allocated():
            return
        missing = -(-num_bytes // self._block_bytes) - len(self._blocks)
        if missing > 0:
            self._allocating = threading.Thread(
                target=self._allocate, args=(missing,), name="headway-host-blocks", daemon=True
            )
            self._allocating.start()

    def begin_copy(self, tensors: Sequence[Tensor]) -> StateCopy:
        """Begin to copy tensors. The last copy must be read, and no tensor may change before this one is done.

        Raises HostMemoryError.
        """
        flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        num_bytes = sum(len(data) for data in flat)
        self.reserve(num_bytes)
        if not self._is_allocated():
            raise HostMemoryError(num_bytes, "it is still being allocated")
        if self._block_bytes * len(self._blocks) < num_bytes:
            raise HostMemoryError(num_bytes, self._trouble)
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        pieces: list[tuple[Tensor, ...]] = []
        at = 0
        for data in flat:
            begin = len(targets)
            for source, target in self._cut(data, at):
                sources.append(source)
                targets.append(target)
            pieces.append(tuple(targets[begin:]))
            at += len(data)
        return StateCopy(self._device.copy_out(sources, into=targets, is_bulk=True), pieces)

    def _cut(self, data: Tensor, at: int) -> list[tuple[Tensor, Tensor]]:
        """Return the parts of a tensor's bytes, each with its place in a block, from a place of all blocks on."""
        cuts = []
        done = 0
        while done < len(data):
            number, begin = divmod(at + done, self._block_bytes)
            length = min(len(data) - done, self._block_bytes - begin)
            cuts.append((data[done : done + length], self._blocks[number][begin : begin + length]))
            done += length
        return cuts

    def _is_allocated(self) -> bool:
        """Return whether the blocks are there, or their trouble, at the latest after ALLOCATING_S."""
        if self._allocating is not None:
            self._allocating.join(ALLOCATING_S)
            if self._allocating.is_alive():
                return False
            self._allocating = None
        return True

    def _allocate(self, num_blocks: int) -> None:
        try:
            for _ in range(num_blocks):
                self._blocks.append(self._device.host_buffer(torch.uint8, (self._block_bytes,)))
        except (MemoryError, RuntimeError) as error:  # what there is stays; a copy says what is missing
            self._trouble = " ".join(str(error).split())
