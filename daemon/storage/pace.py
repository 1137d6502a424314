"""Sets the minimum rate of disks and links on which deadlines rely. Pure."""

from typing import Final

LEAST_BYTES_PER_S: Final = 20e6
"""Minimum rate of disks and links that deadlines expect."""
SLOWEST_LINE_BYTES_PER_S: Final = 125e3
"""1 Mbit/s. A slower probe makes no deadline longer: a record of 1 byte/s would make it endless."""


def transfer_s(num_bytes: float, *, line_bytes_per_s: float = LEAST_BYTES_PER_S) -> float:
    """Return the time to write, read or fetch bytes at the minimum rate, or at a measured rate if that is lower."""
    return num_bytes / min(max(line_bytes_per_s, SLOWEST_LINE_BYTES_PER_S), LEAST_BYTES_PER_S)
