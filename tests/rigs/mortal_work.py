"""Work that is killed at any of its changes of the disk, as a process is by SIGKILL between two of them."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

_DEAD: Final = 137
_FAILED: Final = 1
_CHANGES: Final = frozenset({"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod"})
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def dies_at(number: int, work: Callable[[], object]) -> bool:
    """Do work in a fork that dies at its change of this number, from 0 on. Return False if it ended before.

    It dies before a change, and for a file that it opens also when that is there and empty: two numbers. What Python
    has not passed to the kernel is lost, as it is with the process.
    """
    child = os.fork()
    if not child:
        code = _FAILED
        try:
            sys.addaudithook(_Reaper(number))
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, _DEAD), "the work itself has failed"
    return code == _DEAD


class _Reaper:
    """Counts changes, and ends the process at one of them."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._is_own = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_own or (event not in _CHANGES and not _opens_to_write(event, arguments)):
            return
        self._count()
        if event == "open" and not isinstance(arguments[0], int):  # a number is a file that is open and empty
            if not self._left:
                self._is_own = True
                os.close(os.open(arguments[0], arguments[2], 0o600))
            self._count()

    def _count(self) -> None:
        if not self._left:
            os._exit(_DEAD)
        self._left -= 1


def _opens_to_write(event: str, arguments: tuple[Any, ...]) -> bool:
    return event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & _WRITING)
