"""Handles Ctrl-C in two steps: the first ends the work cleanly, the second does not wait for it."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from headway.daemon import early_interrupt

Main = Callable[[asyncio.Event], Coroutine[Any, Any, int]]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_interruptible(
    main: Main, *, on_first: Callable[[], None] | None = None, has_ended_well: Callable[[], bool] = lambda: False
) -> int:
    """Run `main(force)` in a new event loop; return its exit code, or 128 + the signal that ended it.

    The first signal cancels it, so that its `finally` clauses stop its children; the second sets `force`.
    has_ended_well: called after a signal; if that is the work's normal end, and all of it is done, the exit code is 0.
    """
    early_interrupt.end()
    # A signal while asyncio makes its loop would leave half a loop behind: it waits until the loop handles it.
    early: list[signal.Signals] = []
    before = {number: signal.signal(number, lambda it, _: early.append(signal.Signals(it))) for number in SIGNALS}
    try:
        return asyncio.run(_run(main, on_first, has_ended_well, early))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _run(
    main: Main, on_first: Callable[[], None] | None, has_ended_well: Callable[[], bool], early: list[signal.Signals]
) -> int:
    loop, force = asyncio.get_running_loop(), asyncio.Event()
    caught: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        caught.append(number)
        if len(caught) == 1:
            if on_first is not None:
                on_first()
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
