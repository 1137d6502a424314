"""How slow disks and links may be before who uses them counts as late. Pure."""

from typing import Final

LEAST_BYTES_PER_S: Final = 20e6
"""What deadlines expect at least of disks and links."""


def transfer_s(num_bytes: float) -> float:
    """To write, read or fetch so many bytes, at the slowest that is not late."""
    return num_bytes / LEAST_BYTES_PER_S
