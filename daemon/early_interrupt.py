"""Keeps a Ctrl-C that comes while modules are imported.

Python drops an exception that is raised in a callback of its import system, and some modules drop every exception of
their own imports. A KeyboardInterrupt there would be lost, and the command would go on.
"""

import signal
from types import FrameType

_has_come = False


def begin() -> None:
    """Note each SIGINT from now on; it raises KeyboardInterrupt all the same. Only in the main thread."""
    signal.signal(signal.SIGINT, _on_interrupt)


def end() -> None:
    """The imports are done: Python's own handler is back. Raises KeyboardInterrupt if a SIGINT came before."""
    global _has_come
    if signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _has_come:
        _has_come = False
        raise KeyboardInterrupt


def _on_interrupt(_number: int, _frame: FrameType | None) -> None:
    global _has_come
    _has_come = True
    raise KeyboardInterrupt
