"""Threads for calls that a file system may never answer: a few for each purpose and file system.

A call without progress for its time is given up: its slot is free again, and its thread is left alone. A limited number
of threads may be left on one file system. Beyond it, the purpose refuses the file system at once and says so, until a
thread comes back. The threads are daemons: one that hangs for ever does not keep the process from ending.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from threading import Thread
from typing import Any, Final, TypeVar

import structlog

from headway.daemon.base.errors import ConfigError, RecoveryError, StorageAwayError, in_one_line
from headway.daemon.base.file_system import file_system_of, sentence
from headway.stages.errors import DataError

T = TypeVar("T")
log = structlog.get_logger()
Beat = Callable[[], None]
"""Function by which a call reports progress. It raises AbandonedError if the call was given up."""

SILENCE_S: Final = 60.0
"""Seconds without progress after which a call counts as hung."""
MOST_HUNG: Final = 3
"""Maximum number of threads left behind on one file system."""
SOON_S: Final = 2.0
"""A call whose caller is gone ends with its next step; after this time it counts as hung."""


SAID_EVERY_S: Final = 5.0
"""Interval at which a daemon's start says which folder it waits for."""


class AbandonedError(Exception):
    """The call was given up: its thread ends here."""


def _close(pieces: Generator[bytes], _: Beat) -> None:
    pieces.close()


class FileThreads:
    """The calls for one purpose, in one event loop."""

    def __init__(
        self, purpose: str, *, num_at_once: int = 2, silence_s: float = SILENCE_S, most_hung: int = MOST_HUNG
    ) -> None:
        """purpose: part of the threads' names. Each file system has num_at_once slots."""
        self._purpose = purpose
        self._silence_s = silence_s
        self._most_hung = most_hung
        self._num_at_once = num_at_once
        self._systems: dict[str, _FileSystem] = {}
        """File systems with running or hung calls."""

    @property
    def num_hung(self) -> int:
        """Return the number of threads that were left behind and have not come back."""
        return sum(len(system.left) for system in self._systems.values())

    async def run(self, url: str, act: Callable[[Beat], T], *, on_late: Callable[[], None] = lambda: None) -> T:
        """Return the result of act(beat), from a thread. on_late: is called when a call that was given up ends after
        all.

        Raises RecoveryError, naming the URL, for any error of act except ConfigError and DataError. Raises
        StorageAwayError when act hangs, or earlier calls to its file system still hang.
        """
        name = file_system_of(url)
        system = self._systems.setdefault(name, _FileSystem(asyncio.Semaphore(self._num_at_once)))
        system.num_askers += 1
        try:
            return await self._run_on(system, url, act, on_late)
        finally:
            system.num_askers -= 1
            self._forget_idle()

    async def pieces(self, url: str, begin: Callable[[Beat], Iterator[bytes]]) -> AsyncGenerator[bytes]:
        """Yield what begin(beat) yields, each piece by a call of its own, which counts as hung by itself. Raises as
        `run`.
        """
        found: Iterator[bytes] | None = None
        call: Beat = lambda: None  # noqa: E731 (it is replaced by that of each call)

        def step(beat: Beat) -> bytes | None:
            nonlocal found, call
            call = beat
            if found is None:
                found = begin(lambda: call())
            return next(found, None)

        is_over = False
        try:
            while (piece := await self.run(url, step)) is not None:
                yield piece
            is_over = True
        finally:
            if isinstance(found, Generator) and not is_over:
                with suppress(RecoveryError):  # it hangs, and closes itself when it comes back
                    await self.run(url, partial(_close, found))

    async def _run_on(
        self, system: "_FileSystem", url: str, act: Callable[[Beat], T], on_late: Callable[[], None]
    ) -> T:
        self._require_answers(system, url)
        async with system.slots:
            self._require_answers(system, url)
            call = _Call(asyncio.get_running_loop(), act)
            try:
                Thread(target=call.work, name=f"{self._purpose} {url}", daemon=True).start()
            except RuntimeError as refused:
                raise RecoveryError(url, f"this node has no thread left for it: {refused}") from refused
            try:
                while (left_s := call.beaten_at + self._silence_s - time.monotonic()) > 0 and not call.ended.done():
                    await asyncio.wait({call.ended}, timeout=left_s)
            finally:
                if not call.ended.done():
                    self._leave(system, call, on_late)
            if not call.ended.done():
                raise StorageAwayError(url, f"its file system has not answered for {self._silence_s:g} s")
            error = call.ended.exception()
            if error is not None and not isinstance(error, RecoveryError | ConfigError | DataError):
                raise RecoveryError(url, sentence(error)) from error
            return call.ended.result()  # type: ignore[no-any-return]

    def _leave(self, system: "_FileSystem", call: "_Call", on_late: Callable[[], None]) -> None:
        def came_back(ended: asyncio.Future[Any]) -> None:
            system.left.discard(call)
            self._forget_idle()
            if not ended.cancelled():
                ended.exception()  # the caller is gone, and needs no result
            on_late()

        call.is_abandoned = True
        system.left.add(call)
        call.ended.add_done_callback(came_back)

    def _forget_idle(self) -> None:
        self._systems = {name: system for name, system in self._systems.items() if system.num_askers or system.left}

    def _require_answers(self, system: "_FileSystem", url: str) -> None:
        now = time.monotonic()
        hung = [call.beaten_at for call in system.left if now - call.beaten_at > SOON_S]
        if len(hung) >= self._most_hung:
            raise StorageAwayError(
                url,
                f"its file system hangs: {len(hung)} earlier calls have no answer, the first for "
                f"{now - min(hung):.0f} s",
            )


@dataclass(slots=True)
class _FileSystem:
    """The calls of one purpose to one file system."""

    slots: asyncio.Semaphore
    left: "set[_Call]" = field(default_factory=set)
    """Calls that were given up and have not come back."""
    num_askers: int = 0


class _Call:
    """One call, in its thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, act: Callable[[Beat], Any]) -> None:
        self.ended: asyncio.Future[Any] = loop.create_future()
        self.beaten_at = time.monotonic()
        self.is_abandoned = False
        self._loop = loop
        self._act = act

    def work(self) -> None:
        """Run the call in its thread."""
        try:
            result = self._act(self._beat)
        except StopIteration as error:
            self._tell(None, RuntimeError(in_one_line(error)))  # a Future takes every exception except this one
        except BaseException as error:
            self._tell(None, error)
        else:
            self._tell(result, None)

    def _beat(self) -> None:
        if self.is_abandoned:
            raise AbandonedError
        self.beaten_at = time.monotonic()

    def _tell(self, result: Any, error: BaseException | None) -> None:
        def tell() -> None:
            if self.ended.cancelled():
                return
            if error is None:
                self.ended.set_result(result)
            else:
                self.ended.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            return  # the loop is closed, so no caller waits


async def answered(setting: str, folder: Path, act: Callable[[], T], *, tell: Callable[[str], None]) -> T:
    """Return act(), which uses the folder of a setting, from a thread, so that signals count meanwhile.

    tell: is told what the start waits for, again and again. Raises what act raises: ConfigError or RecoveryError.
    """
    began = time.monotonic()
    call = asyncio.ensure_future(FileThreads("start", silence_s=inf).run(str(folder), lambda _: act()))
    while not (await asyncio.wait({call}, timeout=SAID_EVERY_S))[0]:
        waited_s = round(time.monotonic() - began)
        log.warning("folder_does_not_answer", setting=setting, folder=str(folder), waited_s=waited_s)
        tell(f"waiting for {setting} {folder}: its file system has not answered for {waited_s} s")
    return call.result()
