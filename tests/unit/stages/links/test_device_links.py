"""Frames of a device: a microbatch's targets wait in host memory, of the training and of an evaluation alike."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from headway.stages.device.device import StageDevice
from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.link import Frame, FrameKind
from headway.stages.links.worker_link import WorkerLink
from tests.rigs.fake_nccl import FakeCard


@dataclass
class Copied:
    """A copy that is done."""

    tensors: tuple[Tensor, ...]

    def wait(self, seconds: float) -> tuple[Tensor, ...]:  # noqa: ARG002
        return self.tensors

    def take(self) -> tuple[Tensor, ...]:
        return self.tensors


@dataclass
class MetaDevice:
    """A device whose tensors are those of "meta"; it copies only what is on the right side."""

    is_immediate: bool = False

    def is_on_host(self, tensor: Tensor) -> bool:
        return not tensor.is_meta

    def copy_in(self, tensors: Sequence[Tensor]) -> Copied:
        assert all(map(self.is_on_host, tensors))
        return Copied(tuple(tensor.to("meta") for tensor in tensors))

    def copy_out(self, tensors: Sequence[Tensor]) -> Copied:
        assert not any(map(self.is_on_host, tensors))
        return Copied(tuple(torch.zeros(tensor.shape) for tensor in tensors))

    def mark(self) -> Copied:
        return Copied(())

    def after(self, _copy: Copied, act: Callable[[], None]) -> None:
        act()


@dataclass
class SentFrames:
    """A `Link` that keeps what it is given."""

    peer: str = "stage 1"
    frames: list[Frame] = field(default_factory=list)

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", [FrameKind.ACTIVATION, FrameKind.EVALUATION])
@pytest.mark.parametrize("to_device", [False, True])
def test_a_microbatch_leaves_as_a_whole(kind: FrameKind, to_device: bool) -> None:
    """Hidden states on the device and targets on the host: both end where the link takes frames from."""
    link, device = SentFrames(), MetaDevice()
    tensors = (torch.zeros(2, 3, device="meta"), torch.zeros(2))
    frame = Frame(kind, Generation(1), Batch(0), MicrobatchIndex(0), tensors)
    WorkerLink(link, cast("StageDevice", device), to_device=to_device).send(frame)
    (sent,) = link.frames
    assert [device.is_on_host(tensor) for tensor in sent.tensors] == [not to_device] * 2


class Noting(torch.Tensor):
    """A tensor that notes in which thread it is made contiguous."""

    threads: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "contiguous" and not args[0].is_contiguous():
            cls.threads.append(threading.get_ident())
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_link_to_a_device_gets_a_frame_when_it_is_computed() -> None:
    """The card is behind → the frame waits, and so does what is sent after it, in order; nothing that is launched later
    delays it. A frame in pieces is put together before the mark, in the thread that computes."""
    link, card = SentFrames(), FakeCard()
    worker = WorkerLink(link, cast("StageDevice", card), to_device=True)

    def frame(batch: int, *values: Tensor) -> Frame:
        return Frame(FrameKind.GRADIENT, Generation(1), Batch(batch), MicrobatchIndex(0), values)

    on_host = torch.zeros(2, dtype=torch.float64)
    worker.send(frame(0, on_host))
    assert [sent.batch for sent in link.frames] == [0]
    card.is_held, card.num_launched = True, 5
    worker.send(frame(1, torch.arange(15.0).view(5, 3).t().as_subclass(Noting)))
    card.num_launched = 6
    worker.send(frame(2, on_host))
    assert len(link.frames) == 1
    card.compute()
    assert [sent.batch for sent in link.frames] == [0, 1, 2]
    assert card.marks == [(threading.get_ident(), 5)]
    assert Noting.threads == [threading.get_ident()]
    assert link.frames[1].tensors[0].is_contiguous()
