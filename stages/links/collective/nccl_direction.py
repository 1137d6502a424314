"""One direction of a link between two CUDA devices, by NCCL: transfers that nobody but we watch.

A transfer is a kernel on both devices. It spins until the other side's has come, so each side launches it only when the
data is computed. A peer that dies leaves the survivor's kernel spinning until its communicator is aborted. An aborted
transfer looks complete to CUDA, with any values: only `is_aborted` tells.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from headway.stages.links.collective.group import DIRECTIONS, OpenDirection
from headway.stages.links.collective.group_guard import Rendezvous

FIRST_POLL_S, MOST_POLL_S = 0.00005, 0.001
"""Pause between two questions whether a transfer is done: short at first, and longer where it takes long."""


class Work(Protocol):
    """torch's handle of a transfer."""

    def is_completed(self) -> bool:
        """Return whether its kernel has ended, or NCCL has reported an error."""
        ...

    def wait(self, timeout: timedelta) -> object:
        """Raise the error that NCCL has reported."""
        ...


class Communicator(Protocol):
    """What is used of torch's ProcessGroupNCCL."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Launch the kernel that sends."""
        ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Launch the kernel that receives."""
        ...

    def abort(self) -> None:
        """End all kernels, and free what the communicator has."""
        ...


class SideStream(Protocol):
    """A stream beside the computation."""

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which work enters this stream, on its device, in any thread."""
        ...

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""
        ...

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return memory that this stream may write to at once, and that the computation may read later."""
        ...


class OpenDirections(Protocol):
    """How the accelerators of two workers come to talk directly."""

    def __call__(self, device: torch.device, *, timeout: timedelta) -> OpenDirection | None:
        """Return how to open a direction; None if they do not. timeout: maximum time of each step."""
        ...


class NcclDirection:
    """A `DeviceDirection`."""

    def __init__(self, communicator: Communicator, stream: SideStream, *, peer: int) -> None:
        self._communicator = communicator
        self._stream = stream
        self._peer = peer
        self._is_aborted = threading.Event()

    def takes(self, tensor: Tensor) -> bool:
        """See `DeviceDirection`."""
        return self._stream.takes(tensor)

    def send(self, tensor: Tensor) -> "NcclTransfer":
        """See `DeviceDirection`."""
        with self._stream.entered():
            work = self._communicator.send([tensor], self._peer, 0)
        return NcclTransfer(work, self._is_aborted, f"the peer's card took nothing of {tensor.nbytes} bytes")

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, "NcclTransfer"]:
        """See `DeviceDirection`."""
        with self._stream.entered():
            tensor = self._stream.empty(dtype, shape)
            work = self._communicator.recv([tensor], self._peer, 0)
        return tensor, NcclTransfer(work, self._is_aborted, f"the peer's card sent nothing of {tensor.nbytes} bytes")

    def greet(self, *, is_sender: bool, timeout: timedelta) -> None:
        """Transfer one number, so that all that NCCL sets up at first use is there before the first frame.

        Raises RuntimeError; then the direction is aborted.
        """
        form = torch.float32, (1,)
        try:
            if is_sender:
                with self._stream.entered():
                    tensor = self._stream.empty(*form)
                transfer = self.send(tensor)
            else:
                tensor, transfer = self.receive(*form)
            transfer.wait(timeout)
        except RuntimeError:
            abort_aside(self)
            raise

    def abort(self) -> None:
        """See `DeviceDirection`."""
        self._is_aborted.set()  # first: what follows may never return
        self._communicator.abort()


class NcclTransfer:
    """A `DeviceTransfer` that is asked for, so that neither a peer nor NCCL can hold the thread beyond the deadline."""

    __slots__ = ("_is_aborted", "_late", "_work")

    def __init__(self, work: Work, is_aborted: threading.Event, late: str) -> None:
        self._work = work
        self._is_aborted = is_aborted
        self._late = late

    def wait(self, timeout: timedelta, *, meanwhile: Callable[[], None] | None = None) -> None:
        """See `DeviceTransfer`."""
        until, pause_s = monotonic() + timeout.total_seconds(), FIRST_POLL_S
        while not self._is_aborted.is_set() and not self._work.is_completed():
            if monotonic() >= until:
                raise RuntimeError(f"{self._late} for {timeout.total_seconds():.3g} s")
            if meanwhile is not None:
                meanwhile()
            sleep(pause_s)
            pause_s = min(1.25 * pause_s, MOST_POLL_S)
        self._raise_if_aborted()
        self._work.wait(timeout)
        self._raise_if_aborted()  # an abort between the two completes the kernel too

    def _raise_if_aborted(self) -> None:
        if self._is_aborted.is_set():
            raise RuntimeError("the group was aborted")


def abort_aside(what: Communicator | NcclDirection) -> threading.Thread:
    """Abort in a thread, which is returned. A communicator that nobody aborts is aborted where its last reference goes,
    and holds the interpreter's lock meanwhile.
    """
    thread = threading.Thread(target=what.abort, name="headway-abort", daemon=True)
    thread.start()
    return thread


def nccl_directions(device: torch.device, *, timeout: timedelta) -> OpenDirection | None:
    """Return how to open both directions to another worker with a card; None if the device is none.

    timeout: maximum time of each step of forming.
    """
    if device.type != "cuda":
        return None

    def open_direction(meeting: Rendezvous, sender: int) -> NcclDirection:
        communicator = _communicator(meeting, f"cuda-{DIRECTIONS[sender]}", device, timeout)
        direction = NcclDirection(communicator, _CudaSideStream(device), peer=1 - meeting.rank)
        direction.greet(is_sender=sender == meeting.rank, timeout=timeout)
        return direction

    return open_direction


def _communicator(meeting: Rendezvous, name: str, device: torch.device, timeout: timedelta) -> Any:
    from torch._C import _distributed_c10d as c10d

    nccl: Any = getattr(c10d, "ProcessGroupNCCL", None)
    if nccl is None:
        raise RuntimeError("this build of torch has no NCCL; the job's `link` can be grpc")
    options = nccl.Options()
    options._timeout = timeout  # of no transfer: those have their own
    options.config.blocking = 0
    torch.cuda.set_device(device)
    communicator = nccl(PrefixStore(name, meeting.store), meeting.rank, 2, options)
    try:
        communicator.eager_connect_single_device(device)
    except RuntimeError:
        abort_aside(communicator)
        raise
    return communicator


class _CudaSideStream:
    """A `SideStream` of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[Any]:
        """See `SideStream`."""
        torch.cuda.set_device(self._device)  # a new thread is on card 0, and would go back to it afterwards
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def takes(self, tensor: Tensor) -> bool:
        """See `SideStream`."""
        return tensor.is_cuda

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """See `SideStream`."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        tensor.record_stream(torch.cuda.default_stream(self._device))  # the stream that computes reads it
        return tensor
