"""The bookkeeping of one direction, under every order of pushes, writes, arrivals, losses and breaks."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.stages.links.stream_link import ResendWindow

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
                item = self.window.pop_unwritten()
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
