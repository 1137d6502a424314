"""Adapts the size of a frame's chunks to the line: on a slow one, a large chunk would leave the peer without a message
for too long. No socket, no thread, no clock here.
"""

from headway.stages.links.grpc.frame_codec import CHUNK_BYTES

FIRST_CHUNK_BYTES = 64 << 10
MIN_CHUNK_BYTES = 16 << 10
CHUNK_SECONDS = 0.25
"""Target time of one chunk."""
PACE_BYTES = 1 << 20
"""Bytes written before the size changes: the first bytes go into buffers, at full speed on any line."""


class WritePace:
    """The chunk size of one stream."""

    def __init__(self) -> None:
        self.chunk_bytes = FIRST_CHUNK_BYTES
        self._num_bytes = 0
        self._seconds = 0.0

    def wrote(self, num_bytes: int, seconds: float) -> None:
        """Note how long bytes took."""
        self._num_bytes += num_bytes
        self._seconds += seconds
        if self._num_bytes >= PACE_BYTES or self._seconds >= CHUNK_SECONDS:
            wanted = int(CHUNK_SECONDS * self._num_bytes / max(self._seconds, 1e-6))
            self.chunk_bytes = max(MIN_CHUNK_BYTES, min(CHUNK_BYTES, wanted))
            self._num_bytes, self._seconds = 0, 0.0
