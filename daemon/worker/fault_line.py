"""Describes an error for other nodes: one line, equal for an equal error in another process; and its file. Pure."""

import re

from headway.stages.errors import DamagedFileError

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"(?<![\w-])\d+(?:\.\d+)?")
_MAX_LENGTH = 300


def fault_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message; addresses and free-standing numbers become `#`."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    line = f"{name}: {first}" if first else name
    return _NUMBER.sub("#", _ADDRESS.sub("#", line))[:_MAX_LENGTH]


def damaged_path(error: Exception) -> str:
    """Return the file to fetch again, if a damaged file made an order impossible."""
    if isinstance(error, DamagedFileError):
        return error.path
    return str(error.filename) if isinstance(error, FileNotFoundError) and error.filename else ""
