"""Ctrl-C in two steps: the first ends the work in good order, the second does not wait for it."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_interruptible(
    main: Callable[[asyncio.Event], Coroutine[Any, Any, int]], *, on_first: Callable[[], None] | None = None
) -> int:
    """Run `main(force)` in a new event loop; its result is the exit code, or 128 + the signal that ended it.

    The first signal cancels it, so that its `finally` clauses stop what it started; the second sets `force`.
    """
    return asyncio.run(_run(main, on_first))


async def _run(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]], on_first: Callable[[], None] | None) -> int:
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
    try:
        return await task
    except asyncio.CancelledError:
        if not caught:
            raise
        return 128 + caught[0]
