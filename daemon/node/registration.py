"""A node's record in etcd and its lease, both kept true for the life of the daemon.

Level-triggered: whenever etcd's record differs from the right one, it is written again. A lost lease (etcd was away for
long, or another daemon revoked it) is followed by another one. The incarnation stays, because the process, its workers
and its files stay.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

import structlog

from headway.daemon.base.errors import ConflictError, InvariantLostError, LeaseLostError, StoreUnreachableError
from headway.daemon.cluster.client import EtcdClient, KeyValue
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import UnreadableRecordError, decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.lease import Lease
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.cluster.transaction import Compare, Put
from headway.daemon.decide.cluster_watch import ClusterWatch

log = structlog.get_logger()

Record = NodeRecord | LeaderRecord


async def leases_of(etcd: EtcdClient, node: str, incarnation: str) -> list[int]:
    """Return the leases of one incarnation of a daemon. An unreadable record names no daemon, and hides no other
    record.
    """
    found: list[int] = []
    places: tuple[tuple[str, type[Record]], ...] = ((Keys.node(node), NodeRecord), (Keys.LEADER, LeaderRecord))
    for key, kind in places:
        entry = await etcd.get(key)
        if entry is None or not entry.lease_id:
            continue
        try:
            record = decode(entry.value, kind)
        except UnreadableRecordError:
            continue
        if record.incarnation == incarnation:
            found.append(entry.lease_id)
    return found


NAME_POLL_S: Final = 0.2
RETRY_PAUSE_S: Final = 0.5
COPY: Final = "one of the two is a copy; invite it under a name of its own, and give it an empty state_dir"
RIVAL_PATIENCE_S: Final = 5.0
"""Time for a daemon that has the name, and answers, to leave: a machine that is set up anew may follow itself."""
JOIN_PATIENCE_S: Final = 30.0
"""Time for a busy etcd, as when many daemons start at once: each that gave up would begin anew, and make it busier."""


class Registration:
    """`join` once, then `run` until cancelled, then `leave`."""

    def __init__(
        self,
        record: NodeRecord,
        *,
        etcd: EtcdClient,
        cluster: ClusterWatch,
        ttl_s: int,
        predecessor: str,
        answers: Callable[[NodeRecord], Awaitable[bool]],
    ) -> None:
        """predecessor: the incarnation of the previous process with this state folder, or with the one that it is a
        copy of; empty for none. answers: whether another daemon of this name answers at its address.
        """
        self._record = record
        self._etcd = etcd
        self._cluster = cluster
        self._ttl_s = ttl_s
        self._predecessor = predecessor
        self._answers = answers
        self._asked: dict[str, bool] = {}
        """Whether each incarnation that held the name answered."""
        self._key = Keys.node(record.name)
        self._lease: Lease | None = None
        self._losing: asyncio.Task[None] | None = None
        self._written_at = 0
        """Revision of our last write."""
        self._written_lease_id = 0
        self._leaves = False
        """True if the drain mark is our own. Otherwise users set and remove it in etcd."""
        self._epoch = cluster.view.epoch
        self._due = asyncio.Event()

    @property
    def record(self) -> NodeRecord:
        """Return the record as it should be in etcd."""
        return self._record

    @property
    def lease_id(self) -> int:
        """Return the present lease of our records."""
        return self._lease.id if self._lease is not None else 0

    def change(self, **fields: Any) -> None:
        """Change fields of the record from now on."""
        self._record = replace(self._record, **fields)
        self._leaves |= bool(fields.get("is_draining"))
        self._due.set()

    def look_again(self) -> None:
        """Check that the record is still there, because the view has changed."""
        self._due.set()

    async def join(self) -> None:
        """Register for the first time. etcd has answered before this, so it is asked again for a while if it does not.

        Raises StoreUnreachableError, and InvariantLostError when another daemon has the name and keeps its lease alive.
        """
        until = time.monotonic() + JOIN_PATIENCE_S
        while True:
            try:
                if self._lease is None:
                    await self._take_lease()
                await self._write()
                break
            except (LeaseLostError, StoreUnreachableError) as error:
                if time.monotonic() > until:
                    raise
                log.warning("node_not_registered", reason=error.reason)
                if isinstance(error, LeaseLostError):
                    await self._drop_lease()
            await asyncio.sleep(RETRY_PAUSE_S * random.uniform(0.5, 1.5))
        log.info("node_registered", incarnation=self._record.incarnation, address=self._record.address)

    async def run(self) -> None:
        """Keep the record true. Raises InvariantLostError when another daemon has taken the name."""
        while True:
            try:
                await self._settle()
                await self._due.wait()
                self._due.clear()
            except LeaseLostError as error:
                log.warning("lease_lost", reason=error.reason)
                await self._drop_lease()
            except StoreUnreachableError as error:
                log.warning("node_not_registered", reason=error.reason)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def leave(self) -> None:
        """Revoke the lease: every record under it is gone at once."""
        await self._drop_lease()
        log.info("node_left", incarnation=self._record.incarnation)

    async def _settle(self) -> None:
        if self._lease is not None and self._lease.lost.is_set():
            raise LeaseLostError(self._key, self._lease.reason)
        if self._lease is None:
            await self._take_lease()
        if self._cluster.view.epoch != self._epoch:
            self._epoch, self._written_at = self._cluster.view.epoch, 0  # etcd has lost our write
        if not await self._cluster.caught_up(self._written_at, timeout_s=RETRY_PAUSE_S):
            self._due.set()  # our own write is on its way to the view
            return
        shown = self._cluster.view.nodes.get(self._record.name)
        if shown is not None and shown.incarnation == self._record.incarnation:
            self._record = replace(self._record, is_draining=self._leaves or shown.is_draining)
        if shown != self._record or self._written_lease_id != self.lease_id:
            await self._write()
            log.info("node_record_written", down_devices=self._record.down_devices, lease=f"{self.lease_id:x}")

    async def _write(self) -> None:
        began = time.monotonic()
        while True:
            found = await self._etcd.get(self._key)
            other, where = _holder(found) if found is not None else (None, "")
            is_garbage = found is not None and other is None and found.lease_id in (0, self.lease_id)
            is_other = other.incarnation != self._record.incarnation if other is not None else found is not None
            if found is not None and is_other and not is_garbage:
                is_rival = other is not None and await self._is_rival(other)
                is_ours = other is not None and other.incarnation == self._predecessor
                if is_ours and not is_rival and other is not None and other.host == self._record.host:
                    await self._bury_predecessor(found)
                elif time.monotonic() - began > self._patience_s(is_rival=is_rival, is_ours=is_ours):
                    await self._drop_lease()
                    what = f"a node of this name is in the cluster, {where}"
                    raise InvariantLostError(f"{what}: {COPY}" if is_rival else what, self._record.name)
                else:
                    await asyncio.sleep(NAME_POLL_S)
                continue
            if is_garbage:
                log.warning("own_record_replaced", key=self._key, reason=where)
            if other is not None:
                self._record = replace(self._record, is_draining=self._leaves or other.is_draining)
            condition = Compare.unchanged(self._key, found.mod_revision if found is not None else 0)
            put = Put(self._key, encode(self._record), self.lease_id)
            try:
                self._written_at = await self._etcd.transaction([condition], [put])
            except ConflictError:
                continue
            self._written_lease_id = self.lease_id
            return

    def _patience_s(self, *, is_rival: bool, is_ours: bool) -> float:
        """Return how long the name may be taken; by a process with this one's state folder, no time: that is a copy."""
        if is_rival:
            return 0.0 if is_ours else RIVAL_PATIENCE_S
        return 2 * self._ttl_s + 1

    async def _is_rival(self, other: NodeRecord) -> bool:
        """Return whether the holder of the name lives. At this daemon's own address nobody else can listen."""
        if other.address == self._record.address:
            return False
        if other.incarnation not in self._asked:
            self._asked[other.incarnation] = await self._answers(other)
        return self._asked[other.incarnation]

    async def _bury_predecessor(self, found: KeyValue) -> None:
        """Revoke the leases of our predecessor, which is dead: we hold its state folder's lock, and it was here."""
        for lease_id in await leases_of(self._etcd, self._record.name, self._predecessor):
            await self._etcd.revoke_lease(lease_id)
        if not found.lease_id:
            await self._etcd.delete(self._key)

    async def _take_lease(self) -> None:
        lease = self._lease = await self._etcd.grant_lease(self._ttl_s)

        async def wake() -> None:
            await lease.lost.wait()
            self._due.set()

        self._losing = asyncio.create_task(wake(), name="lease of the node")

    async def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if self._losing is not None:
            self._losing.cancel()
        if lease is not None:
            await lease.revoke()


def _holder(found: KeyValue) -> tuple[NodeRecord | None, str]:
    """Return the owner of a name, and its address; None: the record cannot be read, with the reason."""
    try:
        record = decode(found.value, NodeRecord)
    except ValueError as error:
        return None, f"and its record cannot be read: {error}"
    return record, f"at {record.address}"
