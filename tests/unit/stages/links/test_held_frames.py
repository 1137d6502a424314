"""Frames are counted for as long as somebody has them."""

import pytest
import torch

from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind
from headway.stages.links.stream_link import SLACK, HeldFrames

CONTRACT = FrameContract({FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),)}, max_unacknowledged_frames=2)


def total() -> Frame:
    """A small frame of its own."""
    values = (torch.tensor(1.0, dtype=torch.float64),)
    return Frame(FrameKind.NORM_TOTAL, Generation(1), Batch(0), MicrobatchIndex(0), values)


def test_a_frame_counts_until_nobody_has_it() -> None:
    """As many as there may be are kept → one more is refused; one is let go of, a computation with another goes on →
    there is room for one."""
    held = HeldFrames(CONTRACT)
    frames = [total() for _ in range(2 * SLACK)]
    for frame in frames:
        held.add(frame)
    with pytest.raises(OverflowError, match="more than 4 frames"):
        held.add(total())
    assert held.num_frames == 4
    used = [frame.tensors[0] for frame in frames]
    del frame, frames
    assert held.num_frames == 4
    del used[0]
    assert held.num_frames == 3
    for _ in range(10):
        held.add(total())
    assert held.num_frames == 3
