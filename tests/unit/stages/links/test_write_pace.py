"""The size of chunks follows the speed of the line."""

import pytest

from headway.stages.links.frame_codec import CHUNK_BYTES
from headway.stages.links.stream_link import (
    CHUNK_SECONDS,
    FIRST_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    PACE_BYTES,
    WritePace,
)


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
