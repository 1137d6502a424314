"""Two cards and NCCL between them, in host memory: transfers hang, fail, and are aborted late, as a test wants it.

As on CUDA, an aborted transfer looks complete, and what it was to write has any values. Every tensor of float32 counts
as one on a card.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from headway.stages.links.collective.group_guard import Rendezvous
from headway.stages.links.collective.nccl_direction import NcclDirection

GARBAGE = -77.0


class FakeWork:
    """A transfer. It is complete with the other side's, or by an error or an abort."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.error = ""
        self._is_completed = threading.Event()

    def complete(self, error: str = "") -> None:
        """End the kernel."""
        self.error = error
        self._is_completed.set()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._is_completed.is_set()

    def wait(self, timeout: timedelta) -> None:  # noqa: ARG002
        """See `Work`."""
        if self.error:
            raise RuntimeError(self.error)


class FakeWire:
    """What is between the two ends of one direction."""

    def __init__(self) -> None:
        self.hangs = False
        """True if transfers from now on never meet."""
        self.num_sent = 0
        self.num_received = 0
        self._lock = threading.Lock()
        self._sends: list[FakeWork] = []
        self._receives: list[FakeWork] = []

    def put(self, tensor: Tensor, *, is_send: bool) -> FakeWork:
        """Launch a transfer."""
        work = FakeWork(tensor)
        with self._lock:
            self.num_sent += is_send
            self.num_received += not is_send
            (self._sends if is_send else self._receives).append(work)
            while self._sends and self._receives and not self.hangs:
                sent, received = self._sends.pop(0), self._receives.pop(0)
                received.tensor.copy_(sent.tensor)
                sent.complete()
                received.complete()
        return work


class FakeCommunicator:
    """A `Communicator` at one end of a wire."""

    def __init__(self, wire: FakeWire) -> None:
        self.wire = wire
        self.works: list[FakeWork] = []
        self.let_go = threading.Event()
        """An abort returns once this is set."""
        self.let_go.set()
        self.num_aborts = 0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:  # noqa: ARG002
        """See `Communicator`."""
        self.works.append(self.wire.put(tensors[0], is_send=True))
        return self.works[-1]

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:  # noqa: ARG002
        """See `Communicator`."""
        self.works.append(self.wire.put(tensors[0], is_send=False))
        return self.works[-1]

    def abort(self) -> None:
        """See `Communicator`."""
        self.num_aborts += 1
        for work in self.works:
            work.complete(work.error)
        self.let_go.wait()


class FakeCard:
    """A `SideStream`, and of a `StageDevice` what a link asks for. Its computation can be held up."""

    def __init__(self) -> None:
        self.is_held = False
        self.marks: list[tuple[int, int]] = []
        """For each mark the thread that set it, and what was launched by then."""
        self.num_launched = 0
        self._acts: list[Callable[[], None]] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See `SideStream`."""
        yield

    def takes(self, tensor: Tensor) -> bool:
        """See `SideStream`."""
        return tensor.dtype is torch.float32

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """See `SideStream`."""
        return torch.full(shape, GARBAGE, dtype=dtype)

    def is_on_host(self, tensor: Tensor) -> bool:
        """See `StageDevice`."""
        return not self.takes(tensor)

    def mark(self) -> Any:
        """See `StageDevice`."""
        self.marks.append((threading.get_ident(), self.num_launched))
        return self

    def after(self, moment: Any, act: Callable[[], None]) -> None:
        """See `StageDevice`."""
        assert moment is self
        if self.is_held:
            self._acts.append(act)
        else:
            act()

    def compute(self) -> None:
        """Do what was held up."""
        self.is_held = False
        while self._acts:
            self._acts.pop(0)()


class FakeNccl:
    """Both ends of both directions."""

    def __init__(self) -> None:
        self.cards = FakeCard(), FakeCard()
        self.wires = FakeWire(), FakeWire()
        """By the rank that sends."""
        self.communicators = {
            (rank, sender): FakeCommunicator(self.wires[sender]) for rank in (0, 1) for sender in (0, 1)
        }

    def direction(self, rank: int, sender: int) -> NcclDirection:
        """Return one end of the direction from the sender."""
        return NcclDirection(self.communicators[rank, sender], self.cards[rank], peer=1 - rank)

    def open_direction(self, meeting: Rendezvous, sender: int) -> NcclDirection:
        """Open a direction as NCCL's are."""
        direction = self.direction(meeting.rank, sender)
        direction.greet(is_sender=sender == meeting.rank, timeout=timedelta(seconds=20))
        return direction
