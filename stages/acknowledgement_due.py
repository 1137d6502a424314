"""When an acknowledgement has waited long enough for a frame to travel with, and travels alone. No clock here.

An acknowledgement that travels alone wakes several threads in both processes, for nothing but the memory of the peer,
which holds a frame until then. Where frames go both ways, each carries one, and none has to travel alone.
"""

from datetime import timedelta

PATIENCE = timedelta(milliseconds=250)
"""As long as little waits for it."""

PATIENCE_WITH_MUCH = timedelta(milliseconds=20)
MUCH_BYTES = 1 << 21


class AcknowledgementDue:
    """Of one link; times are seconds of one clock."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._num_bytes = 0

    @property
    def at(self) -> float | None:
        """When it must have been said, None where nothing is left to say."""
        if self._since is None:
            return None
        patience = PATIENCE if self._num_bytes < MUCH_BYTES else PATIENCE_WITH_MUCH
        return self._since + patience.total_seconds()

    def received(self, num_bytes: int, *, now: float) -> None:
        """Frames have come, with a payload of so many bytes."""
        if self._since is None:
            self._since = now
        self._num_bytes += num_bytes

    def said(self) -> None:
        """A message that is on its way acknowledges all that has come."""
        self._since = None
        self._num_bytes = 0
