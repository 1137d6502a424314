"""A watch: yields changes as they happen, until its one connection to one server ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from headway.daemon.base.errors import CompactedError, StoreUnreachableError
from headway.daemon.cluster.connection import EtcdConnection, is_login_refused, is_silence, one_line
from headway.daemon.cluster.transaction import range_of, to_text
from headway.proto import etcd_pb2, etcd_pb2_grpc

WatchCall = grpc.aio.StreamStreamCall[Any, Any]
KeyRange = tuple[bytes, bytes]
"""First key, and the key after the last one."""

QUIET_S = 2.0
"""Seconds without an event after which the server is asked whether it is still alive."""
SILENT_S = 3.0
"""Seconds without an answer to that question after which the server counts as gone."""
LISTEN_STEP_S = 0.05


FORBIDDEN = "permission denied"
"""Part of the reason with which etcd cancels a watch of keys that the user may not read."""


class _ForbiddenError(StoreUnreachableError):
    """etcd cancelled a watch of keys that it says the user may not read."""


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """One change of one key."""

    key: str
    value: bytes | None
    """Value; None: deleted."""
    mod_revision: int
    create_revision: int
    """Revision of the creation; 0 for a deletion."""


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes in the order in which they happened, in whole revisions."""

    events: tuple[KeyEvent, ...]

    @property
    def revision(self) -> int:
        """Return the revision of the last event."""
        return self.events[-1].mod_revision


async def watch(
    connection: EtcdConnection, prefix: str, *, from_revision: int, below: str = ""
) -> AsyncIterator[WatchBatch]:
    """Yield every change of keys that begin with a prefix, from a revision on, until the connection breaks.

    below: only of keys that sort before it; empty: of all.

    The watch does not resume. An etcd that is back may be another one, or an older state of the old one, and would
    leave a watch for a future revision silent. So the caller lists again.

    Only events give a revision, never a header: a server that is catching up names revisions in headers whose events it
    has not sent yet.

    Raises StoreUnreachableError when the stream breaks, falls silent or its server has not come as far as
    `from_revision`; CompactedError when events from there on are no longer kept; StoreError when etcd refuses.
    """
    endpoint = connection.endpoint
    try:
        async for reply in _stream_with_login(connection, range_of(prefix, below), from_revision):
            if reply.created and reply.header.revision < from_revision - 1:
                raise StoreUnreachableError(
                    f"etcd at {endpoint}", f"is at revision {reply.header.revision}, before {from_revision - 1}"
                )
            if reply.events:
                yield WatchBatch(tuple(map(_key_event, reply.events)))
    except asyncio.CancelledError as error:
        # grpc says so even if it cancelled the call and we did not: a watch must never end in silence
        if (ours := asyncio.current_task()) is not None and ours.cancelling():
            raise
        connection.leave(endpoint)
        raise StoreUnreachableError(f"etcd at {endpoint}", "the watch was cancelled") from error
    except grpc.aio.AioRpcError as error:
        connection.leave(endpoint)
        if is_silence(error):
            raise StoreUnreachableError(f"etcd at {endpoint}", f"the watch broke: {one_line(error)}") from error
        raise connection.translated(error) from error
    except StoreUnreachableError:
        connection.leave(endpoint)
        raise
    connection.leave(endpoint)
    raise StoreUnreachableError(f"etcd at {endpoint}", "ended the watch")


async def _stream_with_login(
    connection: EtcdConnection, keys: KeyRange, from_revision: int
) -> AsyncIterator[etcd_pb2.WatchResponse]:
    """Do `_stream`, with a new login if the present one has been forgotten.

    A server that is starting may also forbid the watch, because it does not know its roles yet. It answers a login when
    it does.
    """
    has_begun = False
    try:
        async for reply in _stream(connection, keys, from_revision):
            has_begun = True
            yield reply
        return
    except grpc.aio.AioRpcError as error:
        if not connection.access.user or not is_login_refused(error):
            raise
    except _ForbiddenError:
        if not connection.access.user or has_begun:
            raise
    await connection.log_in()
    async for reply in _stream(connection, keys, from_revision):
        yield reply


async def _stream(
    connection: EtcdConnection, keys: KeyRange, from_revision: int
) -> AsyncIterator[etcd_pb2.WatchResponse]:
    """Yield one stream's replies, until it ends. Raises AioRpcError, CompactedError, StoreUnreachableError
    for silence.
    """
    metadata = (("hasleader", "true"), *connection.metadata)
    target, timeout_s = f"etcd at {connection.endpoint}", connection.access.timeout_s
    call = etcd_pb2_grpc.WatchStub(connection.channel).Watch(metadata=metadata)
    silence = _Silence(call)
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(_creation(keys, from_revision))
            reply = await call.read()
        while isinstance(reply, etcd_pb2.WatchResponse):
            if reply.compact_revision:
                raise CompactedError(target, f"revision {from_revision} was compacted away")
            if reply.canceled:
                kind = _ForbiddenError if FORBIDDEN in reply.cancel_reason else StoreUnreachableError
                raise kind(target, f"cancelled the watch: {reply.cancel_reason or 'no reason given'}")
            yield reply
            reply = await silence.read()
    except TimeoutError as error:
        raise StoreUnreachableError(target, f"no watch was made within {timeout_s:g} s") from error
    except asyncio.CancelledError:
        if silence.has_ended_call:
            raise StoreUnreachableError(target, f"said nothing for {QUIET_S + SILENT_S:g} s") from None
        raise
    finally:
        call.cancel()
        await silence.end()


def _creation(keys: KeyRange, from_revision: int) -> etcd_pb2.WatchRequest:
    create = etcd_pb2.WatchCreateRequest(
        key=keys[0], range_end=keys[1], start_revision=from_revision, progress_notify=True
    )
    return etcd_pb2.WatchRequest(create_request=create)


class _Silence:
    """Reads a call. Asks a quiet server for its progress, which a living one tells at once, and ends the call of one
    that says nothing.

    One task beside the reads, because a timeout around a read would cancel the whole call, and a task for each read
    would cost more than the read.
    """

    def __init__(self, call: WatchCall) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = None
        """Since when the present read waits; None: nobody reads."""
        self._listening = asyncio.create_task(self._listen(), name="etcd watch's silence")
        self.has_ended_call = False

    async def read(self) -> object:
        """Return the next reply, or EOF."""
        self._waits_since = self._loop.time()
        try:
            return await self._call.read()
        finally:
            self._waits_since = None

    async def end(self) -> None:
        """End the task beside the reads."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            since, now = self._waits_since, self._loop.time()
            if since is None or now < since + QUIET_S:
                await asyncio.sleep(QUIET_S if since is None else since + QUIET_S - now)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENT_S):
                    await _tell(self._call, etcd_pb2.WatchRequest(progress_request=etcd_pb2.WatchProgressRequest()))
                    while self._waits_since == since:
                        await asyncio.sleep(LISTEN_STEP_S)
            await asyncio.sleep(LISTEN_STEP_S)  # what came while this process stood still is read first
            if self._waits_since == since:
                self.has_ended_call = True
                self._call.cancel()
                return


async def _tell(call: WatchCall, request: etcd_pb2.WatchRequest) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `read` reports the error
        await call.write(request)


def _key_event(message: etcd_pb2.Event) -> KeyEvent:
    is_deletion = message.type == etcd_pb2.Event.DELETE
    return KeyEvent(
        to_text(message.kv.key),
        None if is_deletion else message.kv.value,
        message.kv.mod_revision,
        message.kv.create_revision,
    )
