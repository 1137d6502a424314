"""The files of a data folder: mapped into memory, hashed, and known by their states."""

import hashlib
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.stages.data.shard_index import INDEX_NAME, read_index
from headway.stages.errors import DataError

Tokens = npt.NDArray[Any]
"""One dimension of an unsigned integer type."""
FileState = tuple[int, int, int, int]
"""Size, time of the last write, time of the last change, inode: they change with the content."""


def state_of(file: Path) -> FileState:
    """Return a file's present state. Raises DataError when there is none."""
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(str(file), "this shard is missing") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def fingerprint(folder: Path) -> str:
    """Return the states of a folder's files, for a reader that relies on another's verification. Raises DataError."""
    index = read_index(folder)
    states = [index.sha256, *(f"{each.file} {state_of(folder / each.file)}" for each in index.files)]
    return blake2b("\n".join(states).encode(), digest_size=16).hexdigest()


def verify_file(file: Path, sha256: str) -> None:
    """Read a file and compare its hash. Raises DataError when it differs."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise DataError(str(file), f"was changed or damaged: its SHA-256 is {found[:12]}…, not {sha256[:12]}…")


def mapped(file: Path, num_values: int, dtype: str) -> Tokens:
    """Map a file of so many numbers. Raises DataError when it is missing or has another size."""
    expected_bytes = num_values * np.dtype(dtype).itemsize
    try:
        size_bytes = file.stat().st_size
    except OSError as error:
        raise DataError(str(file), "this shard is missing") from error
    if size_bytes != expected_bytes:
        raise DataError(str(file), f"has {size_bytes} bytes where {INDEX_NAME} says {expected_bytes}")
    if not num_values:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(file, dtype=dtype, mode="r")
