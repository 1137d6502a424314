"""How slow disks and links may be before who uses them counts as late. Pure."""

from typing import Final

LEAST_BYTES_PER_S: Final = 20e6
"""What deadlines expect at least of disks and links."""


def transfer_s(num_bytes: float, *, line_bytes_per_s: float = LEAST_BYTES_PER_S) -> float:
    """To write, read or fetch so many bytes, at the slowest that is not late. A line may be measured to be slower."""
    return num_bytes / min(line_bytes_per_s, LEAST_BYTES_PER_S)
