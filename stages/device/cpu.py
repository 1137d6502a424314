"""The CPU as a device: its memory is the host's, so everything is done at once and nothing is copied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from headway.stages.device.device import Mark, Moment


@dataclass(frozen=True, slots=True)
class CpuMark:
    """A moment of the clock."""

    at: float
    is_done: Final = True

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark`."""
        assert isinstance(earlier, CpuMark)
        return self.at - earlier.at

    def wait(self, timeout_s: float) -> None:
        """See `Mark`."""


class Held:
    """Tensors that are already where they are to go."""

    __slots__ = ("_tensors",)
    is_done: Final = True

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def take(self) -> tuple[Tensor, ...]:
        """See `DeviceCopy`."""
        return self._tensors

    def wait(self, timeout_s: float) -> tuple[Tensor, ...]:  # noqa: ARG002
        """See `HostCopy`."""
        return self._tensors


class CpuDevice:
    """A `StageDevice` without streams, threads and copies."""

    name: Final = "cpu"
    torch_device: Final = torch.device("cpu")
    is_immediate: Final = True
    peak_bytes: Final = 0

    def begin_peak(self) -> None:
        """See `StageDevice`."""

    def copy_out(
        self,
        tensors: Sequence[Tensor],
        *,
        into: Sequence[Tensor] | None = None,
        is_bulk: bool = False,  # noqa: ARG002
    ) -> Held:
        """See `StageDevice`. Only a copy into given buffers copies."""
        if into is None:
            return Held(tuple(tensors))
        with torch.no_grad():
            for target, source in zip(into, tensors, strict=True):
                target.copy_(source)
        return Held(tuple(into))

    def copy_in(self, tensors: Sequence[Tensor]) -> Held:
        """See `StageDevice`."""
        return Held(tuple(tensors))

    def mark(self) -> CpuMark:
        """See `StageDevice`."""
        return CpuMark(perf_counter())

    def after(self, moment: Moment, act: Callable[[], None]) -> None:  # noqa: ARG002
        """See `StageDevice`."""
        act()

    def let_go(self) -> None:
        """See `StageDevice`."""

    def is_on_host(self, tensor: Tensor) -> bool:  # noqa: ARG002
        """See `StageDevice`."""
        return True

    def host_buffer(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """See `StageDevice`."""
        return torch.empty(tuple(shape), dtype=dtype)

    def close(self) -> None:
        """See `StageDevice`."""
