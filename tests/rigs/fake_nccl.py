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
from torch._C._distributed_c10d import Store

from headway.stages.links.attachment import Direction, KeptPairs

GARBAGE = -77.0


class FakeWork:
    """A transfer. It is complete with the other side's, or by an error or an abort."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.error = ""
        self._is_completed = threading.Event()

    def complete(self, error: str = "") -> None:
        """End the kernel."""
        self.error, self.tensor = error, None
        self._is_completed.set()

    def is_completed(self) -> bool:
        """See torch's."""
        return self._is_completed.is_set()

    def wait(self, timeout: timedelta) -> None:  # noqa: ARG002
        """See torch's."""
        if self.error:
            raise RuntimeError(self.error)


class FakeWire:
    """What is between the two ends of one direction."""

    def __init__(self) -> None:
        self.hangs = False
        """True if transfers from now on never meet."""
        self.may_send = threading.Event()
        """A send is launched once this is set."""
        self.may_send.set()
        self.launched: list[bool] = []
        """Whether it was a send, for each transfer in the order of the launches."""
        self.num_sent = 0
        self.num_received = 0
        self._lock = threading.Lock()
        self._sends: list[FakeWork] = []
        self._receives: list[FakeWork] = []

    def put(self, tensor: Tensor, *, is_send: bool) -> FakeWork:
        """Launch a transfer."""
        work = FakeWork(tensor)
        if is_send:
            self.may_send.wait()
        with self._lock:
            self.launched.append(is_send)
            self.num_sent += is_send
            self.num_received += not is_send
            (self._sends if is_send else self._receives).append(work)
            while self._sends and self._receives and not self.hangs:
                sent, received = self._sends.pop(0), self._receives.pop(0)
                source, target = sent.tensor, received.tensor
                if source is not None and target is not None:  # what was aborted meets nobody
                    target.copy_(source)
                    sent.complete()
                    received.complete()
        return work


class FakeCommunicator:
    """A ProcessGroup at one end of a wire."""

    def __init__(self, wire: FakeWire) -> None:
        self.wire = wire
        self.works: list[FakeWork] = []
        self.let_go = threading.Event()
        """An abort returns once this is set."""
        self.let_go.set()
        self.num_aborts = 0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:  # noqa: ARG002
        """See torch's."""
        self.works.append(self.wire.put(tensors[0], is_send=True))
        return self.works[-1]

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:  # noqa: ARG002
        """See torch's."""
        self.works.append(self.wire.put(tensors[0], is_send=False))
        return self.works[-1]

    def abort(self) -> None:
        """See torch's."""
        self.num_aborts += 1
        for work in self.works:
            work.complete(work.error)
        self.let_go.wait()


class FakeCard:
    """A `SideStream`, and of a `StageDevice` what a link asks for. Its computation can be held up."""

    is_immediate = False

    def __init__(self) -> None:
        self.is_held = False
        self.marks: list[tuple[int, int]] = []
        """For each mark the thread that set it, and what was launched by then."""
        self.num_launched = 0
        self.num_inside = 0
        """Threads whose work enters this stream."""
        self._acts: list[Callable[[], None]] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See `SideStream`."""
        self.num_inside += 1
        yield
        self.num_inside -= 1

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """See `SideStream`."""
        return torch.full(shape, GARBAGE, dtype=dtype)

    def is_on_host(self, tensor: Tensor) -> bool:
        """See `StageDevice`."""
        return tensor.dtype is not torch.float32

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
    """What is between two cards. Each forming has new wires and communicators."""

    def __init__(self) -> None:
        self.wires: dict[int, FakeWire] = {}
        """The newest ones, by the rank that sends."""
        self.communicators: dict[tuple[int, int], list[FakeCommunicator]] = {(r, s): [] for r in (0, 1) for s in (0, 1)}
        """By rank and by the rank that sends, the newest one last."""
        self.refused: set[tuple[int, int]] = set()
        """Rank and rank that sends where NCCL refuses the card."""
        self.may_open = threading.Event()
        self.may_open.set()
        self._all: dict[str, FakeWire] = {}

    @property
    def all_communicators(self) -> list[FakeCommunicator]:
        """Return those of both sides and of each forming."""
        return [each for made in self.communicators.values() for each in made]

    def direction(self, rank: int, sender: int, wire: FakeWire) -> Direction:
        """Return one end of the direction from the sender."""
        self.communicators[rank, sender].append(FakeCommunicator(wire))
        return Direction(self.communicators[rank, sender][-1], FakeCard(), peer=1 - rank)

    def open(self, store: Store, *, rank: int, sender: int) -> Direction:
        """Open a direction as NCCL's are: rank 0 says in the store where."""
        self.may_open.wait()
        if rank == 0:
            wire = self.wires[sender] = FakeWire()
            self._all[str(id(wire))] = wire
            store.set(f"wire-{sender}", str(id(wire)))
        name = store.get(f"wire-{sender}").decode()
        if (rank, sender) in self.refused:
            raise RuntimeError("Duplicate GPU detected")
        direction = self.direction(rank, sender, self._all[name])
        direction.greet(is_sender=sender == rank, timeout=timedelta(seconds=5))
        return direction


class FakeAttach:
    """An `Attach` of one card."""

    def __init__(self, nccl: FakeNccl) -> None:
        self.kept = KeptPairs()
        self.stuck: list[str] = []
        self.card = f"card {id(self)}"
        self.beside = FakeCard()
        self.open = nccl.open

    def side_stream(self) -> FakeCard:
        """See `Attach`."""
        return self.beside

    def takes(self, tensor: Tensor) -> bool:
        """See `Attach`."""
        return tensor.dtype is torch.float32

    def on_stuck(self, peer: str) -> None:
        """See `Attach`."""
        self.stuck.append(peer)
