"""A Ctrl-C that an import has dropped still ends the command."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from headway.daemon import interrupts as early_interrupt
from headway.daemon.interrupts import run_interruptible


@pytest.fixture(autouse=True)
def python_handler() -> Iterator[None]:
    """Each test begins and ends with the handler that was there."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def _work(_: asyncio.Event) -> int:
    return 0


def test_a_dropped_interrupt_is_raised_before_the_work() -> None:
    """As a callback of the import system drops it."""
    early_interrupt.begin()
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(_work)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run_interruptible(_work) == 0, "it counts once"


def test_without_an_interrupt_python_handles_the_next_one() -> None:
    """asyncio replaces Python's own handler alone."""
    early_interrupt.begin()
    early_interrupt.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
