"""A command's exit code after Ctrl-C is 0 if that is its normal end and all was saved."""

import asyncio
import os
import signal

import pytest

from headway.daemon.interrupts import run_interruptible


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
