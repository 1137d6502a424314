"""Serves the unix socket between a daemon and its workers: one stream each, orders down, reports up.

gRPC does not show a peer's credentials. So the socket lies in a folder that only this user can enter (0700). A hello is
accepted only from a process that the supervisor has started, by its pid, and only once.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

from headway.daemon.records.records import PROTOCOL_VERSION
from headway.daemon.storage.folders import make_private
from headway.proto import control_pb2, control_pb2_grpc

log = structlog.get_logger()

MAX_MESSAGE_BYTES = 64 << 20
HELLO_TIMEOUT_S = 30.0


class WorkerStream:
    """One attached worker: orders go in here, and end when it is closed."""

    def __init__(self, hello: control_pb2.WorkerHello) -> None:
        self.hello = hello
        self._orders: asyncio.Queue[control_pb2.Order | None] = asyncio.Queue()

    def send(self, order: control_pb2.Order) -> None:
        """Hand an order over; orders go out in the sequence in which they were given."""
        self._orders.put_nowait(order)

    def close(self) -> None:
        """End the stream after the orders already given."""
        self._orders.put_nowait(None)

    async def orders(self) -> AsyncIterator[control_pb2.Order]:
        """Yield the orders in turn, until the stream is closed."""
        while (order := await self._orders.get()) is not None:
            yield order


class Attachments(Protocol):
    """The handler of the socket's server: the supervisor."""

    def attach(self, stream: WorkerStream) -> str:
        """Attach a worker that said hello. Returns why it is refused, or an empty text."""
        ...

    def report(self, stream: WorkerStream, report: control_pb2.Report) -> None:
        """Take a report of an attached worker."""
        ...

    def detach(self, stream: WorkerStream) -> None:
        """Note that its stream has ended."""
        ...


class WorkerService(control_pb2_grpc.WorkerServicer):
    """The gRPC service headway.control.Worker."""

    def __init__(self, attachments: Attachments) -> None:
        self._attachments = attachments

    async def Attach(  # noqa: N802 (the name on the wire)
        self, requests: AsyncIterator[control_pb2.Report], context: Any
    ) -> AsyncIterator[control_pb2.Order]:
        """Serve one worker, from its hello to its end."""
        stream = await self._hello(requests, context)
        reading = asyncio.ensure_future(self._read(stream, requests))
        try:
            async for order in stream.orders():
                yield order
        finally:
            reading.cancel()
            self._attachments.detach(stream)

    async def _hello(self, requests: AsyncIterator[control_pb2.Report], context: Any) -> WorkerStream:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_TIMEOUT_S:g} s")
            raise
        if first.WhichOneof("report") != "hello":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the first report must be a hello")
        stream = WorkerStream(first.hello)
        if first.hello.protocol != PROTOCOL_VERSION:
            refused = f"protocol {first.hello.protocol}, not {PROTOCOL_VERSION}"
        else:
            refused = self._attachments.attach(stream)
        if refused:
            log.warning("worker_refused", pid=first.hello.pid, reason=refused)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refused)
        return stream

    async def _read(self, stream: WorkerStream, requests: AsyncIterator[control_pb2.Report]) -> None:
        try:
            async for report in requests:
                self._attachments.report(stream, report)
        finally:
            stream.close()


async def serve_workers(socket_path: Path, attachments: Attachments) -> grpc.aio.Server:
    """Return a started server on a unix socket, whose folder is made private. Stop it with `await
    server.stop(grace)`. Raises OSError when the folder is somebody else's.
    """
    make_private(socket_path.parent)
    socket_path.unlink(missing_ok=True)
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    server = grpc.aio.server(options=options)
    control_pb2_grpc.add_WorkerServicer_to_server(WorkerService(attachments), server)
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    return server
