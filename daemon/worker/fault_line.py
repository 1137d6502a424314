"""What an error says for others: one line, the same for the same error in another process; the file behind it. Pure."""

import re

from headway.stages.errors import DamagedFileError

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"(?<![\w-])\d+(?:\.\d+)?")
_MAX_LENGTH = 300


def fault_line(error: BaseException) -> str:
    """The error's type and the first line of what it says; addresses and free-standing numbers become `#`."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    line = f"{name}: {first}" if first else name
    return _NUMBER.sub("#", _ADDRESS.sub("#", line))[:_MAX_LENGTH]


def damaged_path(error: Exception) -> str:
    """The file that is to be fetched again, if it is a file that made an order impossible."""
    if isinstance(error, DamagedFileError):
        return error.path
    return str(error.filename) if isinstance(error, FileNotFoundError) and error.filename else ""
