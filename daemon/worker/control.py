"""A worker's stream to its daemon: what it wants comes down, what the worker is goes up, at least once a second.

Everything here runs in the loop's thread, so that it continues while the main thread computes; any thread may call
`tell`. The last operations are told from here too, at any point of the main thread. A worker without
its daemon has no purpose: when the stream ends, `on_end` is called, once.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from headway.daemon.worker.goal import Actual, Answer, FromWorker, Goal, Heartbeat, Hello
from headway.daemon.worker.socket import packed, read_goal
from headway.proto.control_pb2 import RecentOperations
from headway.stages.links.loop_thread import LoopThread

CONNECT_TIMEOUT = timedelta(seconds=10)
FLUSH_TIMEOUT = timedelta(seconds=3)
HEARTBEAT_EVERY_S = 1.0


class WorkerControl:
    """Attach once. Messages leave in the order in which they were given."""

    def __init__(
        self,
        loop: LoopThread,
        socket_path: Path,
        *,
        inbox: "SimpleQueue[Any]",
        heartbeat: Callable[[], Heartbeat],
        recent: Callable[[], RecentOperations],
        on_end: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._socket_path = socket_path
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._recent = recent
        self._on_end = on_end
        self._messages: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._actual = Actual()
        """The last one that was told."""

    def attach(self, hello: Hello) -> None:
        """Connect and say hello. Raises ConnectionError or TimeoutError when the daemon does not serve the socket."""
        reader, writer = self._loop.run(
            self._connect(hello), timeout=CONNECT_TIMEOUT, what=f"attaching at {self._socket_path}"
        )
        self._loop.spawn(self._read(reader), name="goals")
        self._loop.spawn(self._write(writer), name="what the worker tells")
        self._loop.spawn(self._beat(), name="heartbeat")

    def tell(self, message: FromWorker) -> None:
        """Send a message."""
        self._loop.call_soon(self._enqueue, message)

    def flush(self) -> None:
        """Wait until all messages have been handed to the kernel, if possible: the process is about to end."""
        with suppress(TimeoutError, RuntimeError):
            self._loop.run(self._drain(), timeout=FLUSH_TIMEOUT, what="handing over the last messages")

    # --- in the loop's thread ---------------------------------------------------------------------------------------

    async def _connect(self, hello: Hello) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self._socket_path)
        writer.write(packed(hello))
        await writer.drain()
        return reader, writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = "the daemon ended the stream"
        try:
            while True:
                message = await read_goal(reader)
                if isinstance(message, Goal):
                    self._inbox.put(message)
                else:
                    told = await asyncio.to_thread(self._recent)
                    self._messages.put_nowait(Answer(message.number, told.SerializeToString()))
        except (OSError, msgspec.MsgspecError) as error:
            reason = str(error)
        except asyncio.IncompleteReadError:
            pass
        self._on_end(reason)

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # the reading side sees this end too, and reports it
            while True:
                writer.write(packed(await self._messages.get()))
                await writer.drain()
                self._messages.task_done()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
            self._enqueue(self._actual)

    async def _drain(self) -> None:
        await asyncio.sleep(0)  # messages that were given before are enqueued before
        await self._messages.join()

    def _enqueue(self, message: FromWorker) -> None:
        if isinstance(message, Actual):
            self._actual = message = msgspec.structs.replace(message, heartbeat=self._heartbeat())
        self._messages.put_nowait(message)
