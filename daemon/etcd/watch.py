"""A watch that outlives connections and servers: it resumes after the last event, so none is lost or doubled."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from headway.daemon.errors import CompactedError, StoreUnreachableError
from headway.daemon.etcd.connection import EtcdConnection, is_login_refused
from headway.daemon.etcd.transaction import prefix_end, range_start
from headway.proto import etcd_pb2, etcd_pb2_grpc

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """One change of one key."""

    key: str
    value: bytes | None
    """None: deleted."""
    mod_revision: int
    create_revision: int
    """0 for a deletion."""


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes in the order in which they happened; whole revisions only."""

    events: tuple[KeyEvent, ...]

    @property
    def revision(self) -> int:
        """Of the last event."""
        return self.events[-1].mod_revision


async def watch(
    connection: EtcdConnection,
    prefix: str,
    *,
    from_revision: int,
    on_reachable: Callable[[bool, str], None] | None = None,
) -> AsyncIterator[WatchBatch]:
    """Every change of keys that begin with a prefix, from a revision on. Never ends by itself.

    It resumes at the revision after the last event, never at the revision of a header: a server that is catching up
    names revisions in headers whose events it has not sent yet. Progress notices only keep the stream alive.

    on_reachable: told (True, "") when a server serves the watch, and (False, reason) when the stream broke; a broken
    one is tried again for ever.
    Raises CompactedError when events from there on are no longer kept: list again; StoreError when etcd refuses.
    """
    tell = on_reachable or _ignore
    next_revision, pause = from_revision, FIRST_PAUSE_S
    while True:
        reason = "etcd ended the watch"
        try:
            async for reply in _stream(connection, prefix, next_revision):
                if reply.created:
                    tell(True, "")
                    pause = FIRST_PAUSE_S
                if reply.events:
                    next_revision = reply.events[-1].kv.mod_revision + 1
                    yield WatchBatch(tuple(map(_key_event, reply.events)))
        except grpc.aio.AioRpcError as error:
            if is_login_refused(error):
                reason = "login expired"
                await _log_in(connection)
            else:
                translated = connection.translated(error)
                if not isinstance(translated, StoreUnreachableError) and error.code() not in _BROKEN:
                    raise translated from error
                reason = translated.reason
        except TimeoutError:
            reason = f"no watch was made within {connection.access.timeout_s:g} s"
        tell(False, reason)
        connection.rotate()
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 2, LONGEST_PAUSE_S)


_BROKEN = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.ABORTED})
"""What a stream may end with when its server stops in the middle of a message."""


async def _stream(connection: EtcdConnection, prefix: str, from_revision: int) -> AsyncIterator[etcd_pb2.WatchResponse]:
    """One stream's replies, until it ends. Raises AioRpcError, CompactedError, or TimeoutError before the first one."""
    start, end = range_start(prefix.encode()), prefix_end(prefix.encode())
    create = etcd_pb2.WatchCreateRequest(key=start, range_end=end, start_revision=from_revision, progress_notify=True)
    metadata = (("hasleader", "true"), *connection.metadata)
    call = etcd_pb2_grpc.WatchStub(connection.channel).Watch(metadata=metadata)
    try:
        async with asyncio.timeout(connection.access.timeout_s):
            await call.write(etcd_pb2.WatchRequest(create_request=create))
            reply = await call.read()
        while isinstance(reply, etcd_pb2.WatchResponse):
            if reply.compact_revision:
                raise CompactedError(connection.target, f"revision {from_revision} was compacted away")
            if reply.canceled:
                return
            yield reply
            reply = await call.read()
    finally:
        call.cancel()


async def _log_in(connection: EtcdConnection) -> None:
    try:
        await connection.log_in()
    except grpc.aio.AioRpcError as error:
        translated = connection.translated(error)
        if not isinstance(translated, StoreUnreachableError):
            raise translated from error


def _key_event(message: etcd_pb2.Event) -> KeyEvent:
    is_deletion = message.type == etcd_pb2.Event.DELETE
    return KeyEvent(
        message.kv.key.decode(),
        None if is_deletion else message.kv.value,
        message.kv.mod_revision,
        message.kv.create_revision,
    )


def _ignore(is_reachable: bool, reason: str) -> None:
    """Nobody wants to know."""
