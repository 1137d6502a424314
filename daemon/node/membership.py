"""A node in the cluster for one incarnation: its lease, its record, its workers, its agent, its candidacy."""

import asyncio
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from headway.daemon.coordination.cluster_view import ClusterView
from headway.daemon.coordination.cluster_watch import ClusterWatch
from headway.daemon.coordination.coordinator import decide
from headway.daemon.coordination.leadership import Leadership
from headway.daemon.data.library import DataLibrary
from headway.daemon.errors import ConfigError, ConflictError, LeaseLostError, StoreUnreachableError
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.etcd.lease import Lease
from headway.daemon.etcd.transaction import Compare, Put
from headway.daemon.node.agent import Agent, Surroundings
from headway.daemon.node.agent_orders import is_awaited, is_named
from headway.daemon.node.config import NodeConfig
from headway.daemon.node.memory import NodeMemory
from headway.daemon.node.peer_client import NodeClient
from headway.daemon.records import Keys, LeaderRecord, NodeRecord, decode, encode
from headway.daemon.storage.checkpoint import resolve_checkpoint_dir, write_manifest
from headway.daemon.storage.state_store import StateStore
from headway.daemon.supervision.supervisor import Supervisor, WorkerSettings

log = structlog.get_logger()

NAME_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What outlives an incarnation."""

    config: NodeConfig
    record: NodeRecord
    """Of this node, but for incarnation and generations."""
    memory: NodeMemory
    etcd: EtcdClient
    cluster: ClusterWatch
    store: StateStore
    library: DataLibrary
    client: NodeClient
    runtime_dir: Path


class Membership:
    """Join once, run until something ends it, then leave or abandon."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._record = replace(
            house.record,
            incarnation=uuid.uuid4().hex,
            generations=dict(house.memory.generations),
            started_at=time.time(),
        )
        self._lease: Lease | None = None
        self._is_draining = False
        config = house.config
        self._leadership = Leadership(
            house.etcd,
            house.cluster,
            record=LeaderRecord(node=config.name, incarnation=self._record.incarnation),
            ttl_s=config.lease_ttl_s,
            decide=lambda view, *, now: decide(view, now=now, written_at=time.time()),
            write_manifest=self._write_manifest,
        )

    @property
    def incarnation(self) -> str:
        """A random id."""
        return self._record.incarnation

    async def join(self) -> None:
        """Register under a new lease.

        Raises StoreUnreachableError, and ConfigError when another daemon has the name and keeps its lease alive.
        """
        house = self._house
        self._lease = await house.etcd.grant_lease(house.config.lease_ttl_s)
        key = Keys.node(house.config.name)
        deadline = time.monotonic() + 2 * house.config.lease_ttl_s + 1
        while True:
            found = await house.etcd.get(key)
            revision = 0
            if found is not None:
                other = decode(found.value, NodeRecord)
                is_ours = other.incarnation == house.memory.last_incarnation
                revision = found.mod_revision if is_ours else -1
                if not is_ours and time.monotonic() > deadline:
                    await self._lease.revoke()
                    raise ConfigError(f"a node of this name is in the cluster, at {other.address}", house.config.name)
            if revision >= 0:
                try:
                    await self._put(Compare.unchanged(key, revision))
                    break
                except ConflictError:
                    continue
            await asyncio.sleep(NAME_POLL_S)
        house.memory.remember_incarnation(self.incarnation)
        log.info("node_registered", incarnation=self.incarnation, address=self._record.address)

    async def run(self) -> None:
        """Work until cancelled. Raises LeaseLostError when the lease is gone, and whatever else ends the daemon."""
        house, lease = self._house, self._lease
        assert lease is not None, "run follows join"
        agent = Agent(
            Surroundings(
                node=house.config.name,
                incarnation=self.incarnation,
                lease_id=lease.id,
                etcd=house.etcd,
                view=house.cluster.view,
                store=house.store,
                library=house.library,
                client=house.client,
                checkpoint_root=house.config.checkpoint_root,
            )
        )
        supervisor = Supervisor(self._record.devices, self._worker_settings(), agent)
        try:
            await supervisor.start()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_lease(lease), name="lease")
                group.create_task(self._follow_cluster(agent), name="cluster")
                group.create_task(agent.run(supervisor), name="agent")
                group.create_task(self._leadership.run(), name="leadership")
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            await asyncio.shield(supervisor.stop())

    async def drain(self) -> None:
        """Ask for plans without this node, and return when no plan names it or needs a file of its store.

        A leader stays until no plan of any job names a draining node: else nobody would end those jobs in good order.
        """
        self._is_draining = True
        cluster = self._house.cluster
        seen = cluster.version
        await self._renew_record()
        while self._is_needed(cluster.view):
            seen = await cluster.changed(seen)
        log.info("node_drained")

    async def leave(self) -> None:
        """Revoke the lease: every record under it is gone at once."""
        if self._lease is not None:
            await self._lease.revoke()
        log.info("node_left", incarnation=self.incarnation)

    def _is_needed(self, view: ClusterView) -> bool:
        own = view.nodes.get(self._record.name)
        if own is None or not own.is_draining:
            return True  # the coordinator may not have seen our wish yet
        if is_named(view, self._record.name, self.incarnation) or is_awaited(view, self._house.store.contents):
            return True
        draining = [node for node in view.nodes.values() if node.is_draining]
        return self._leadership.is_leading and any(is_named(view, node.name, node.incarnation) for node in draining)

    async def _watch_lease(self, lease: Lease) -> None:
        await lease.lost.wait()
        raise LeaseLostError(self._house.etcd.target, lease.reason)

    async def _follow_cluster(self, agent: Agent) -> None:
        """Wake the agent at every change; remember generations before anything is done about them."""
        cluster, memory = self._house.cluster, self._house.memory
        seen = -1
        while True:
            seen = await cluster.changed(seen)
            if memory.saw_generations(_generations(cluster.view)):
                try:
                    await self._renew_record()
                except StoreUnreachableError as error:
                    log.warning("generations_not_registered", error=str(error))
            agent.cluster_changed()

    async def _renew_record(self) -> None:
        """Write our record anew; a drain mark that somebody else has put on it stays."""
        key = Keys.node(self._record.name)
        while True:
            found = await self._house.etcd.get(key)
            if found is not None:
                other = decode(found.value, NodeRecord)
                self._is_draining |= other.incarnation == self.incarnation and other.is_draining
            self._record = replace(
                self._record, is_draining=self._is_draining, generations=dict(self._house.memory.generations)
            )
            try:
                return await self._put(Compare.unchanged(key, found.mod_revision if found is not None else 0))
            except ConflictError:
                continue

    async def _put(self, *conditions: Compare) -> None:
        assert self._lease is not None
        put = Put(Keys.node(self._record.name), encode(self._record), self._lease.id)
        await self._house.etcd.transaction(conditions, [put])

    def _write_manifest(self, url: str, manifest: bytes) -> None:
        write_manifest(resolve_checkpoint_dir(url, self._house.config.checkpoint_root), manifest)

    def _worker_settings(self) -> WorkerSettings:
        config = self._house.config
        return WorkerSettings(
            node=config.name,
            host=self._record.host,
            certificates=config.certificates,
            runtime_dir=self._house.runtime_dir,
            output_dir=config.state_dir / "workers",
            logs_dir=config.logs_dir,
            history_dir=config.history_dir,
        )


def _generations(view: ClusterView) -> dict[str, int]:
    return {
        job.name: max(job.phase.generation, *(plan.generation for plan in (job.plan, job.next) if plan is not None), 0)
        for job in view.jobs.values()
    }


def _first(errors: BaseExceptionGroup) -> BaseException:
    """What ended the membership: a lost lease explains the rest."""
    leaves: list[BaseException] = []
    for error in errors.exceptions:
        leaves.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((leaf for leaf in leaves if isinstance(leaf, LeaseLostError)), leaves[0])
