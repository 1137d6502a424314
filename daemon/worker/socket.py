"""The unix socket between a daemon and its workers: a stream each, of messages (goal.py) with their lengths in front.

The socket lies in a folder that only this user can enter (0700). A hello is accepted only from a process that the
supervisor has started, by its pid, and only once. Cleaners of /tmp delete the socket; then it is made again.
"""

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from headway.daemon.base.owned_folders import make_private
from headway.daemon.cluster.records import PROTOCOL_VERSION
from headway.daemon.worker.goal import FromWorker, Hello, ToWorker

log = structlog.get_logger()

MAX_MESSAGE_BYTES: Final = 64 << 20
HELLO_TIMEOUT_S: Final = 30.0
SOCKET_CHECK_S: Final = 2.0
"""Interval of looks whether the socket is still there."""
_LENGTH: Final = struct.Struct("!I")
_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_WORKER: Final = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: Final = msgspec.msgpack.Decoder(FromWorker)


def packed(message: ToWorker | FromWorker) -> bytes:
    """Return a message as it goes over the socket."""
    raw = _ENCODER.encode(message)
    return _LENGTH.pack(len(raw)) + raw


async def read_goal(reader: asyncio.StreamReader) -> ToWorker:
    """Return the daemon's next message. Raises asyncio.IncompleteReadError and OSError at the stream's end."""
    message: ToWorker = _TO_WORKER.decode(await _read(reader))
    return message


async def _read(reader: asyncio.StreamReader) -> bytes:
    [length] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes; the most is {MAX_MESSAGE_BYTES}")
    return await reader.readexactly(length)


class WorkerStream:
    """One attached worker."""

    def __init__(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        self.hello = hello
        self._writer = writer

    def send(self, message: ToWorker) -> None:
        """Hand a message over; messages go out in the sequence in which they were given."""
        if not self._writer.is_closing():
            self._writer.write(packed(message))

    def close(self) -> None:
        """End the stream after the messages already given."""
        self._writer.close()


class Attachments(Protocol):
    """The handler of the socket's streams: the supervisor."""

    def attach(self, stream: WorkerStream) -> str:
        """Attach a worker that said hello. Returns why it is refused, or an empty text."""
        ...

    def report(self, stream: WorkerStream, message: FromWorker) -> None:
        """Take a message of an attached worker."""
        ...

    def detach(self, stream: WorkerStream) -> None:
        """Note that its stream has ended."""
        ...


class WorkersSocket:
    """The socket where workers attach. Lives in one event loop."""

    def __init__(self, path: Path, attachments: Attachments, *, on_loss: Callable[[], None] = lambda: None) -> None:
        """on_loss: called when the socket was deleted, before it is served again."""
        self._path = path
        self._attachments = attachments
        self._on_loss = on_loss
        self._server: asyncio.Server | None = None
        self._streams: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve the socket. Raises OSError when its folder is somebody else's."""
        make_private(self._path.parent)
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def keep(self) -> None:
        """Serve the socket again when somebody has deleted it."""
        while True:
            await asyncio.sleep(SOCKET_CHECK_S)
            if self._server is not None and self._path.is_socket():
                continue
            make_private(self._path.parent)
            log.error("socket_of_workers_gone", path=str(self._path))
            self._on_loss()
            self._close()
            await self.serve()

    async def stop(self) -> None:
        """Stop serving, and end every stream."""
        self._close()
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="stream of a worker")
        self._streams.add(serving)
        serving.add_done_callback(self._streams.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one worker, from its hello to its end."""
        stream: WorkerStream | None = None
        try:
            stream = await self._attached(reader, writer)
            while stream is not None:
                self._attachments.report(stream, _FROM_WORKER.decode(await _read(reader)))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the worker has ended, or is about to: the supervisor hears of it
        except msgspec.MsgspecError as error:
            log.error("worker_not_understood", reason=str(error))
        finally:
            writer.close()
            if stream is not None:
                self._attachments.detach(stream)

    async def _attached(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> WorkerStream | None:
        """Return the stream of a worker after its hello; None: it is refused."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = _FROM_WORKER.decode(await _read(reader))
                if not isinstance(hello, Hello):
                    return None
                stream = WorkerStream(hello, writer)
                refused = self._attachments.attach(stream) if hello.protocol == PROTOCOL_VERSION else "another release"
                if not refused:
                    return stream
                log.warning("worker_refused", pid=hello.pid, reason=refused)
        return None
