"""An attachment by gloo, between two workers in host memory: what NCCL does between two cards, for real."""

import itertools
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from headway.stages.links.attachment import FORM_TIMEOUT, Direction, KeptPairs

_ABORT = 2
"""A tag with which nothing is ever sent."""


class GlooWork:
    """torch's handle of a transfer: gloo's own does not tell without a wait whether it is over."""

    def __init__(self, work: Any) -> None:
        self.error: RuntimeError | None = None
        self._work = work
        self._is_completed = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def is_completed(self) -> bool:
        """See torch's."""
        return self._is_completed.is_set()

    def wait(self, timeout: timedelta) -> None:  # noqa: ARG002
        """See torch's."""
        if self.error is not None:
            raise self.error

    def _wait(self) -> None:
        try:
            self._work.wait(timedelta(minutes=5))
        except RuntimeError as error:
            self.error = error
        self._is_completed.set()


class GlooCommunicator:
    """A ProcessGroup."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> GlooWork:
        """See torch's."""
        return GlooWork(self._group.send(tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> GlooWork:
        """See torch's."""
        return GlooWork(self._group.recv(tensors, peer, tag))

    def abort(self) -> None:
        """Gloo's own `abort` does nothing, but one receive that times out closes the group's connection."""
        try:
            self._group.recv([torch.empty(1)], self._peer, _ABORT).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return


class HostMemory:
    """A `SideStream`."""

    def entered(self) -> AbstractContextManager[Any]:
        """See `SideStream`."""
        return nullcontext()

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """See `SideStream`."""
        return torch.empty(shape, dtype=dtype)


_NUMBERS = itertools.count()


class GlooAttach:
    """An `Attach` that takes every tensor."""

    def __init__(self) -> None:
        self.side_stream = HostMemory
        self.kept = KeptPairs()
        self.num_opened = 0
        self.stuck: list[str] = []

    @property
    def card(self) -> str:
        """See `Attach`. Two ends that share this object ask once each."""
        return f"host memory {next(_NUMBERS)} of {os.getpid()}"

    def takes(self, tensor: Tensor) -> bool:  # noqa: ARG002
        """See `Attach`."""
        return True

    def open(self, store: Store, *, rank: int, sender: int) -> Direction:
        """See `Attach`."""
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._threads = FORM_TIMEOUT, 1
        options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        group = gloo(PrefixStore(f"gloo-{sender}", store), rank, 2, options)
        direction = Direction(GlooCommunicator(group, 1 - rank), HostMemory(), peer=1 - rank)
        direction.greet(is_sender=sender == rank)
        self.num_opened += 1
        return direction

    def on_stuck(self, peer: str) -> None:
        """See `Attach`."""
        self.stuck.append(peer)
