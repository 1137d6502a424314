"""An acknowledgement travels alone when it is due, by the clock of the test."""

from headway.stages.links.grpc.acknowledgement_due import MUCH_BYTES, PATIENCE, PATIENCE_WITH_MUCH, AcknowledgementDue

NOW = 100.0


def test_nothing_is_due_where_nothing_came() -> None:
    """No frame → no time."""
    assert AcknowledgementDue().at is None


def test_the_first_frame_that_waits_sets_the_time() -> None:
    """Another behind it does not put it off."""
    due = AcknowledgementDue()
    due.received(8, now=NOW)
    due.received(8, now=NOW + 0.1)
    assert due.at == NOW + PATIENCE.total_seconds()


def test_a_frame_that_carries_it_ends_the_wait() -> None:
    """Said → nothing is due, and the next frame waits anew."""
    due = AcknowledgementDue()
    due.received(MUCH_BYTES, now=NOW)
    due.said()
    assert due.at is None
    due.received(8, now=NOW + 5)
    assert due.at == NOW + 5 + PATIENCE.total_seconds()


def test_much_that_the_peer_holds_is_acknowledged_soon() -> None:
    """Two halves of much → the short patience, from the first."""
    due = AcknowledgementDue()
    due.received(MUCH_BYTES // 2, now=NOW)
    due.received(MUCH_BYTES // 2, now=NOW + 0.01)
    assert due.at == NOW + PATIENCE_WITH_MUCH.total_seconds()


def test_frames_without_a_byte_are_acknowledged_too() -> None:
    """Nothing to hold, but a number to say."""
    due = AcknowledgementDue()
    due.received(0, now=NOW)
    assert due.at == NOW + PATIENCE.total_seconds()
