"""Faults that last: each coroutine takes a resource from a local cluster for some seconds and returns it."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from headway.daemon.chaos.connections import Parting
from headway.daemon.chaos.full_disk import FullDisk
from headway.daemon.chaos.healer import Healer
from headway.daemon.chaos.idle_connections import IdleConnections
from headway.daemon.chaos.storage_away import StorageAway
from headway.daemon.chaos.targets import LocalTargets
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.errors import StoreError

AGAIN_S: Final = 0.5
"""Interval at which a node's processes are listed, so that new workers are affected too."""
ETCD_TIMEOUT_S: Final = 10.0


class Outages:
    """The outages of one cluster. Cancelling a coroutine ends its outage."""

    def __init__(
        self,
        session: ClusterSession,
        targets: LocalTargets,
        healer: Healer,
    ) -> None:
        self._session = session
        self._targets = targets
        self._healer = healer
        self._storages: dict[Path, StorageAway] = {}
        """Every folder that was ever out of reach. Overlapping faults are one outage."""

    async def parted(self, node: str, seconds: float) -> None:
        """Cut a node off: destroy its processes' connections as soon as they open."""
        with Parting() as parting:
            async for _ in self._looks(seconds):
                parting.pids = await asyncio.to_thread(self._pids_of, node)

    async def unreachable(self, one: str, other: str, seconds: float) -> None:
        """Cut two nodes off from each other; each still reaches all other nodes, and etcd."""
        with Parting() as parting:
            async for _ in self._looks(seconds):
                parting.others = await asyncio.to_thread(self._pids_of, other)
                parting.pids = await asyncio.to_thread(self._pids_of, one)

    async def full_disk(self, node: str, seconds: float) -> None:
        """Let no file of a node's processes grow."""
        disk = FullDisk(self._healer)
        try:
            async for _ in self._looks(seconds):
                disk.spread(await asyncio.to_thread(self._pids_of, node))
        finally:
            disk.end(self._pids_of(node))

    async def storage_away(self, folder: Path, seconds: float) -> None:
        """Put the checkpoint folder out of reach until the last overlapping fault ends."""
        storage = self._storages.setdefault(folder, StorageAway(folder, self._healer))
        try:
            storage.take()
            await asyncio.sleep(seconds)
        finally:
            storage.bring_back()

    async def idle_connections(self, address: str, seconds: float) -> None:
        """Fill a daemon's port with connections that send nothing."""
        host, _, port = address.rpartition(":")
        async with IdleConnections(host.strip("[]"), int(port)):
            await asyncio.sleep(seconds)

    async def poisoned(self, key: str, value: bytes, prefix: str, seconds: float) -> None:
        """Put an invalid record into etcd. prefix: of all keys that follow from it."""
        client = self._session.client
        try:
            async with asyncio.timeout(ETCD_TIMEOUT_S):
                await client.put(key, value)
            await asyncio.sleep(seconds)
        except (StoreError, TimeoutError):
            return  # etcd is unreachable
        finally:
            await asyncio.shield(self._cleared(prefix))

    async def _cleared(self, prefix: str) -> None:
        """Delete the invalid record once etcd answers."""
        deadline = time.monotonic() + 6 * ETCD_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                async with asyncio.timeout(ETCD_TIMEOUT_S):
                    await self._session.client.delete_prefix(prefix)
            except (StoreError, TimeoutError):
                await asyncio.sleep(AGAIN_S)
            else:
                return

    async def _looks(self, seconds: float) -> AsyncIterator[None]:
        """Yield now, and again after each interval until the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            yield
            await asyncio.sleep(min(AGAIN_S, max(0.0, deadline - time.monotonic())))

    def _pids_of(self, node: str) -> tuple[int, ...]:
        """Return the processes of a node's daemon and workers; a new worker is included a moment after its start."""
        daemon = self._targets.daemons().get(node)
        return (daemon.pid, *(worker.pid for worker in self._targets.workers(node))) if daemon is not None else ()
