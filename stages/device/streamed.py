"""A device with streams: which copy waits for what, and what must live until it is done.

A copy to the host waits, in its own stream, for the computation launched before it. A copy to the device waits for
nothing: its target is fresh memory of its stream. The compute stream waits for it where the tensors are first used.
The host waits for nothing. `Streams` are the few calls that CUDA has, and that a fake can make late.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from queue import Full, Queue
from time import monotonic, sleep
from typing import Protocol

import torch
from torch import Tensor

from headway.stages.device.device import DeviceLateError, Mark, Moment


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


# Calls functions one after the other, each once its event is passed, in a thread of its own.

MOST_WAITING = 4096
"""Entries. A stage launches a few operations ahead of its device, so more of them is a bug."""


class Completions:
    """One line of events of one stream. Its thread starts with the first event."""

    def __init__(self, name: str, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._line: Queue[tuple[Event, Callable[[], None]] | None] = Queue(MOST_WAITING)
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=f"headway-{name}", daemon=True)

    def add(self, event: Event, act: Callable[[], None]) -> None:
        """Call `act` after the event, and after all that was added before. Raises OverflowError beyond MOST_WAITING."""
        if not self._thread.is_alive() and self._is_open:
            self._thread.start()
        try:
            self._line.put_nowait((event, act))
        except Full:
            raise OverflowError(f"{self._thread.name}: more than {MOST_WAITING} events wait") from None

    def close(self) -> None:
        """End the thread after the event for which it waits. Idempotent."""
        if self._is_open:
            self._is_open = False
            with suppress(Full):  # then the thread sees that it is closed when it takes the next entry
                self._line.put_nowait(None)

    def _run(self) -> None:
        while (entry := self._line.get()) is not None and self._is_open:
            event, act = entry
            try:
                event.wait()
                if self._is_open:
                    act()
            except BaseException as error:  # the thread that computes raises it
                self._on_failure(error)
            del entry, event, act  # they hold tensors, and the next entry may take long


POLL_S = 0.0005
"""Pause between two questions of a wait with a deadline. Only rare waits ask; threads of the device block."""


class StreamMark:
    """A `Mark`: a timed event of the compute stream."""

    __slots__ = ("_device", "event")

    def __init__(self, event: Event, device: str) -> None:
        self.event = event
        self._device = device

    @property
    def is_done(self) -> bool:
        """See `Mark`."""
        return self.event.is_passed

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark`."""
        assert isinstance(earlier, StreamMark)
        return earlier.event.seconds_until(self.event)

    def wait(self, timeout_s: float) -> None:
        """See `Mark`."""
        _wait(self.event, timeout_s, device=self._device, what="computation")


class CopyToHost:
    """A `HostCopy`: its tensors are complete once its event is passed."""

    __slots__ = ("_device", "_targets", "event")

    def __init__(self, targets: tuple[Tensor, ...], event: Event, device: str) -> None:
        self._targets = targets
        self.event = event
        self._device = device

    @property
    def is_done(self) -> bool:
        """See `HostCopy`."""
        return self.event.is_passed

    def wait(self, timeout_s: float) -> tuple[Tensor, ...]:
        """See `HostCopy`."""
        _wait(self.event, timeout_s, device=self._device, what="a copy to the host")
        return self._targets


class CopyToDevice:
    """A `DeviceCopy`: the compute stream waits for its event when the tensors are taken."""

    __slots__ = ("_targets", "event", "streams")

    def __init__(self, targets: tuple[Tensor, ...], event: Event, streams: Streams) -> None:
        self._targets = targets
        self.event = event
        self.streams = streams

    @property
    def is_done(self) -> bool:
        """See `DeviceCopy`."""
        return self.event.is_passed

    def take(self) -> tuple[Tensor, ...]:
        """See `DeviceCopy`."""
        self.streams.wait(Stream.COMPUTE, self.event)
        for tensor in self._targets:
            # The memory is the copying stream's: it would use it again while the computation still reads it.
            self.streams.used_by(Stream.COMPUTE, tensor)
        return self._targets


class StreamedDevice:
    """A `StageDevice` with streams."""

    is_immediate = False

    def __init__(self, streams: Streams, *, on_failure: Callable[[BaseException], None]) -> None:
        """on_failure: is called in a thread of the device, and must not block."""
        self.streams = streams
        self.name, self.torch_device = streams.name, streams.torch_device
        self.begin_peak, self.is_on_host, self.host_buffer = streams.begin_peak, streams.is_on_host, streams.host_buffer
        self._copies = Completions(f"{streams.name} copies", on_failure)
        self._arrivals = Completions(f"{streams.name} arrivals", on_failure)
        self._marks = Completions(f"{streams.name} marks", on_failure)
        self._lock = threading.Lock()
        self._held: dict[Stream, deque[tuple[Event, tuple[Tensor, ...]]]] = {stream: deque() for stream in Stream}
        """What the copies of each stream still read, in their order."""

    @property
    def peak_bytes(self) -> int:
        """See `StageDevice`."""
        return self.streams.peak_bytes

    def copy_out(
        self, tensors: Sequence[Tensor], *, into: Sequence[Tensor] | None = None, is_bulk: bool = False
    ) -> CopyToHost:
        """See `StageDevice`."""
        streams, stream = self.streams, Stream.BULK if is_bulk else Stream.OUT
        sources = tuple(tensor.detach().contiguous() for tensor in tensors)
        targets = tuple(streams.host_buffer(t.dtype, t.shape) for t in sources) if into is None else tuple(into)
        with self._lock:
            streams.wait(stream, streams.record(Stream.COMPUTE))
            event = self._copy(stream, targets, sources)
        return CopyToHost(targets, event, self.name)

    def copy_in(self, tensors: Sequence[Tensor]) -> CopyToDevice:
        """See `StageDevice`. Tensors that are on the device already stay where they are."""
        streams = self.streams
        sources = tuple(self._pinned(tensor) for tensor in tensors)
        with self._lock:
            targets = tuple(
                streams.device_buffer(Stream.IN, t.dtype, t.shape) if streams.is_on_host(t) else t for t in sources
            )
            event = self._copy(Stream.IN, targets, sources)
        return CopyToDevice(targets, event, streams)

    def mark(self) -> StreamMark:
        """See `StageDevice`."""
        return StreamMark(self.streams.record(Stream.COMPUTE, is_timed=True), self.name)

    def after(self, moment: Moment, act: Callable[[], None]) -> None:
        """See `StageDevice`."""
        match moment:
            case StreamMark():
                self._marks.add(moment.event, act)
            case CopyToDevice():
                self._arrivals.add(moment.event, act)
            case CopyToHost():
                self._copies.add(moment.event, act)
            case _:
                raise AssertionError(f"a moment of another device: {moment}")

    def let_go(self) -> None:
        """See `StageDevice`."""
        with self._lock:
            self._let_go_of_read()

    def close(self) -> None:
        """See `StageDevice`."""
        self._copies.close()
        self._arrivals.close()
        self._marks.close()

    def _copy(self, stream: Stream, targets: Sequence[Tensor], sources: tuple[Tensor, ...]) -> Event:
        """Copy, and hold the sources until that is done."""
        for target, source in zip(targets, sources, strict=True):
            if target is not source:
                self.streams.copy(stream, target, source)
        event = self.streams.record(stream)
        self._let_go_of_read()
        self._held[stream].append((event, sources))
        return event

    def _let_go_of_read(self) -> None:
        """Let go of what passed copies have read, on every stream: one that rests would keep its last sources."""
        for held in self._held.values():
            while held and held[0][0].is_passed:
                held.popleft()

    def _pinned(self, tensor: Tensor) -> Tensor:
        """Return what a copy to the device reads: from pageable memory the call would wait for the copy."""
        if not self.streams.is_on_host(tensor) or self.streams.is_host_buffer(tensor):
            return tensor
        pinned = self.streams.host_buffer(tensor.dtype, tensor.shape)
        return pinned.copy_(tensor)


def _wait(event: Event, timeout_s: float, *, device: str, what: str) -> None:
    until = monotonic() + timeout_s
    while not event.is_passed:
        if monotonic() >= until:
            raise DeviceLateError(device, what, timeout_s)
        sleep(POLL_S)
