"""A device with streams in host memory whose copies are late, by seed, and out of order between its streams.

Computation happens at once, in the thread that launches it. A copy reads its source only when it is done, up to
`max_late_s` later. Until then its target is poison: NaN, or -1. The memory of a freed buffer is poison
too, and the next buffer of its size takes it. So a result is wrong if a wait is missing, if something is freed or
written too early, or if a copy begins before the computation that it is to wait for.
"""

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from time import monotonic, sleep
from typing import Any

import numpy
import torch
from torch import Tensor

from headway.stages.device.streamed import Event, Stream, StreamedDevice

MAX_LATE_S = 0.002
POISON_BYTE = 0xFF
"""A float of any size that has only these bytes is NaN, and an integer is -1: no token, and no target."""


def late_device(
    seed: int, *, max_late_s: float = MAX_LATE_S, on_failure: Callable[[BaseException], None] | None = None
) -> StreamedDevice:
    """A `StageDevice` on late streams."""
    return StreamedDevice(LateStreams(seed, max_late_s=max_late_s), on_failure=on_failure or _raise)


def _raise(error: BaseException) -> None:
    raise error


@dataclass(slots=True)
class _Work:
    """An entry of a stream."""

    due: float
    act: Callable[[], None]
    after: "LateEvent | None" = None
    is_done: bool = False


@dataclass(slots=True, eq=False)
class LateEvent:
    """An `Event`: it is passed when its stream has done its last work."""

    streams: "LateStreams"
    stream: Stream
    last: _Work
    covers: tuple["weakref.ref[Tensor]", ...] = ()
    at: float = field(default_factory=monotonic)

    @property
    def is_passed(self) -> bool:
        return self.streams.has_passed(self)

    def wait(self) -> None:
        while not self.is_passed:
            sleep(0.0002)

    def seconds_until(self, later: Event) -> float:
        assert isinstance(later, LateEvent)
        assert self.is_passed
        assert later.is_passed
        return later.last.due - self.last.due


class LateStreams:
    """A `Streams`. All of its state is under one lock."""

    name = "late device"
    torch_device = torch.device("cpu")
    peak_bytes = 0

    def __init__(self, seed: int, *, max_late_s: float = MAX_LATE_S) -> None:
        self.faults: list[str] = []
        """Rules of streams that were broken without a trace in the results."""
        self.slow_out_s = 0.0
        """Seconds by which each copy to the host is later still."""
        self.is_stopped = False
        """Whether nothing that enters a stream from now on is ever done."""
        self._random = random.Random(seed)
        self._max_late_s = max_late_s
        self._lock = threading.RLock()
        self._queues: dict[Stream, deque[_Work]] = {stream: deque() for stream in Stream}
        self._covered: dict[Stream, list[weakref.ref[Tensor]]] = {stream: [] for stream in Stream}
        """Targets of the copies since the stream's last event."""
        self._may_read: dict[Stream, bool] = dict.fromkeys(Stream, False)
        """Whether the stream waits for all computation that was launched so far."""
        self._free: dict[int, list[Any]] = {}
        self._freed: deque[Any] = deque()
        """Memory of buffers that have died: finalizers run anywhere, so they only add to this."""
        self._device_buffers: dict[int, str] = {}
        """Data pointer of each living device buffer to `fresh`, `read` by the computation, or `guarded`."""
        self._host_buffers: set[int] = set()

    def begin_peak(self) -> None:
        return

    def record(self, stream: Stream, *, is_timed: bool = False) -> LateEvent:  # noqa: ARG002
        with self._lock:
            covers, self._covered[stream] = tuple(self._covered[stream]), []
            if stream is not Stream.COMPUTE:
                self._may_read[stream] = False  # what is computed from now on needs another wait
            return LateEvent(self, stream, self._enter(stream, lambda: None), covers)

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, LateEvent)
        with self._lock:
            if stream is Stream.COMPUTE:
                self._run_until(event)
                for reference in event.covers:
                    if (tensor := reference()) is not None:
                        self._device_buffers[tensor.data_ptr()] = "read"
                return
            self._may_read[stream] |= event.stream is Stream.COMPUTE
            self._enter(stream, lambda: None, after=event)

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        assert target.dtype == source.dtype
        target_of, source_of = weakref.ref(target), weakref.ref(source)
        with self._lock:
            _poison(target)
            is_early = stream is not Stream.IN and not self._may_read[stream]
            self._covered[stream].append(target_of)

        def act() -> None:
            target, source = target_of(), source_of()
            if target is not None and source is not None and not is_early:
                _bytes(target)[:] = _bytes(source)

        self._enter(stream, act)

    def device_buffer(self, stream: Stream, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        assert stream is Stream.IN
        tensor = self._buffer(dtype, shape, self._device_buffer_died)
        with self._lock:
            self._device_buffers[tensor.data_ptr()] = "fresh"
        return tensor

    def used_by(self, stream: Stream, tensor: Tensor) -> None:
        assert stream is Stream.COMPUTE
        with self._lock:
            if tensor.data_ptr() in self._device_buffers:
                self._device_buffers[tensor.data_ptr()] = "guarded"

    def host_buffer(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        tensor = self._buffer(dtype, shape, self._host_buffers.discard)
        with self._lock:
            self._host_buffers.add(tensor.data_ptr())
        return tensor

    def is_on_host(self, tensor: Tensor) -> bool:
        with self._lock:
            return tensor.data_ptr() not in self._device_buffers

    def is_host_buffer(self, tensor: Tensor) -> bool:
        with self._lock:
            return tensor.data_ptr() in self._host_buffers

    def has_passed(self, event: LateEvent) -> bool:
        """Do all work that is due; return whether the event's is among it."""
        with self._lock:
            now = monotonic()
            for stream in self._random.sample(list(Stream), len(Stream)):
                self._run(stream, now)
            return event.last.is_done

    def _enter(self, stream: Stream, act: Callable[[], None], *, after: LateEvent | None = None) -> _Work:
        with self._lock:
            late_s = self._random.choice((0.0, 0.0, self._random.random())) * self._max_late_s
            queue = self._queues[stream]
            earliest = queue[-1].due if queue else 0.0
            late_s += self.slow_out_s if stream is Stream.OUT else 0.0
            due = inf if self.is_stopped else max(earliest, monotonic() + late_s)
            work = _Work(due, act, after)
            queue.append(work)
            return work

    def _run(self, stream: Stream, now: float) -> None:
        queue = self._queues[stream]
        while queue and queue[0].due <= now:
            if queue[0].after is not None and not queue[0].after.last.is_done:
                return
            work = queue.popleft()
            work.act()
            work.is_done = True

    def _run_until(self, event: LateEvent) -> None:
        """The compute stream waits, and so does eager computation: all before the event happens now."""
        queue = self._queues[event.stream]
        while not event.last.is_done:
            work = queue.popleft()
            if work.after is not None:
                self._run_until(work.after)
            work.act()
            work.is_done = True

    def _buffer(self, dtype: torch.dtype, shape: Sequence[int], died: Callable[[int], None]) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        with self._lock:
            while self._freed:
                block = self._freed.popleft()
                self._free.setdefault(len(block), []).append(block)
            free = self._free.get(num_bytes)
            block = free.pop() if free else numpy.empty(num_bytes, dtype=numpy.uint8)
        block[:] = POISON_BYTE
        view = numpy.frombuffer(block.data, dtype=numpy.uint8)
        view.flags.writeable = True
        tensor = torch.from_numpy(view).view(dtype).view(tuple(shape))
        weakref.finalize(view, self._give_back, block, died, tensor.data_ptr()).atexit = False
        return tensor

    def _give_back(self, block: Any, died: Callable[[int], None], data_ptr: int) -> None:
        died(data_ptr)
        block[:] = POISON_BYTE
        self._freed.append(block)

    def _device_buffer_died(self, data_ptr: int) -> None:
        if self._device_buffers.pop(data_ptr, "") == "read":
            self.faults.append("the computation read memory that the copying stream may use again")


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _poison(tensor: Tensor) -> None:
    if tensor.numel():
        _bytes(tensor)[:] = POISON_BYTE
