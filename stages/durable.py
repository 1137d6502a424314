"""Makes what a folder has outlive a power cut: its entries are on the disk only after the folder itself is."""

import os
from pathlib import Path


def make_durable(path: Path) -> None:
    """Return when the disk has a folder's entries, or a file's bytes. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
