"""Runs a target on one input after the other: each is kept in a file that outlives the process, and has its limit.

The limit is one of processor time. The kernel ends a process that exceeds it, also inside of C code, and Python's
traceback is printed first. A process that others keep from computing has its full time.
"""

import faulthandler
import math
import mmap
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

ONE_INPUT_S: Final = 20
"""Maximum seconds of processor time."""
MAX_BYTES: Final = 1 << 20
LENGTH_BYTES: Final = 8


class OneInput:
    """Wraps a target."""

    def __init__(self, run: Callable[[bytes], None], path: Path, *, limit_s: int = ONE_INPUT_S) -> None:
        """path: where the input that runs now is kept."""
        self._run = run
        self._limit_s = limit_s
        with path.open("wb+") as file:
            file.truncate(LENGTH_BYTES + MAX_BYTES)
            self._kept = mmap.mmap(file.fileno(), LENGTH_BYTES + MAX_BYTES)
        faulthandler.register(signal.SIGXCPU, chain=True)  # a traceback, then the end

    def __call__(self, data: bytes) -> None:
        """Raises what the target raises."""
        self._keep(data[:MAX_BYTES])
        _limit_processor_time(self._limit_s)
        self._run(data)

    def _keep(self, data: bytes) -> None:
        self._kept[:LENGTH_BYTES] = len(data).to_bytes(LENGTH_BYTES, "little")
        self._kept[LENGTH_BYTES : LENGTH_BYTES + len(data)] = data


def kept_input(path: Path) -> bytes:
    """The input that ran last."""
    raw = path.read_bytes()
    return raw[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")]


def _limit_processor_time(seconds: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, hard))
