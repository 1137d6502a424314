"""A device whose computation and copies take set times, without computing: each stream is a clock that runs ahead.

Work that enters a stream begins when the stream has done its last work, and not before now. An event is passed when the
time has come. So a gap of the compute stream is exactly what a real device would show for the same calls.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep

import torch
from torch import Tensor

from headway.stages.device.cpu import CpuMark, Held
from headway.stages.device.device import Moment
from headway.stages.device.streamed import Event, Stream
from headway.stages.links.link import Frame, Link
from headway.stages.schedule.operations import Op


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An `Event` at a known time."""

    at: float

    @property
    def is_passed(self) -> bool:
        return perf_counter() >= self.at

    def wait(self) -> None:
        while (left := self.at - perf_counter()) > 0:
            sleep(left)

    def seconds_until(self, later: Event) -> float:
        assert isinstance(later, TimedEvent)
        return later.at - self.at


@dataclass(frozen=True, slots=True)
class Computed:
    """One operation on the compute stream."""

    op: Op
    begin: float
    end: float


class TimedStreams:
    """A `Streams`. Copies move nothing: nobody reads the values."""

    name = "timed device"
    torch_device = torch.device("cpu")
    peak_bytes = 0

    def __init__(self, bytes_per_s: float) -> None:
        """bytes_per_s: rate of copies, in each direction."""
        self.computed: list[Computed] = []
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = dict.fromkeys(Stream, 0.0)

    def compute(self, op: Op, seconds: float) -> None:
        """Launch an operation."""
        self.computed.append(Computed(op, *self._enter(Stream.COMPUTE, seconds)))

    def copy_s(self, tensor: Tensor) -> float:
        """Return the seconds of a copy."""
        return tensor.nbytes / self._bytes_per_s

    def begin_peak(self) -> None:
        return

    def record(self, stream: Stream, *, is_timed: bool = False) -> TimedEvent:  # noqa: ARG002
        with self._lock:
            return TimedEvent(max(perf_counter(), self._free_at[stream]))

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, TimedEvent)
        with self._lock:
            self._free_at[stream] = max(self._free_at[stream], event.at)

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        assert target.nbytes == source.nbytes
        self._enter(stream, self.copy_s(source))

    def device_buffer(self, stream: Stream, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:  # noqa: ARG002
        return torch.zeros(tuple(shape), dtype=dtype)

    def used_by(self, stream: Stream, tensor: Tensor) -> None:  # noqa: ARG002
        return

    def host_buffer(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def is_on_host(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return True

    def is_host_buffer(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return True

    def _enter(self, stream: Stream, seconds: float) -> tuple[float, float]:
        with self._lock:
            begin = max(perf_counter(), self._free_at[stream])
            self._free_at[stream] = begin + seconds
            return begin, begin + seconds


class BlockingDevice:
    """The same device behind the design without a seam: copies run between computations, and the stage waits for them.

    It counts as immediate, because nothing happens beside the stage's thread.
    """

    name = "timed device, blocking copies"
    torch_device = torch.device("cpu")
    is_immediate = True
    peak_bytes = 0

    def __init__(self, streams: TimedStreams) -> None:
        self.streams = streams

    def begin_peak(self) -> None:
        return

    def copy_out(
        self,
        tensors: Sequence[Tensor],
        *,
        into: Sequence[Tensor] | None = None,  # noqa: ARG002
        is_bulk: bool = False,  # noqa: ARG002
    ) -> Held:
        self._block(tensors)
        return Held(tuple(tensors))

    def copy_in(self, tensors: Sequence[Tensor]) -> Held:
        self._block(tensors)
        return Held(tuple(tensors))

    def mark(self) -> CpuMark:
        return CpuMark(perf_counter())

    def after(self, moment: Moment, act: Callable[[], None]) -> None:  # noqa: ARG002
        act()

    def let_go(self) -> None:
        return

    def is_on_host(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return True

    def host_buffer(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def close(self) -> None:
        return

    def _block(self, tensors: Sequence[Tensor]) -> None:
        """A copy from or to pageable memory: it enters the compute stream, and returns when it is done."""
        for tensor in tensors:
            self.streams.copy(Stream.COMPUTE, tensor, tensor)
        self.streams.record(Stream.COMPUTE).wait()


class BlockingLink:
    """A `Link` whose `send` waits for the copy of its frame."""

    def __init__(self, link: Link, device: BlockingDevice) -> None:
        self._link = link
        self._device = device

    @property
    def peer(self) -> str:
        return self._link.peer

    def send(self, frame: Frame) -> None:
        self._device.copy_out(frame.tensors)
        self._link.send(frame)

    def close(self) -> None:
        self._link.close()
