"""Calls functions one after the other, each once its event is passed, in a thread of its own."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue

from headway.stages.device.streams import Event

MOST_WAITING = 4096
"""Entries. A stage launches a few operations ahead of its device, so more of them is a bug."""


class Completions:
    """One line of events of one stream. Its thread starts with the first event."""

    def __init__(self, name: str, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._line: Queue[tuple[Event, Callable[[], None]] | None] = Queue(MOST_WAITING)
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=f"headway-{name}", daemon=True)

    def add(self, event: Event, act: Callable[[], None]) -> None:
        """Call `act` after the event, and after all that was added before. Raises OverflowError beyond MOST_WAITING."""
        if not self._thread.is_alive() and self._is_open:
            self._thread.start()
        try:
            self._line.put_nowait((event, act))
        except Full:
            raise OverflowError(f"{self._thread.name}: more than {MOST_WAITING} events wait") from None

    def close(self) -> None:
        """End the thread after the event for which it waits. Idempotent."""
        if self._is_open:
            self._is_open = False
            with suppress(Full):  # then the thread sees that it is closed when it takes the next entry
                self._line.put_nowait(None)

    def _run(self) -> None:
        while (entry := self._line.get()) is not None and self._is_open:
            event, act = entry
            try:
                event.wait()
                if self._is_open:
                    act()
            except BaseException as error:  # the thread that computes raises it
                self._on_failure(error)
            del entry, event, act  # they hold tensors, and the next entry may take long
