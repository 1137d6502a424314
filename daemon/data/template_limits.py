"""Limits of what a chat template, a program of others, may take: time, memory, and the size of a product."""

import resource
import signal
import threading
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from headway.daemon.errors import ConfigError

MAX_CHARACTERS: Final = 16 << 20
"""Maximum length of a rendered conversation."""
MAX_BITS: Final = 1024
"""Maximum width of a whole number that is a product."""
MAX_SECONDS: Final = 20.0
"""Maximum time to render one conversation once."""
AGAIN_S: Final = 0.2
"""Interval of the signals after it."""
MAX_BYTES: Final = 1 << 30
"""Maximum memory that one rendering adds: a template may double a text again and again within the time."""
TOO_LARGE: Final = f"it takes more than {MAX_BYTES >> 30} GiB of memory"
_SANDBOX: Final = str(Path(__file__).with_name("template_sandbox.py"))


class TooMuchError(ConfigError):
    """A template takes more than it may."""


def limited_product(_self: Any, _context: Any, operator: str, left: Any, right: Any) -> Any:
    """Multiply, or raise ValueError: neither the limit of time nor that of length ends a huge product."""
    if operator == "**":
        raise ValueError("it raises to a power")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise ValueError(f"it makes a number of more than {MAX_BITS} bits")
    for many, times in ((left, right), (right, left)):
        if isinstance(many, Sized) and isinstance(times, int) and len(many) * times > MAX_CHARACTERS:
            raise ValueError(f"it is longer than {MAX_CHARACTERS >> 20} Mi characters")
    return left * right


def _renders(code: CodeType) -> bool:
    """Return whether code renders: jinja2's, a compiled template's, or that of the functions which it calls.

    The limits themselves do not: a signal in their last lines would leave them in force.
    """
    file = code.co_filename
    if file == __file__:
        return code.co_name == limited_product.__name__
    return "/jinja2/" in file or file in ("<template>", "<unknown>", _SANDBOX)


class _OutOfTimeError(BaseException):
    """The time is over. No Exception: jinja2 ignores those of a constant expression, and goes on."""


@contextmanager
def limited_time() -> Iterator[None]:
    """Raise TimeoutError in the block when it takes too long; only a main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, frame: FrameType | None) -> None:
        # Python ignores an error in a destructor, or in a callback of its collector: the next signal raises it.
        if frame is not None and _renders(frame.f_code):
            raise _OutOfTimeError

    handler = signal.signal(signal.SIGALRM, end)
    seconds, interval = signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS, AGAIN_S)
    try:
        yield
    except _OutOfTimeError as error:
        raise TimeoutError(f"it takes longer than {MAX_SECONDS:.0f} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds, interval)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Raise MemoryError in the block when the process grows by more than a maximum. A lower limit of its own stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MAX_BYTES
    if soft != resource.RLIM_INFINITY and soft <= most:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
