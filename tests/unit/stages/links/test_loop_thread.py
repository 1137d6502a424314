"""Whose errors are failures of a loop in its own thread."""

from collections.abc import Callable

import pytest

from headway.stages.links.loop_thread import LoopThread


class PollerCompletionQueue:
    """Stands for gRPC's: one poller tells all loops of a process, closed ones too."""

    def _handle_events(self) -> None:
        raise RuntimeError("Event loop is closed")

    @property
    def callback(self) -> Callable[[], None]:
        """What gRPC calls in a loop."""
        return self._handle_events


def _raise(error: Exception) -> None:
    raise error


def test_a_closed_loop_elsewhere_is_no_failure() -> None:
    """gRPC's poller meets the closed loop of another thread: this loop goes on, and its stop raises nothing."""
    thread = LoopThread()
    thread.start()
    thread.call_soon(PollerCompletionQueue().callback)
    thread.stop()


def test_the_error_of_any_other_callback_is_raised_by_stop() -> None:
    """The same words, said by a callback of ours, are a failure."""
    thread = LoopThread()
    thread.start()
    thread.call_soon(_raise, RuntimeError("Event loop is closed"))
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        thread.stop()
