"""A TCP proxy between two ports of this machine, which breaks what passes through it in every way a network can."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Self

from headway.stages.links.loop_thread import LoopThread

DEADLINE = timedelta(seconds=10)
READ_BYTES = 1 << 16


class Way(Enum):
    """A direction, seen from who dials."""

    THERE = "there"
    BACK = "back"


BOTH = (Way.THERE, Way.BACK)


@dataclass(eq=False)
class _Passage:
    """One connection through the proxy: a writer to each side."""

    writers: dict[Way, asyncio.StreamWriter] = field(default_factory=dict)
    has_lost_bytes: bool = False

    def reset(self) -> None:
        for writer in self.writers.values():
            writer.transport.abort()


class TcpProxy:
    """Listens on `port` of 127.0.0.1 and passes on to `target_port` there. All methods are for other threads.

    A fault holds until `heal`; several can hold at once. As a context manager it starts and stops itself.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.num_connections = 0
        self._target_port = target_port
        self._loop = LoopThread("tcp-proxy")
        self._passages: set[_Passage] = set()
        self._server: asyncio.Server | None = None
        self._is_cut = False
        self._dropped: set[Way] = set()
        self._delay_s = 0.0
        self._open = {way: asyncio.Event() for way in Way}

    def __enter__(self) -> Self:
        self._loop.start()
        self._loop.run(self._start(), timeout=DEADLINE, what="the proxy's port")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._stop(), timeout=DEADLINE, what="the proxy's end")
        self._loop.stop()

    def cut(self) -> None:
        """Reset all connections, and each new one at once."""
        self._is_cut = True
        self._do(self._reset_all)

    def drop(self, *ways: Way) -> None:
        """Throw away what goes these ways: one-way loss. `heal` resets the connections that lost something."""
        self._do(lambda: self._dropped.update(ways or BOTH))

    def stall(self, *ways: Way) -> None:
        """Take nothing more from who sends these ways; nothing is lost, connections stay."""
        self._do(lambda: self._close_gates(ways or BOTH))

    def delay(self, duration: timedelta) -> None:
        """Hold every piece of at most 64 KiB for so long, each way: latency, and a limit of rate with it."""
        self._delay_s = duration.total_seconds()

    def reset(self) -> None:
        """Reset all connections once; new ones are let through."""
        self._do(self._reset_all)

    def heal(self) -> None:
        """End every fault."""
        self._is_cut = False
        self._delay_s = 0.0
        self._do(self._heal)

    def _do(self, action: Callable[[], object]) -> None:
        async def act() -> None:
            action()

        self._loop.run(act(), timeout=DEADLINE, what="a fault")

    def _reset_all(self) -> None:
        for passage in tuple(self._passages):
            passage.reset()

    def _close_gates(self, ways: tuple[Way, ...]) -> None:
        for way in ways:
            self._open[way].clear()

    def _heal(self) -> None:
        self._dropped.clear()
        for passage in tuple(self._passages):
            if passage.has_lost_bytes:
                passage.reset()
        for gate in self._open.values():
            gate.set()

    async def _start(self) -> None:
        for gate in self._open.values():
            gate.set()
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
        self._heal()
        self._reset_all()
        while self._passages:
            await asyncio.sleep(0.01)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        passage = _Passage({Way.BACK: writer})
        self._passages.add(passage)
        try:
            if self._is_cut:
                return
            far_reader, passage.writers[Way.THERE] = await asyncio.open_connection("127.0.0.1", self._target_port)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(passage, Way.THERE, reader))
                pumps.create_task(self._pump(passage, Way.BACK, far_reader))
        except* OSError:
            pass  # one side is gone: so is the other
        finally:
            passage.reset()
            self._passages.discard(passage)

    async def _pump(self, passage: _Passage, way: Way, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(READ_BYTES):
            await self._open[way].wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            if way in self._dropped:
                passage.has_lost_bytes = True
                continue
            passage.writers[way].write(data)
            await passage.writers[way].drain()
        if way not in self._dropped:
            passage.writers[way].write_eof()
