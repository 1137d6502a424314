"""Reads errors: a device's refusal of memory, the line that is equal for equal errors, and the damaged file."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from headway.daemon.cluster.measurements import MemoryShortage
from headway.stages.errors import DamagedFileError

UNITS: Final = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
CUDA_FAULT: Final = "out_of_cuda_memory"
"""The action of a fault that refuses memory as a CUDA device does, on any device."""
_REFUSED_BY_LIBRARY: Final = re.compile(
    "(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED"
    "|CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED"
    "|CUDA error: out of memory"
)
_SIZE: Final = r"([0-9.]+) (bytes|KiB|MiB|GiB)"
_WANTED: Final = re.compile(f"Tried to allocate {_SIZE}")
_ALLOCATED: Final = re.compile(f"{_SIZE} is allocated by PyTorch")
_ALLOWED: Final = re.compile(f"{_SIZE} allowed")
_CAPACITY: Final = re.compile(f"total capacity of {_SIZE}")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"(?<![\w-])\d+(?:\.\d+)?")
_MAX_LENGTH = 300


@contextmanager
def refusals_of_libraries() -> Iterator[None]:
    """Raise a library's refusal of memory as torch.OutOfMemoryError: cuBLAS and cuDNN have allocations of their own."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if _REFUSED_BY_LIBRARY.search(str(error)) is None:
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def shortage_of(error: torch.OutOfMemoryError) -> MemoryShortage:
    """Return what the error says, as far as this version of torch says it."""
    text = str(error)
    return MemoryShortage(
        wanted_bytes=_size(_WANTED, text),
        allocated_bytes=_size(_ALLOCATED, text),
        # The limit of a share of the card, if it has one.
        allowed_bytes=_size(_ALLOWED, text) or _size(_CAPACITY, text),
    )


def refuse_memory(_seconds: float) -> None:
    """Raise the error of a card with 8 MiB, of which 7 are in use. For tests of workers without a card."""
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 8.00 MiB of which 1.00 MiB is "
        "free. Including non-PyTorch memory, this process has 7.00 MiB memory in use. Of the allocated memory 6.50 MiB "
        "is allocated by PyTorch, and 512.00 KiB is reserved by PyTorch but unallocated."
    )


def _size(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return round(float(found[1]) * UNITS[found[2]]) if found is not None else 0


def fault_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message; addresses and free-standing numbers become `#`."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    line = f"{name}: {first}" if first else name
    return _NUMBER.sub("#", _ADDRESS.sub("#", line))[:_MAX_LENGTH]


def damaged_path(error: Exception) -> str:
    """Return the file to fetch again, if a damaged file made a start impossible."""
    if isinstance(error, DamagedFileError):
        return error.path
    return str(error.filename) if isinstance(error, FileNotFoundError) and error.filename else ""
