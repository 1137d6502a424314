"""What one side of a link holds, under every order of events, and the size of a stream's chunks."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.stages.links.frame_codec import CHUNK_BYTES
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import FrameKind
from headway.stages.links.window import (
    CHUNK_SECONDS,
    FIRST_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    PACE_BYTES,
    SLACK,
    HeldFrames,
    ResendWindow,
    WritePace,
)
from tests.rigs.two_sides import total

CONTRACT = FrameContract({FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),)}, max_unacknowledged_frames=2)
ACTIONS = ("push", "write", "arrive", "acknowledge", "break", "repeat")


@dataclass
class Line:
    """A window, what its peer has received, and what is under way between them."""

    window: ResendWindow[int] = field(default_factory=ResendWindow)
    num_pushed: int = 0
    under_way: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    acknowledged: int = 0

    def act(self, action: str) -> None:
        """One step; an action that is impossible now does nothing."""
        match action:
            case "push":
                self.window.push(self.num_pushed, num_bytes=10)
                self.num_pushed += 1
            case "write":
                due = self.window.next_to_write
                waiting = list(self.window.unwritten())
                item = self.window.pop_unwritten()
                assert waiting == list(range(due, self.num_pushed))
                if item is not None:
                    assert item == due
                    self.under_way.append(item)
            case "arrive" if self.under_way:
                item = self.under_way.pop(0)
                if item == len(self.received):  # the receiver drops what it has, as FrameAssembler does
                    self.received.append(item)
                assert item < len(self.received), "a gap"
            case "repeat" if self.under_way:
                self.under_way.insert(0, self.under_way[0])
            case "acknowledge":
                self.acknowledged = len(self.received)
                self.window.acknowledge(self.acknowledged)
            case "break":
                self.under_way.clear()
                self.acknowledged = len(self.received)
                self.window.resume(self.acknowledged)


@given(st.lists(st.sampled_from(ACTIONS), max_size=200))
def test_nothing_is_lost_doubled_or_reordered(actions: list[str]) -> None:
    """Whatever breaks when: in the end the peer has each item once, in order, and nothing is held any more."""
    line = Line()
    for action in actions:
        line.act(action)
        assert line.received == list(range(len(line.received)))
        assert line.window.num_bytes == 10 * (line.num_pushed - line.acknowledged)
        assert line.window.next_to_push == line.num_pushed
    line.act("break")
    for _ in range(line.num_pushed):
        line.act("write")
        line.act("arrive")
    line.act("acknowledge")
    assert line.received == list(range(line.num_pushed))
    assert line.window.num_bytes == 0


@pytest.mark.parametrize(("acknowledged", "reason"), [(3, "3 of frames not yet sent"), (0, "0 after 1"), (-1, "-1")])
def test_an_impossible_acknowledgement_is_refused(acknowledged: int, reason: str) -> None:
    """Neither what was not written nor what was acknowledged before can be asked for, and nothing changes by it."""
    window: ResendWindow[str] = ResendWindow()
    for item in "abc":
        window.push(item, num_bytes=1)
    assert [window.pop_unwritten(), window.pop_unwritten()] == ["a", "b"]
    window.acknowledge(1)
    for ask in (window.acknowledge, window.resume):
        with pytest.raises(ValueError, match=reason):
            ask(acknowledged)
    assert window.pop_unwritten() == "c"
    assert window.num_bytes == 2


def test_a_cleared_window_has_nothing_to_write() -> None:
    """After the end nothing is held, and the next number to write is where writing stopped."""
    window: ResendWindow[str] = ResendWindow()
    for item in "abc":
        window.push(item, num_bytes=1)
    window.pop_unwritten()
    window.clear()
    assert window.pop_unwritten() is None
    assert window.num_bytes == 0
    assert window.next_to_write == 1


def test_a_fast_line_gets_large_chunks_once_its_buffers_are_full() -> None:
    """The first chunks go into buffers at once and prove nothing; after PACE_BYTES at 1 GB/s they are as large as they
    may be."""
    pace, num_bytes = WritePace(), 0
    while num_bytes < PACE_BYTES:
        assert pace.chunk_bytes == FIRST_CHUNK_BYTES
        pace.wrote(pace.chunk_bytes, pace.chunk_bytes / 1e9)
        num_bytes += FIRST_CHUNK_BYTES
    assert pace.chunk_bytes == CHUNK_BYTES


@pytest.mark.parametrize("bytes_per_s", [20e3, 100e3, 1e6, 3e6])
def test_a_chunk_takes_a_quarter_of_a_second_on_a_slow_line(bytes_per_s: float) -> None:
    """Whatever the speed, the size settles where one chunk takes so long, or at the least one; a line that becomes ten
    times slower is noticed with the next chunk."""
    pace = WritePace()
    for speed in (10 * bytes_per_s, bytes_per_s):
        for _ in range(100):
            pace.wrote(pace.chunk_bytes, pace.chunk_bytes / speed)
        expected = max(MIN_CHUNK_BYTES, min(CHUNK_BYTES, CHUNK_SECONDS * speed))
        assert pace.chunk_bytes == pytest.approx(expected, rel=0.01)
    pace.wrote(pace.chunk_bytes, 10 * CHUNK_SECONDS)
    assert pace.chunk_bytes <= max(MIN_CHUNK_BYTES, 0.11 * expected)


def test_a_frame_counts_until_nobody_has_it() -> None:
    """As many as there may be are kept → one more is refused; one is let go of, a computation with another goes on →
    there is room for one."""
    held = HeldFrames(CONTRACT)
    frames = [total() for _ in range(2 * SLACK)]
    for frame in frames:
        held.add(frame)
    with pytest.raises(OverflowError, match="more than 4 frames"):
        held.add(total())
    with pytest.raises(OverflowError):
        held.make_sure_of_room()
    used = [frame.tensors[0] for frame in frames]
    del frame, frames
    del used[0]
    held.make_sure_of_room()
    with pytest.raises(OverflowError):
        held.make_sure_of_room(1)
    for _ in range(10):
        held.add(total())
