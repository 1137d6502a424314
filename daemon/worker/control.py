"""A worker's stream to its daemon: reports up, orders down, a heartbeat once a second.

Everything here runs in the loop's thread, so that it continues while the main thread computes; any thread may call
`report` and `progress`. The last operations are reported from here too, at any point of the main thread. A worker
without its daemon has no purpose: when the stream ends, `on_end` is called, once.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import grpc

from headway.daemon.workers.service import MAX_MESSAGE_BYTES
from headway.proto.control_pb2 import (
    Heartbeat,
    JournalEntry,
    Order,
    Progress,
    RecentOperations,
    Report,
    WorkerHello,
)
from headway.proto.control_pb2_grpc import WorkerStub
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.shared_port import channel_to

CONNECT_TIMEOUT = timedelta(seconds=10)
FLUSH_TIMEOUT = timedelta(seconds=3)
HEARTBEAT_EVERY_S = 1.0
PROGRESS_EVERY_S = 0.2


class OrderInbox(Protocol):
    """Receives orders. Must never block: `queue.SimpleQueue` fits."""

    def put(self, item: Order) -> None: ...


class WorkerControl:
    """Attach once. Reports leave in the order in which they were given, progress before later reports."""

    def __init__(
        self,
        loop: LoopThread,
        socket_path: Path,
        *,
        inbox: OrderInbox,
        heartbeat: Callable[[], Heartbeat],
        recent: Callable[[int], RecentOperations],
        on_end: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._socket_path = socket_path
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._recent = recent
        self._on_end = on_end
        self._reports: asyncio.Queue[Report] = asyncio.Queue()
        self._progress: Progress | None = None
        self._progress_timer: asyncio.TimerHandle | None = None

    def attach(self, hello: WorkerHello) -> None:
        """Connect and say hello. Raises ConnectionError or TimeoutError when the daemon does not serve the socket."""
        call = self._loop.run(self._connect(hello), timeout=CONNECT_TIMEOUT, what=f"attaching at {self._socket_path}")
        self._loop.spawn(self._read(call), name="orders")
        self._loop.spawn(self._write(call), name="reports")
        self._loop.spawn(self._beat(), name="heartbeat")

    def report(self, report: Report) -> None:
        """Send a report, after all earlier progress."""
        self._loop.call_soon(self._enqueue, report)

    def progress(self, job: str, generation: int, entry: JournalEntry) -> None:
        """Send a batch's entry, together with others if several come within PROGRESS_EVERY_S."""
        self._loop.call_soon(self._add_progress, job, generation, entry)

    def flush(self) -> None:
        """Wait until all reports have been handed to the kernel, if possible: the process is about to end."""
        with suppress(TimeoutError, RuntimeError):
            self._loop.run(self._drain(), timeout=FLUSH_TIMEOUT, what="handing over the last reports")

    # --- in the loop's thread ---------------------------------------------------------------------------------------

    async def _connect(self, hello: WorkerHello) -> Any:
        channel = channel_to(
            f"unix:{self._socket_path}",
            None,
            options=(
                ("grpc.default_authority", "localhost"),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ),
        )
        call = WorkerStub(channel).Attach()
        try:
            await call.write(Report(hello=hello))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise ConnectionError(f"{self._socket_path}: {await call.details()}") from error
        return call

    async def _read(self, call: Any) -> None:
        reason = "the daemon ended the stream"
        try:
            while isinstance(order := await call.read(), Order):
                if order.WhichOneof("order") == "tell_operations":
                    told = await asyncio.to_thread(self._recent, order.tell_operations.request)
                    self._reports.put_nowait(Report(recent_operations=told))
                else:
                    self._inbox.put(order)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        self._on_end(reason)

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await call.write(await self._reports.get())
                self._reports.task_done()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading side sees this end too, and reports it

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
            self._reports.put_nowait(Report(heartbeat=self._heartbeat()))

    async def _drain(self) -> None:
        await asyncio.sleep(0)  # reports that were given before are enqueued before
        await self._reports.join()

    def _enqueue(self, report: Report) -> None:
        self._flush_progress()
        self._reports.put_nowait(report)

    def _add_progress(self, job: str, generation: int, entry: JournalEntry) -> None:
        if self._progress is not None and (self._progress.job, self._progress.generation) != (job, generation):
            self._flush_progress()
        if self._progress is None:
            self._progress = Progress(job=job, generation=generation)
        self._progress.entries.append(entry)
        if self._progress_timer is None:
            self._on_progress_timer()

    def _on_progress_timer(self) -> None:
        """Send pending progress and come back later; stop when there was none."""
        self._progress_timer = None
        if self._progress is not None:
            self._flush_progress()
            self._progress_timer = self._loop.loop.call_later(PROGRESS_EVERY_S, self._on_progress_timer)

    def _flush_progress(self) -> None:
        if self._progress is not None:
            self._reports.put_nowait(Report(progress=self._progress))
            self._progress = None
