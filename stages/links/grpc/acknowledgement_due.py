"""Decides when an acknowledgement no longer waits for a frame to carry it, and travels alone. No clock here.

An acknowledgement that travels alone wakes several threads in both processes, only to free memory of the peer, which
holds a frame until then. When frames go both ways, each frame carries one, and none has to travel alone.
"""

from datetime import timedelta

PATIENCE = timedelta(milliseconds=250)
"""Maximum wait while few bytes wait for the acknowledgement."""

PATIENCE_WITH_MUCH = timedelta(milliseconds=20)
MUCH_BYTES = 1 << 21


class AcknowledgementDue:
    """The due acknowledgement of one link; times are seconds of one clock."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._num_bytes = 0

    @property
    def at(self) -> float | None:
        """Return when the acknowledgement must be sent; None: nothing is left to acknowledge."""
        if self._since is None:
            return None
        patience = PATIENCE if self._num_bytes < MUCH_BYTES else PATIENCE_WITH_MUCH
        return self._since + patience.total_seconds()

    def received(self, num_bytes: int, *, now: float) -> None:
        """Note arrived frames, with the bytes of their payload."""
        if self._since is None:
            self._since = now
        self._num_bytes += num_bytes

    def said(self) -> None:
        """Note that a message on its way acknowledges every arrived frame."""
        self._since = None
        self._num_bytes = 0
