"""How slow disks and links may be before who uses them counts as late. Pure."""

from typing import Final

LEAST_BYTES_PER_S: Final = 20e6
"""What deadlines expect at least of disks and links."""
SLOWEST_LINE_BYTES_PER_S: Final = 125e3
"""1 Mbit/s. A probe that measures less makes no deadline longer: a record of 1 byte/s would make it endless."""


def transfer_s(num_bytes: float, *, line_bytes_per_s: float = LEAST_BYTES_PER_S) -> float:
    """To write, read or fetch so many bytes, at the slowest that is not late. A line may be measured to be slower."""
    return num_bytes / min(max(line_bytes_per_s, SLOWEST_LINE_BYTES_PER_S), LEAST_BYTES_PER_S)
