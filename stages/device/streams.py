"""What `streamed.py` asks of a device with streams: a few calls that CUDA has, and that a fake can make late."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor


class Stream(Enum):
    """The queues of a device. Each runs in order; between two of them only events make an order."""

    COMPUTE = "compute"  # of the thread that computes; operations on tensors run in it
    OUT = "out"  # small copies to the host
    BULK = "bulk"  # large copies to the host
    IN = "in"  # copies to the device


class Event(Protocol):
    """A moment of one stream."""

    @property
    def is_passed(self) -> bool:
        """Return whether the stream has passed it. Never waits."""
        ...

    def wait(self) -> None:
        """Return when it is passed. Other Python threads run meanwhile. Only threads of the device call it."""
        ...

    def seconds_until(self, later: "Event") -> float:
        """Return the device's seconds between two passed events that were recorded with times."""
        ...


class Streams(Protocol):
    """Calls return at once."""

    @property
    def name(self) -> str:
        """Return the device's name for people."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Return where its tensors are."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes allocated since `begin_peak`."""
        ...

    def begin_peak(self) -> None:
        """Forget the present peak."""
        ...

    def record(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Return the moment after all that is in the stream now."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what enters the stream from now on begin after the event."""
        ...

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Copy in this stream, between a buffer of the host and the device. Both must live until it is done."""
        ...

    def device_buffer(self, stream: Stream, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return an empty tensor on the device. When it is freed, work in this stream may use its memory at once."""
        ...

    def used_by(self, stream: Stream, tensor: Tensor) -> None:
        """Let the memory of a freed tensor be used only after what is in this stream when it is freed."""
        ...

    def host_buffer(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return an empty tensor in pinned memory. When it is freed, others may use its memory at once."""
        ...

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory."""
        ...

    def is_host_buffer(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in pinned memory."""
        ...
