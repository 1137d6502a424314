"""Process groups of two ranks for one collective link: how they are made and ended.

There is one group for each direction, so that a pending receive does not block a send. All messages, and tensors in
host memory, travel by gloo. Tensors of two CUDA workers travel by NCCL, in further groups (nccl_direction.py).

Neither is encrypted, and neither checks who connects: both are for a private network. group_guard.py restricts who may
connect to gloo's ports.
"""

import threading
from collections.abc import Callable
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

VERDICT_TIMES = 3
"""The other side may need the timeout for each of two steps before it can say whether its accelerator is linked."""

MOST_TROUBLE = 1000
"""Characters of a reason that is told to the other side."""


class Transfer(Protocol):
    """A tensor on its way."""

    def wait(self, timeout: timedelta) -> object:
        """Return when the tensor may be used. Raises RuntimeError when it does not get through, or not in time."""
        ...


class DeviceDirection(Protocol):
    """One direction between two accelerators. One thread sends or receives; any thread may abort."""

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the accelerator's memory."""
        ...

    def send(self, tensor: Tensor) -> "DeviceTransfer":
        """Begin to send a contiguous tensor that is computed. It must live until the transfer is done."""
        ...

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, "DeviceTransfer"]:
        """Begin to receive into new memory of the accelerator."""
        ...

    def abort(self) -> None:
        """Fail every waiting transfer at once, then free the accelerator of them. May take long, or never return."""
        ...


class DeviceTransfer(Protocol):
    """A tensor between two accelerators."""

    def wait(self, timeout: timedelta, *, meanwhile: Callable[[], None] | None = None) -> None:
        """Return when the transfer is done. Raises RuntimeError like a `Transfer`.

        meanwhile: is called while it waits, many times a second. What it raises ends the wait.
        """
        ...


OpenDirection = Callable[[Rendezvous, int], DeviceDirection]
"""Opens the direction from this rank. Both sides call it at the same time. Raises RuntimeError."""


class GroupOfTwo:
    """Both directions between two workers. One thread sends, one receives; any thread may abort."""

    def __init__(self, meeting: Rendezvous, *, timeout: timedelta, open_direction: OpenDirection | None = None) -> None:
        """Return when the other side is there too. Raises RuntimeError when it is not within `timeout`.

        open_direction: for workers whose accelerators talk directly. If they cannot, on either side, their tensors go
        through the hosts, and `device_trouble` says why.
        """
        hosts = _gloo_groups(meeting, timeout)
        self._peer = 1 - meeting.rank
        self._out, self._in = hosts[meeting.rank], hosts[self._peer]
        self._directions: dict[int, DeviceDirection] = {}
        """By the rank that sends; none on a link between hosts."""
        self._aborts: list[threading.Thread] = []
        self._releasing = threading.Lock()
        self.device_trouble = ""
        """Why the accelerators do not talk directly, although they should."""
        if open_direction is not None:
            self._open_directions(meeting, open_direction, timeout)
        self._device_out, self._device_in = self._directions.get(meeting.rank), self._directions.get(self._peer)

    def _open_directions(self, meeting: Rendezvous, open_direction: OpenDirection, timeout: timedelta) -> None:
        for sender in (ACCEPTOR, DIALLER):
            trouble = ""
            try:
                self._directions[sender] = open_direction(meeting, sender)
            except RuntimeError as error:
                trouble = str(error)[:MOST_TROUBLE] or "unknown"
            try:
                self.device_trouble = _trouble_of_either(meeting, f"cards-{sender}", trouble, VERDICT_TIMES * timeout)
            except RuntimeError:
                self.release()
                raise
            if self.device_trouble:
                self.release()
                self._directions.clear()
                return

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
        return self._device_out is not None and self._device_out.takes(tensor)

    def send(self, tensor: Tensor) -> Transfer:
        """Send like `send_message`, for a contiguous tensor of a payload that is not empty."""
        transfer: Transfer = self._out.send([tensor.cpu()], self._peer, PAYLOADS)
        return transfer

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Transfer]:
        """Begin to receive into a new tensor."""
        tensor = empty_tensor(dtype, shape)
        return tensor, self._in.recv([tensor], self._peer, PAYLOADS)

    def send_by_device(self, tensor: Tensor) -> DeviceTransfer:
        """Send like `send`, a tensor that `goes_by_device`."""
        assert self._device_out is not None
        return self._device_out.send(tensor)

    def receive_by_device(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, DeviceTransfer]:
        """Receive like `receive`. Raises RuntimeError on a link without accelerators."""
        if self._device_in is None:
            raise RuntimeError("a tensor for an accelerator, on a link between hosts")
        return self._device_in.receive(dtype, shape)

    def abort(self) -> None:
        """Fail every waiting transfer now. Returns at once; `release` tells when the accelerators are free."""
        for group in (self._in, self._out):
            _abort_gloo(group, self._peer)
        self.release()

    def release(self) -> list[threading.Thread]:
        """Free the accelerator of what is left, in threads. Returns them at once: NCCL may be slow, or never end.

        Both directions together: the abort of one may wait for the other's transfers.
        """
        with self._releasing:  # several threads may see the link fail
            if not self._aborts:
                self._aborts = [
                    threading.Thread(target=direction.abort, name="headway-abort", daemon=True)
                    for direction in self._directions.values()
                ]
                for thread in self._aborts:
                    thread.start()
        return self._aborts


def _trouble_of_either(meeting: Rendezvous, key: str, trouble: str, timeout: timedelta) -> str:
    """Return this side's trouble, or else the other's; empty: neither has any. Raises RuntimeError."""
    store, peer = meeting.store, f"{key}-{1 - meeting.rank}"
    store.set(f"{key}-{meeting.rank}", f"said: {trouble}")
    store.wait([peer], timeout)
    return trouble or store.get(peer).decode(errors="replace").removeprefix("said: ")


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
