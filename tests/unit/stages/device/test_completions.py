"""A line of a device's events: who closes it never waits, however long the line is."""

import threading

from headway.stages.device.streamed import MOST_WAITING, Completions


class Held:
    """An event that is passed when the test says so."""

    def __init__(self) -> None:
        self.asked, self._passed = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.asked.set()
        assert self._passed.wait(30.0)

    def let_pass(self) -> None:
        self._passed.set()


def test_a_full_line_can_be_closed() -> None:
    """Its thread waits for a card that hangs, and no entry has room: closing returns, and nothing more is called."""
    failures: list[BaseException] = []
    called: list[str] = []
    line, first = Completions("line", failures.append), Held()
    line.add(first, lambda: called.append("first"))  # type: ignore[arg-type]
    assert first.asked.wait(30.0)
    for _ in range(MOST_WAITING):
        line.add(first, lambda: called.append("later"))  # type: ignore[arg-type]
    closing = threading.Thread(target=line.close, daemon=True)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive(), "close waits for room"
    first.let_pass()
    line._thread.join(30.0)
    assert not line._thread.is_alive()
    assert (called, failures) == ([], [])
