"""The parts of etcd's API that Headway uses. Keys are text, values bytes; calls have deadlines; errors name their
target.

Headway has its own client because no published one survives the death of an etcd together with TLS; the reasons are in
docs/decisions.md. Wire format: proto/etcd.proto.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from headway.daemon.base.errors import ConflictError, LeaseLostError, StoreError, StoreUnreachableError
from headway.daemon.cluster.connection import EtcdAccess, EtcdConnection, Metadata
from headway.daemon.cluster.lease import Lease
from headway.daemon.cluster.transaction import (
    Change,
    Compare,
    Delete,
    delete_request,
    range_of,
    to_bytes,
    to_text,
    transaction_request,
)
from headway.daemon.cluster.watch import WatchBatch, watch
from headway.proto import etcd_pb2
from headway.proto.etcd_pb2_grpc import AuthStub, KVStub, LeaseStub, MaintenanceStub

PAGE_KEYS = 1000
FIRST_PAGE_KEYS = 64
QUICK_S = 0.5
"""A listing's next page is larger after one that took less."""
SMALLER = 4
"""Factor by which pages shrink when one has taken too long: a slow line may need longer for it than a call may take."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key in etcd."""

    key: str
    value: bytes
    mod_revision: int
    """Revision of the last change."""
    create_revision: int
    version: int
    """Number of changes since the creation."""
    lease_id: int
    """Lease of the key; 0: none."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys of a prefix at one revision. A watch from `revision + 1` misses nothing."""

    revision: int
    entries: tuple[KeyValue, ...]
    cluster_id: int = 0
    raft_term: int = 0
    """Raft term, which rises with every election, also over restarts: a lower one is another history."""


@dataclass(frozen=True, slots=True)
class EtcdStatus:
    """An etcd member's report about itself."""

    version: str
    database_bytes: int
    has_leader: bool
    is_leader: bool
    """True if the member leads the members."""
    revision: int
    is_full: bool
    """True if its database has reached its quota: it takes no change until somebody makes room."""


class EtcdClient:
    """One connection to etcd, for one event loop. Every method raises StoreUnreachableError when none answers in time.

    Reads are repeated until the deadline. Writes are sent once: see EtcdConnection.call.
    """

    def __init__(self, access: EtcdAccess) -> None:
        self._connection = EtcdConnection(access)
        self._page_keys = FIRST_PAGE_KEYS
        """Number of keys that come over this line in time."""

    @property
    def target(self) -> str:
        """Return the endpoints, for messages."""
        return self._connection.target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def ask_before_changes(self, why_not: Callable[[], Awaitable[str]]) -> None:
        """Make no change for which this returns a reason: the change raises it as a ConfigError."""
        self._connection.why_no_change = why_not

    async def has_users(self) -> bool:
        """Return whether etcd asks for users, so that a user's deletion shuts its holder out."""

        def log_in(channel: grpc.aio.Channel, timeout_s: float, _: Metadata) -> Awaitable[object]:
            # Its own question about this is for root alone. A login changes nothing, and etcd without users says so.
            request = etcd_pb2.AuthenticateRequest(name="nobody")
            answer: Awaitable[object] = AuthStub(channel).Authenticate(request, timeout=timeout_s)
            return answer

        try:
            await self._connection.call(log_in, is_repeatable=True)
        except StoreUnreachableError:
            raise
        except StoreError as error:
            return "authentication is not enabled" not in str(error)
        return True

    async def close(self) -> None:
        """Close the connection. Leases are not revoked: their owners revoke them."""
        await self._connection.close()

    # --- keys --------------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> KeyValue | None:
        """Return the key, or None if it does not exist."""
        reply = await self._range(etcd_pb2.RangeRequest(key=to_bytes(key)))
        return _key_value(reply.kvs[0]) if reply.kvs else None

    async def get_prefix(self, prefix: str, *, below: str = "", page_keys: int = PAGE_KEYS) -> Snapshot:
        """Return every key that begins with a prefix, sorted, at one revision for all pages.

        below: only keys that sort before it; empty: all. page_keys: at most, in one page.

        Raises CompactedError when that revision is compacted between two pages: ask again.
        """
        start, end = range_of(prefix, below)
        entries: list[KeyValue] = []
        revision = cluster_id = raft_term = 0
        is_slow = False
        while True:
            limit = min(self._page_keys, page_keys)
            began = time.monotonic()
            try:
                reply = await self._range(
                    etcd_pb2.RangeRequest(key=start, range_end=end, limit=limit, revision=revision)
                )
            except StoreUnreachableError:
                if not self._connection.is_up:
                    raise  # the page was not too large: etcd is away
                self._page_keys = max(limit // SMALLER, 1)
                if limit == 1 or not entries:
                    raise
                is_slow = True  # the keys before were smaller
                continue
            if not is_slow and time.monotonic() - began < QUICK_S:
                self._page_keys = min(2 * limit, PAGE_KEYS)
            if not revision:
                revision, cluster_id = reply.header.revision, reply.header.cluster_id
                raft_term = reply.header.raft_term
            entries += map(_key_value, reply.kvs)
            if not reply.more:
                return Snapshot(revision, tuple(entries), cluster_id, raft_term)
            start = reply.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Set a key; return the revision. Raises LeaseLostError when the lease is gone."""
        request = etcd_pb2.PutRequest(key=to_bytes(key), value=value, lease=lease_id)
        reply = await self._connection.unary(lambda channel: KVStub(channel).Put, request, is_repeatable=False)
        return int(reply.header.revision)

    async def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        request = delete_request(Delete(key))
        reply = await self._connection.unary(lambda channel: KVStub(channel).DeleteRange, request, is_repeatable=False)
        return int(reply.deleted) > 0

    async def transaction(self, compare: Iterable[Compare], changes: Iterable[Change]) -> int:
        """Make all changes in one revision, which is returned, if every comparison holds.

        Raises ConflictError when one does not hold (then nothing changes), LeaseLostError, and ValueError for a
        transaction that changes a key twice.
        """
        conditions = tuple(compare)
        request = transaction_request(conditions, tuple(changes))
        reply = await self._connection.unary(lambda channel: KVStub(channel).Txn, request, is_repeatable=False)
        if not reply.succeeded:
            raise ConflictError(", ".join(condition.key for condition in conditions), "changed by another process")
        return int(reply.header.revision)

    async def compact(self, revision: int) -> None:
        """Forget every revision before this one."""
        request = etcd_pb2.CompactionRequest(revision=revision, physical=True)
        await self._connection.unary(lambda channel: KVStub(channel).Compact, request, is_repeatable=False)

    # --- leases ------------------------------------------------------------------------------------------------------

    async def grant_lease(self, ttl_s: int, *, is_strict: bool = False) -> Lease:
        """Return a lease that is kept alive until it is revoked or lost. etcd may grant a longer one than requested.

        is_strict: it counts as lost when it was not renewed in time, although etcd may still know it.
        """
        request = etcd_pb2.LeaseGrantRequest(TTL=ttl_s)
        reply = await self._connection.unary(lambda channel: LeaseStub(channel).LeaseGrant, request, is_repeatable=True)
        return Lease(
            int(reply.ID),
            ttl_s=int(reply.TTL),
            is_strict=is_strict,
            renew=self.renew_lease,
            revoke=self.revoke_lease,
            target=self.target,
        )

    async def grant_passing_lease(self, ttl_s: int) -> int:
        """Return a lease that is never renewed: keys under its id vanish after `ttl_s` seconds."""
        request = etcd_pb2.LeaseGrantRequest(TTL=ttl_s)
        reply = await self._connection.unary(lambda channel: LeaseStub(channel).LeaseGrant, request, is_repeatable=True)
        return int(reply.ID)

    async def renew_lease(self, lease_id: int, *, timeout_s: float | None = None) -> int:
        """Renew a lease once; return the seconds granted. Raises LeaseLostError when etcd does not know the lease."""

        async def send(
            channel: grpc.aio.Channel, timeout_s: float, metadata: Metadata
        ) -> etcd_pb2.LeaseKeepAliveResponse:
            requests = [etcd_pb2.LeaseKeepAliveRequest(ID=lease_id)]
            call = LeaseStub(channel).LeaseKeepAlive(iter(requests), timeout=timeout_s, metadata=metadata)
            reply = await call.read()
            if not isinstance(reply, etcd_pb2.LeaseKeepAliveResponse):
                raise StoreError(self.target, "ended a keepalive without an answer")
            return reply

        reply = await self._connection.call(send, is_repeatable=True, timeout_s=timeout_s)
        if reply.TTL <= 0:
            raise LeaseLostError(self.target, f"lease {lease_id:x} has expired")
        return int(reply.TTL)

    async def revoke_lease(self, lease_id: int) -> None:
        """End any lease: its keys are deleted at once. A lease that is already gone is no error."""
        request = etcd_pb2.LeaseRevokeRequest(ID=lease_id)
        with suppress(LeaseLostError):
            await self._connection.unary(lambda channel: LeaseStub(channel).LeaseRevoke, request, is_repeatable=True)

    # --- watches and health ------------------------------------------------------------------------------------------

    def watch(self, prefix: str, *, from_revision: int, below: str = "") -> AsyncIterator[WatchBatch]:
        """Yield changes of a prefix from a revision on, without loss, until the connection breaks; see etcd.watch."""
        return watch(self._connection, prefix, below=below, from_revision=from_revision)

    async def status(self) -> EtcdStatus:
        """Return the member's report; also the cheapest way to find out whether any member answers."""
        reply = await self._connection.unary(
            lambda channel: MaintenanceStub(channel).Status, etcd_pb2.StatusRequest(), is_repeatable=True
        )
        return EtcdStatus(
            version=reply.version,
            database_bytes=int(reply.dbSize),
            has_leader=reply.leader != 0,
            is_leader=reply.leader == reply.header.member_id,
            revision=int(reply.header.revision),
            is_full=any("alarm:NOSPACE" in error for error in reply.errors),
        )

    async def _range(self, request: etcd_pb2.RangeRequest) -> etcd_pb2.RangeResponse:
        reply: etcd_pb2.RangeResponse = await self._connection.unary(
            lambda channel: KVStub(channel).Range, request, is_repeatable=True
        )
        return reply


def _key_value(message: etcd_pb2.KeyValue) -> KeyValue:
    return KeyValue(
        to_text(message.key),
        message.value,
        message.mod_revision,
        message.create_revision,
        message.version,
        message.lease,
    )
