"""Keeps a ClusterView current: lists what is in etcd, then follows every change, through outages and compactions."""

import asyncio
import random
import time
from collections.abc import Callable

import structlog

from headway.daemon.coordination.cluster_view import ClusterView
from headway.daemon.errors import CompactedError, StoreUnreachableError
from headway.daemon.etcd.client import EtcdClient, Snapshot
from headway.daemon.etcd.watch import WatchBatch
from headway.daemon.records import PREFIX

RETRY_PAUSE_S = 0.5
AUDIT_PERIOD_S = 60.0

_log = structlog.get_logger()


class ClusterWatch:
    """The one owner of a view: `run` applies changes, everybody else reads `view` and waits on `changed`."""

    def __init__(
        self,
        client: EtcdClient,
        *,
        view: ClusterView | None = None,
        clock: Callable[[], float] = time.monotonic,
        audit_period_s: float = AUDIT_PERIOD_S,
    ) -> None:
        self.view = view if view is not None else ClusterView()
        self.revision = 0
        """The view holds every change up to this revision; 0: nothing was listed yet."""
        self.version = 0
        """Rises whenever the view or `is_reachable` changes; for `changed`."""
        self.is_reachable = False
        self.reachable_since = clock()
        """When `is_reachable` took its present value, by the clock."""
        self.unreachable_reason = "not asked yet"
        self._client = client
        self._clock = clock
        self._audit_period_s = audit_period_s
        self._signal = asyncio.Event()

    async def run(self) -> None:
        """Follow etcd until cancelled. An etcd that is away is waited for.

        Raises StoreError when etcd refuses this client, by name or certificate: that does not pass by waiting.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(), name="follow etcd")
                group.create_task(self._audit(), name="audit the view")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def changed(self, seen: int) -> int:
        """Return the version when it is no longer `seen`. Many changes may be behind one return; none is missed."""
        while self.version == seen:
            await self._signal.wait()
        return self.version

    async def caught_up(self, revision: int, *, timeout_s: float) -> bool:
        """Return True when the view holds every change up to a revision, False when it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.revision < revision:
                    await self._signal.wait()
        except TimeoutError:
            return False
        return True

    async def _follow(self) -> None:
        while True:
            listed = await self._list()
            self._take_listing(listed, known_revision=listed.revision)
            self.revision = max(self.revision, listed.revision)
            self._bump()
            try:
                changes = self._client.watch(PREFIX, from_revision=listed.revision + 1, on_reachable=self._reached)
                async for batch in changes:
                    self._take_batch(batch)
            except CompactedError as error:
                _log.warning("watch_compacted", reason=error.reason)

    async def _audit(self) -> None:
        """Now and then, list again and compare: etcd's watches have lost events in some releases."""
        while True:
            await asyncio.sleep(self._audit_period_s * random.uniform(0.9, 1.1))
            seen_revision = self.revision
            listed = await self._list()
            missed = [
                entry.key
                for entry in listed.entries
                if self.view.revision_of(entry.key) < entry.mod_revision <= seen_revision
            ]
            if missed:
                _log.error("watch_missed_changes", keys=missed[:10], num_keys=len(missed), revision=seen_revision)
            self._take_listing(listed, known_revision=seen_revision)
            self._bump()

    async def _list(self) -> Snapshot:
        while True:
            try:
                listed = await self._client.get_prefix(PREFIX)
                self._reached(True, "")
                return listed
            except StoreUnreachableError as error:
                self._reached(False, error.reason)
            except CompactedError as error:
                _log.info("listing_compacted", reason=error.reason)
            await asyncio.sleep(RETRY_PAUSE_S * random.uniform(0.5, 1.5))

    def _take_listing(self, listed: Snapshot, *, known_revision: int) -> None:
        """known_revision: changes up to here cannot arrive a second time."""
        now = self._clock()
        for entry in listed.entries:
            self.view.apply(
                entry.key, entry.value, mod_revision=entry.mod_revision, create_revision=entry.create_revision, now=now
            )
        present = {entry.key for entry in listed.entries}
        gone = [key for key, at in self.view.revisions.items() if key not in present and at <= listed.revision]
        for key in gone:
            self.view.apply(key, None, mod_revision=listed.revision, create_revision=0, now=now)
        self.view.forget_deleted(below=min(known_revision, listed.revision))

    def _take_batch(self, batch: WatchBatch) -> None:
        now = self._clock()
        for event in batch.events:
            self.view.apply(
                event.key, event.value, mod_revision=event.mod_revision, create_revision=event.create_revision, now=now
            )
        self.revision = max(self.revision, batch.revision)
        self._bump()

    def _reached(self, is_reachable: bool, reason: str) -> None:
        self.unreachable_reason = reason
        if is_reachable is self.is_reachable:
            return
        self.is_reachable = is_reachable
        self.reachable_since = self._clock()
        if is_reachable:
            _log.info("etcd_reached", etcd=self._client.target)
        else:
            _log.warning("etcd_lost", etcd=self._client.target, reason=reason)
        self._bump()

    def _bump(self) -> None:
        self.version += 1
        signal, self._signal = self._signal, asyncio.Event()
        signal.set()
