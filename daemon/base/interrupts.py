"""Ctrl-C: kept while modules are imported, and handled in two steps while a cluster of this process works.

Python drops an exception that is raised in a callback of its import system, and some modules drop every exception of
their own imports. A KeyboardInterrupt there would be lost, and the command would go on. So this module is the first one
that the program imports, and it imports asyncio late.
"""

import signal
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

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


def run_interruptible(
    main: "Callable[[asyncio.Event], Coroutine[Any, Any, int]]",
    *,
    on_first: str = "",
    has_ended_well: Callable[[], bool] = lambda: False,
) -> int:
    """Run `main(force)` in a new event loop; return its exit code, or 128 + the signal that ended it.

    The first signal cancels it, so that its `finally` clauses stop its children; the second sets `force`.

    on_first: a line for people, on stderr. has_ended_well: called after a signal; if that is the work's normal end, and
    all of it is done, the exit code is 0.
    """
    import asyncio

    end()
    # A signal while asyncio makes its loop would leave half a loop behind: it waits until the loop handles it.
    early: list[signal.Signals] = []
    before = {number: signal.signal(number, lambda it, _: early.append(signal.Signals(it))) for number in SIGNALS}
    try:
        return asyncio.run(_run(main, on_first, has_ended_well, early))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _run(
    main: "Callable[[asyncio.Event], Coroutine[Any, Any, int]]",
    on_first: str,
    has_ended_well: Callable[[], bool],
    early: list[signal.Signals],
) -> int:
    import asyncio

    loop, force = asyncio.get_running_loop(), asyncio.Event()
    caught: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        caught.append(number)
        if len(caught) == 1:
            if on_first:
                sys.stderr.write(on_first + "\n")
            task.cancel()
        else:
            force.set()

    task = asyncio.create_task(main(force))
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    for number in early:
        on_signal(number)
    try:
        return await task
    except asyncio.CancelledError:
        if not caught:
            raise
        return 0 if len(caught) == 1 and has_ended_well() else 128 + caught[0]
