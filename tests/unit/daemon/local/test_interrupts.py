"""A command's exit code after Ctrl-C is 0 if that is its normal end and all was saved."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from headway.daemon.base import interrupts as early_interrupt
from headway.daemon.base.interrupts import run_interruptible


@pytest.mark.parametrize(("num_signals", "is_saved", "code"), [(1, True, 0), (1, False, 130), (2, True, 130)])
def test_an_interrupt_that_saved_everything_is_no_failure(num_signals: int, is_saved: bool, code: int) -> None:
    """One signal and all saved: 0. Something not saved, or a second signal that did not wait: 130."""

    async def main(force: asyncio.Event) -> int:
        loop = asyncio.get_running_loop()
        try:
            loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            if num_signals == 2:
                os.kill(os.getpid(), signal.SIGINT)
                await force.wait()
        return 1

    assert run_interruptible(main, has_ended_well=lambda: is_saved) == code


def test_an_interrupt_while_the_loop_is_made_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C inside asyncio's own start: the work is cancelled as later, with its exit code and no traceback."""
    make_loop = asyncio.events.new_event_loop

    def interrupted() -> asyncio.AbstractEventLoop:
        os.kill(os.getpid(), signal.SIGINT)
        return make_loop()

    async def main(_: asyncio.Event) -> int:
        await asyncio.Event().wait()
        return 1

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(asyncio.events, "new_event_loop", interrupted)
    assert run_interruptible(main) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is before


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
