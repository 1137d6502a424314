"""Process groups of two ranks for one collective link: how they are made and ended.

There is one group for each direction, so that a pending receive does not block a send. All messages, and tensors in
host memory, travel by gloo. Tensors of two CUDA workers travel by NCCL, in further groups.

Neither is encrypted, and neither checks who connects: both are for a private network. group_guard.py restricts who may
connect to gloo's ports.
"""

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from headway.stages.links.collective.group_guard import GroupGuard, Rendezvous, new_listeners
from headway.stages.links.receive_buffers import empty_tensor

MESSAGES, PAYLOADS, _ABORT = 0, 1, 2
"""Tags: messages of one tag arrive in order. Nothing is ever sent with the last tag."""

ACCEPTOR, DIALLER = 0, 1
"""The ranks."""

DIRECTIONS = ("from-acceptor", "from-dialler")


class Transfer(Protocol):
    """A tensor on its way."""

    def wait(self, timeout: timedelta) -> object:
        """Return when the tensor may be used. Raises RuntimeError when it does not get through, or not in time."""
        ...


class GroupOfTwo:
    """Both directions between two workers. One thread sends, one receives; any thread may abort."""

    def __init__(self, meeting: Rendezvous, device: torch.device, *, timeout: timedelta) -> None:
        """Return when the other side is there too. Raises RuntimeError when it is not within `timeout`."""
        hosts = _gloo_groups(meeting, timeout)
        self._meeting = meeting  # NCCL uses the store when it first sends
        self._peer = 1 - meeting.rank
        self._out, self._in = hosts[meeting.rank], hosts[self._peer]
        self._device_out: _CudaGroup | None = None
        self._device_in: _CudaGroup | None = None
        if device.type == "cuda":
            devices = [_CudaGroup(meeting, f"cuda-{name}", device, timeout) for name in DIRECTIONS]
            self._device_out, self._device_in = devices[meeting.rank], devices[self._peer]

    def send_message(self, message: Tensor) -> Transfer:
        """Begin to send; the tensor must not be written to until the transfer is done."""
        transfer: Transfer = self._out.send([message], self._peer, MESSAGES)
        return transfer

    def receive_message(self, buffer: Tensor) -> Transfer:
        """Begin to receive into the tensor, which may be larger than the message."""
        transfer: Transfer = self._in.recv([buffer], self._peer, MESSAGES)
        return transfer

    def goes_by_device(self, tensor: Tensor) -> bool:
        """Return whether a payload is sent from accelerator to accelerator."""
        return self._device_out is not None and tensor.device.type == "cuda"

    def send(self, tensor: Tensor, *, is_on_device: bool) -> Transfer:
        """Send like `send_message`, for a contiguous tensor of a payload that is not empty."""
        if is_on_device:
            assert self._device_out is not None
            return self._device_out.send(tensor, self._peer)
        transfer: Transfer = self._out.send([tensor.cpu()], self._peer, PAYLOADS)
        return transfer

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...], *, is_on_device: bool) -> tuple[Tensor, Transfer]:
        """Begin to receive into a new tensor. Raises RuntimeError for a device on a link without one."""
        if is_on_device:
            if self._device_in is None:
                raise RuntimeError("a tensor for an accelerator, on a link between hosts")
            return self._device_in.receive(dtype, shape, self._peer)
        tensor = empty_tensor(dtype, shape)
        return tensor, self._in.recv([tensor], self._peer, PAYLOADS)

    def abort(self) -> None:
        """Fail every waiting transfer now. Returns at once; NCCL may be slow, or never end."""
        for group, peer in ((self._in, self._peer), (self._out, self._peer)):
            _abort_gloo(group, peer)
        for device_group in (self._device_in, self._device_out):
            if device_group is not None:
                threading.Thread(target=device_group.abort, name="headway-abort", daemon=True).start()


def _gloo_groups(meeting: Rendezvous, timeout: timedelta) -> list[Any]:
    """Make one group for each direction, with connections of the two workers only. Raises RuntimeError."""
    gloo: Any = ProcessGroupGloo

    def make_devices() -> list[Any]:
        # Use the worker's own address: the machine's name may stand for another one.
        return [gloo.create_device(hostname=meeting.host, lazy_init=False) for _ in DIRECTIONS]

    with new_listeners(make_devices) as (devices, listeners):
        guard = GroupGuard(meeting, listeners, timeout=timeout)
        guard.open()
        groups = []
        for name, device in zip(DIRECTIONS, devices, strict=True):
            options = gloo._Options()
            options._timeout, options._threads, options._devices = timeout, 1, [device]
            groups.append(gloo(PrefixStore(name, meeting.store), meeting.rank, 2, options))
        guard.close()
    return groups


def _abort_gloo(group: Any, peer: int) -> None:
    """Abort gloo. Its own `abort` does nothing, but one receive that times out closes the group's connection."""
    try:
        group.recv([torch.empty(1)], peer, _ABORT).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


class _CudaGroup:
    """One direction by NCCL, on a separate stream: concurrent computation does not wait for it."""

    def __init__(self, meeting: Rendezvous, name: str, device: torch.device, timeout: timedelta) -> None:
        from torch._C import _distributed_c10d as c10d

        nccl: Any = c10d.ProcessGroupNCCL  # not in every build of torch
        options = nccl.Options()
        options._timeout = timeout
        torch.cuda.set_device(device)
        self._group = nccl(PrefixStore(name, meeting.store), meeting.rank, 2, options)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def send(self, tensor: Tensor, peer: int) -> Transfer:
        tensor.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))  # the device that computed the tensor
        with torch.cuda.stream(self._stream):
            return _OnStream(self._group.send([tensor], peer, 0), self._stream)

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...], peer: int) -> tuple[Tensor, Transfer]:
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            transfer = _OnStream(self._group.recv([tensor], peer, 0), self._stream)
        tensor.record_stream(torch.cuda.default_stream(self._device))  # the device that will read the tensor
        return tensor, transfer

    def abort(self) -> None:
        self._group.abort()


@dataclass(frozen=True, slots=True)
class _OnStream:
    """A transfer that the stream knows of, and the host waits for."""

    work: Any
    stream: Any

    def wait(self, timeout: timedelta) -> None:
        with torch.cuda.stream(self.stream):
            self.work.wait(timeout)
        self.stream.synchronize()
