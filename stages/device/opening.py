"""Opens the device of a worker."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.stages.device.cpu import CpuDevice
from headway.stages.device.device import StageDevice
from headway.stages.device.streamed import Event, Stream, StreamedDevice

# CUDA's streams, events and pinned memory, as `streamed.py` wants them.
#
# Pinned memory comes from torch's own allocator: it keeps freed blocks by size, and uses one again only when the
# copies from and to it are done.
#
# A new thread is on card 0, and its first call would make a context there, of half a GB. So each call that any thread
# may make comes after `set_device`, which costs less than a microsecond if nothing changes.


class CudaEvent:
    """An `Event`. Its wait blocks in the kernel instead of asking in a loop."""

    __slots__ = ("_device", "_event")

    def __init__(self, stream: Any, device: torch.device, *, is_timed: bool) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    @property
    def is_passed(self) -> bool:
        """See `Event`."""
        torch.cuda.set_device(self._device)
        return bool(self._event.query())

    def wait(self) -> None:
        """See `Event`."""
        torch.cuda.set_device(self._device)
        self._event.synchronize()

    def seconds_until(self, later: Event) -> float:
        """See `Event`."""
        assert isinstance(later, CudaEvent)
        return float(self._event.elapsed_time(later._event)) / 1e3

    def delay(self, stream: Any) -> None:
        """Let a stream of CUDA wait for it."""
        stream.wait_event(self._event)


class CudaStreams:
    """A `Streams`. The compute stream is the current one of the thread that calls."""

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None, "a worker has one card"
        self.torch_device = device
        self.name = str(device)
        self._side: dict[Stream, Any] = {
            stream: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for stream in Stream
            if stream is not Stream.COMPUTE
        }

    @property
    def peak_bytes(self) -> int:
        """See `Streams`."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def begin_peak(self) -> None:
        """See `Streams`."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def record(self, stream: Stream, *, is_timed: bool = False) -> CudaEvent:
        """See `Streams`."""
        return CudaEvent(self._stream(stream), self.torch_device, is_timed=is_timed)

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Streams`."""
        assert isinstance(event, CudaEvent)
        event.delay(self._stream(stream))

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """See `Streams`."""
        with torch.no_grad(), torch.cuda.stream(self._stream(stream)):
            target.copy_(source, non_blocking=True)

    def device_buffer(self, stream: Stream, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """See `Streams`."""
        with torch.cuda.stream(self._stream(stream)):
            return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def used_by(self, stream: Stream, tensor: Tensor) -> None:
        """See `Streams`."""
        tensor.record_stream(self._stream(stream))

    def host_buffer(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """See `Streams`."""
        torch.cuda.set_device(self.torch_device)
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def is_on_host(self, tensor: Tensor) -> bool:
        """See `Streams`."""
        return tensor.is_cpu

    def is_host_buffer(self, tensor: Tensor) -> bool:
        """See `Streams`."""
        return tensor.is_pinned()

    def _stream(self, stream: Stream) -> Any:
        torch.cuda.set_device(self.torch_device)
        return torch.cuda.current_stream(self.torch_device) if stream is Stream.COMPUTE else self._side[stream]


def open_device(device: torch.device, *, on_failure: Callable[[BaseException], None]) -> StageDevice:
    """Return the device. on_failure: is told of errors in the device's threads, and must not block."""
    if device.type == "cuda":
        return StreamedDevice(CudaStreams(device), on_failure=on_failure)
    return CpuDevice()
