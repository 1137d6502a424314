"""Frames of a device: a microbatch's targets wait in host memory, of the training and of an evaluation alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from torch import Tensor

from headway.stages.device.device import StageDevice
from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.link import Frame, FrameKind
from headway.stages.links.worker_link import WorkerLink


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
