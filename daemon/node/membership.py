"""A node in the cluster: its registration, its workers, its agent, its candidacy for leader, its peers."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.agent.agent import Agent, Surroundings
from headway.daemon.agent.local_state import generations_ahead, generations_seen
from headway.daemon.agent.probing import Probing
from headway.daemon.agent.profiling import DeviceSpeeds
from headway.daemon.agent.steps_due import is_awaited, is_named
from headway.daemon.agent.sweeps import sweep_daily
from headway.daemon.base.activities import Activities
from headway.daemon.base.addresses import join_address, split_address
from headway.daemon.base.errors import (
    ConfigError,
    InvariantLostError,
    RecoveryError,
    StorageAwayError,
    shortened,
)
from headway.daemon.base.fault_points import fault_point
from headway.daemon.blobs.checkpoint import (
    resolve_checkpoint_dir,
)
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.records import ANY_NEWER, IDENTITY, VANISHED, NodeRecord, job_ailment, newer_ailment
from headway.daemon.decide.boundaries import depends_on
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch, Member
from headway.daemon.decide.coordinator import decide
from headway.daemon.decide.plans import PlanCache
from headway.daemon.decide.retirement import VanishedJobs, vanished_text
from headway.daemon.leader.leadership import CheckpointFolders, JobTroubles, Leadership
from headway.daemon.leader.sweeps import CheckpointSweep, JobRetirement
from headway.daemon.net.rate_limit import OutgoingTransfers
from headway.daemon.net.reach_dial import dial
from headway.daemon.net.reaching import Reaching, dial_ports
from headway.daemon.node.config import listen_address
from headway.daemon.node.memory import NodeMemory
from headway.daemon.node.own_host import AddressWatch, address_towards
from headway.daemon.node.peer_liveness import ACTIVITY as PEER_LIVENESS
from headway.daemon.node.peer_liveness import PeerLiveness
from headway.daemon.node.registration import COPY, Registration
from headway.daemon.node.settings import NodeConfig
from headway.daemon.worker.process import WorkerOptions
from headway.daemon.worker.roster import WorkerSettings
from headway.daemon.worker.supervisor import Supervisor
from headway.proto.control_pb2 import DialledPort, RecentOperations
from headway.stages.errors import PeerError, UnavailableError
from headway.stages.sockets.tls_identity import Identity

log = structlog.get_logger()

STATE_DIR_RETRY_S: Final = 2.0
STATE_DIR_SILENCE_S: Final = 10.0
"""Time for the state folder's file system to answer: a disk that is busy with a checkpoint may take seconds."""
LOCK_CHECK_S: Final = 10.0
STORE_CHECK_S: Final = 10.0
RIVAL_TOLD_S: Final = 600.0
RIVAL_ANSWER_S: Final = 3.0
VANISHED_CHECK_S: Final = 0.5
MOST_NEWER_JOBS: Final = 32
"""Maximum number of jobs of a newer release that this node's record names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of a daemon, made once when it starts; they outlive an incarnation."""

    config: NodeConfig
    record: NodeRecord
    """Record of this node, without incarnation and generations."""
    memory: NodeMemory
    etcd: EtcdClient
    cluster: ClusterWatch
    store: StateStore
    library: DataLibrary
    client: NodeClient
    identity: Identity
    outgoing: OutgoingTransfers
    activities: Activities
    """Owner of all activities of this daemon."""
    runtime_dir: Path
    inner_port: str = ""
    """Where this machine finds its one port, if a router maps another one to it."""


class Membership:
    """Join once, run until something ends it, then leave."""

    def __init__(self, services: Services) -> None:
        self._services = services
        config = services.config
        record = replace(
            services.record,
            incarnation=uuid.uuid4().hex,
            generations=dict(services.memory.generations),
            started_at=time.time(),
        )
        self._speeds = DeviceSpeeds(config.state_dir, arithmetic_class=record.arithmetic_class)
        record = replace(record, devices=self._speeds.of(record.devices))
        self._registration = Registration(
            record,
            etcd=services.etcd,
            cluster=services.cluster,
            ttl_s=config.lease_ttl_s,
            predecessor=services.memory.last_incarnation,
            answers=self._answers,
        )
        self._member = Member(
            node=config.name,
            incarnation=record.incarnation,
            etcd=services.etcd,
            cluster=services.cluster,
            lease_id=lambda: self._registration.lease_id,
        )
        self._supervisor: Supervisor | None = None
        self._reaching: Reaching | None = None
        self._state_folder = FileThreads("state folder", num_at_once=1, silence_s=STATE_DIR_SILENCE_S, most_hung=1)
        self._troubles: dict[str, str] = {}
        """Reasons that keep this node out of plans, by subject."""
        self._checkpoint_sweep = CheckpointSweep(
            services.cluster.view,
            is_leading=lambda: self._leadership.is_leading,
            checkpoint_root=config.checkpoint_root,
        )
        self._retirement = JobRetirement(
            services.etcd,
            services.cluster.view,
            is_leading=lambda: self._leadership.is_leading,
            most=config.ended_jobs_kept,
        )
        self._leadership = self._candidate(record.incarnation)
        services.cluster.leads = lambda: self._leadership.is_leading

    def _candidate(self, incarnation: str) -> Leadership:
        services, config, plans = self._services, self._services.config, PlanCache()
        return Leadership(
            services.etcd,
            services.cluster,
            record=LeaderRecord(node=config.name, incarnation=incarnation, quarantine_after=config.quarantine_after),
            ttl_s=config.lease_ttl_s,
            decide=lambda view, *, now: decide(
                view,
                now=now,
                written_at=time.time(),
                quarantine_after=config.quarantine_after,
                plans=plans,
            ),
            plans=plans,
            troubles=JobTroubles(tell=lambda job, reason: services.activities.trouble(job_ailment(job), reason)),
            folders=CheckpointFolders(config.checkpoint_root, wrote_late=self._checkpoint_sweep.wrote_late),
        )

    @property
    def incarnation(self) -> str:
        """Return a random id of this process."""
        return self._registration.record.incarnation

    @property
    def num_devices(self) -> int:
        """Return the number of devices; each has one worker."""
        return len(self._registration.record.devices)

    async def join(self) -> None:
        """Register under a new lease.

        Raises StoreUnreachableError, and InvariantLostError when another daemon has the name and keeps its lease alive.
        """
        await self._registration.join()
        self._services.activities.on_change = self._tell_ailments
        # If it is not remembered, the next daemon of this node waits only for our lease to end.
        if trouble := await self._use_state_folder(
            lambda: self._services.memory.remember_incarnation(self.incarnation)
        ):
            log.warning("incarnation_not_remembered", reason=trouble)
        self._tell_ailments()
        fault_point("membership.joined", node=self._services.config.name)

    async def run(self) -> None:
        """Work until cancelled. Raises InvariantLostError: no other error of an activity ends the daemon."""
        services, registration, activities = self._services, self._registration, self._services.activities
        client, member = services.client, self._member
        reaching = Reaching(member, lambda target: dial(target, services.identity, source=member.node))
        self._reaching, client.unanswered = reaching, reaching.doubt
        agent = self._make_agent(reaching)
        settings = self._worker_settings()
        self._supervisor = supervisor = Supervisor(
            registration.record.devices,
            settings,
            agent,
            # Plans are made from the record, so it must follow each start and death of a worker.
            on_change=lambda: registration.change(
                down_devices=supervisor.down_devices,
                workers=supervisor.worker_ports,
                worker_trouble=shortened(supervisor.trouble),
            ),
            activities=activities,
        )
        try:
            await activities.run(
                {
                    "workers": supervisor.run,
                    "registration": registration.run,
                    "cluster": lambda: self._follow_cluster(agent),
                    "generations": lambda: self._follow_generations(agent),
                    "state folder lock": self._keep_state_dir,
                    "layer store": self._keep_store,
                    "vanished jobs": self._watch_jobs,
                    **agent.activities(supervisor),
                    "leadership": self._leadership.run,
                    PEER_LIVENESS: PeerLiveness(member, client, activities).run,
                    "probing": Probing(member, client).run,
                    "reaching": reaching.run,
                    "address": self._address_watch(supervisor).run,
                    "device speeds": lambda: self._follow_speeds(supervisor),
                    "checkpoint sweep": self._checkpoint_sweep.run,
                    "job retirement": self._retirement.run,
                    "sweeps": lambda: sweep_daily(
                        services.cluster.view,
                        code=settings.code_dir,
                        logs=settings.logs_dir,
                        data=services.config.data_cache_dir,
                    ),
                }
            )
        finally:
            # Shielded, because a cancelled stop would leave worker processes behind.
            await asyncio.shield(supervisor.stop())

    def _make_agent(self, reaching: Reaching) -> Agent:
        services = self._services
        return Agent(
            Surroundings(
                member=self._member,
                store=services.store,
                library=services.library,
                client=services.client,
                checkpoint_root=services.config.checkpoint_root,
                outgoing=services.outgoing,
                reach=reaching,
                activities=services.activities,
                wrote_late=self._checkpoint_sweep.wrote_late,
                remembered=lambda: services.memory.generations,
                allow_plugins=services.config.allow_plugins,
            )
        )

    async def recent_operations(self, device_index: int) -> RecentOperations:
        """Return the last operations of a device's worker. Raises UnavailableError."""
        if self._supervisor is None:
            raise UnavailableError(f"node {self._services.config.name}", "has no workers yet")
        return await self._supervisor.recent_operations(device_index)

    async def dial_peers(self, nodes: Sequence[str]) -> list[DialledPort]:
        """Return which registered ports of some nodes this node reaches. Raises UnavailableError."""
        if self._reaching is None:
            raise UnavailableError(f"node {self._services.config.name}", "does not dial yet")
        return await dial_ports(self._services.cluster.view, self._services.config.name, nodes, self._reaching.prove)

    def announce(self, address: str) -> None:
        """Let others dial this node and its workers elsewhere from now on; links that stand are left alone."""
        self._registration.change(address=address)
        if self._supervisor is not None:
            self._supervisor.announce(address)

    def met_rival(self, address: str) -> None:
        """Tell for RIVAL_TOLD_S that another daemon shows this node's certificate. It is refused, and asks again."""
        trouble = f"another daemon, at {address}, has this node's certificate: {COPY}"
        self._services.activities.trouble(IDENTITY, trouble)
        asyncio.get_running_loop().call_later(RIVAL_TOLD_S, self._services.activities.trouble, IDENTITY, "")

    async def _answers(self, other: NodeRecord) -> bool:
        """Return whether a daemon with this node's name answers; it hears of this one."""
        client, own = self._services.client, self._services.record.address
        with suppress(PeerError):
            reply = await client.describe(other.endpoint, rival=own, timeout_s=RIVAL_ANSWER_S)
            return reply.incarnation == other.incarnation
        return False

    def stands_by_nowhere(self, why: str) -> None:
        """Let plans leave this node out while nobody can reach it through a relay; an empty reason ends that."""
        self._stay_out("relay", why)

    async def drain(self) -> None:
        """Ask for plans without this node; return when no plan names it, or needs a file that only it has.

        A leader stays until no plan of any job names a draining node: otherwise nobody would end those jobs properly.
        While etcd is away this waits, until cancelled.
        """
        self._registration.change(is_draining=True)
        cluster = self._services.cluster
        seen = cluster.version
        while self._is_needed(cluster.view):
            seen = await cluster.changed(seen)
        log.info("node_drained")

    async def leave(self) -> None:
        """Revoke the lease: every record under it is gone at once."""
        await self._registration.leave()

    def _is_needed(self, view: ClusterView) -> bool:
        name = self._services.config.name
        own = view.nodes.get(name)
        if own is None or not own.is_draining:
            return True  # the coordinator may not have seen our request yet
        if is_named(view, name, self.incarnation) or is_awaited(view, self._services.store.contents):
            return True
        if any(depends_on(job, view.nodes, name) for job in view.jobs.values()):
            return True
        draining = [node for node in view.nodes.values() if node.is_draining]
        return self._leadership.is_leading and any(is_named(view, node.name, node.incarnation) for node in draining)

    async def _follow_cluster(self, agent: Agent) -> None:
        """Wake the agent at every change."""
        cluster, seen = self._services.cluster, -1
        while True:
            seen = await cluster.changed(seen)
            self._registration.look_again()
            agent.cluster_changed()

    async def _follow_generations(self, agent: Agent) -> None:
        """Remember the generation of each plan, and wake the agent: it takes no step for one that is not remembered."""
        cluster, memory, seen, is_remembered = self._services.cluster, self._services.memory, -1, True
        known = memory.generations
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if is_remembered else STATE_DIR_RETRY_S):
                    seen = await cluster.changed(seen)
            is_remembered = await self._remember_generations()
            if memory.generations is not known:
                known = memory.generations
                agent.cluster_changed()

    async def _remember_generations(self) -> bool:
        """Remember generations; return whether they are written down.

        A node that cannot write them ignores newer plans, and asks to be left out of them.
        """
        memory = self._services.memory
        seen, trouble = generations_seen(self._services.cluster.view), ""
        if not memory.knows(seen):
            trouble = await self._use_state_folder(lambda: memory.saw_generations(seen))
        ahead = generations_ahead(memory.generations, self._services.cluster.view)
        if ahead != self._registration.record.generations:
            self._registration.change(generations=ahead)
        self._stay_out("state folder", trouble)
        return not trouble

    def _address_watch(self, supervisor: Supervisor) -> AddressWatch:
        config, registration = self._services.config, self._registration
        listens_at, _ = listen_address(config)

        def moved(host: str) -> None:
            record = registration.record
            if config.relay:
                return
            _, port = split_address(record.address, "address")
            if record.address != join_address(record.host, port):
                return  # a router's address is announced, and workers listen at none
            registration.change(host=host, address=join_address(host, port))
            supervisor.move(host)

        return AddressWatch(
            registration.record.host,
            may_move=listens_at in ("", "0.0.0.0", "::"),
            towards_etcd=lambda: address_towards(config.etcd),
            moved=moved,
            tell=lambda trouble: self._stay_out("address", trouble),
        )

    def _stay_out(self, what: str, trouble: str) -> None:
        """Say a fault, and let plans leave this node out while it has it; an empty reason ends that."""
        self._services.activities.trouble(what, trouble)
        self._troubles[what] = trouble
        reasons = dict.fromkeys(reason for _, reason in sorted(self._troubles.items()) if reason)
        stays_out = shortened("; ".join(reasons))
        if stays_out != self._registration.record.stays_out:
            self._registration.change(stays_out=stays_out)

    async def _keep_state_dir(self) -> None:
        """Check that the state folder is still this daemon's own. Raises InvariantLostError."""
        while True:
            await asyncio.sleep(LOCK_CHECK_S)
            trouble = await self._use_state_folder(self._services.memory.check_lock)
            self._stay_out("state folder lock", trouble)

    async def _keep_store(self) -> None:
        """Ask for plans without this node while the disk of its layer files hangs, or takes no files."""
        store = self._services.store
        while True:
            await asyncio.sleep(STORE_CHECK_S)
            trouble = ""
            try:
                await store.check()
            except StorageAwayError:
                trouble = f"store_dir {store.directory} cannot be written: its file system does not answer"
            except RecoveryError as error:
                trouble = f"store_dir {store.directory} cannot be written: {error.reason}"
            self._stay_out("layer store", trouble)
            self._services.activities.trouble("state files", store.damage)
            self._services.activities.trouble("token shards", self._services.library.decay)

    async def _watch_jobs(self) -> None:
        """Say of each job of this node that etcd has lost, though nobody removed it, how it comes back. Say which jobs
        are of a newer release: their plans leave this node out.
        """
        jobs, view, said = VanishedJobs(self._services.config.name), self._services.cluster.view, set[str]()
        while True:
            await asyncio.sleep(VANISHED_CHECK_S)
            found = {newer_ailment(name): why for name, why in islice(view.newer_jobs(), MOST_NEWER_JOBS + 1)}
            if len(found) > MOST_NEWER_JOBS:
                found = {ANY_NEWER: f"a newer release wrote more than {MOST_NEWER_JOBS} jobs; upgrade this machine"}
            for name, job in jobs.look(view).items():
                url = job.checkpoint.url if job.checkpoint is not None else ""
                with suppress(ConfigError):
                    url = resolve_checkpoint_dir(url, self._services.config.checkpoint_root)
                found[f"{VANISHED}{name}"] = vanished_text(job, url)
            for ailment in said | found.keys():
                self._services.activities.trouble(ailment, found.get(ailment, ""))
            said = set(found)

    async def _use_state_folder(self, act: Callable[[], object]) -> str:
        """Read or write in the state folder; return why that is not possible. Raises InvariantLostError.

        In a thread, because a disk may be busy for longer than a lease lasts, or answer never.
        """
        folder = str(self._services.config.state_dir)
        try:
            await self._state_folder.run(folder, lambda _: act())
        except StorageAwayError:  # without its seconds, which would change the node's record again and again
            return f"state_dir {folder} cannot be written: its file system does not answer"
        except RecoveryError as error:
            if isinstance(error.__cause__, InvariantLostError):
                raise error.__cause__ from error
            return f"state_dir {folder} cannot be written: {error.reason}"
        return ""

    def _tell_ailments(self) -> None:
        """Write ailments to the node's record, so that `nodes` and `status` show them."""
        ailments = self._services.activities.ailments
        if ailments != self._registration.record.ailments:
            self._registration.change(ailments=ailments)

    async def _follow_speeds(self, supervisor: Supervisor) -> None:
        devices = self._registration.record.devices
        await self._speeds.follow(
            devices, lambda: supervisor.heartbeats, lambda known: self._registration.change(devices=known)
        )

    def _worker_settings(self) -> WorkerSettings:
        config = self._services.config
        return WorkerSettings(
            options=WorkerOptions(
                socket_path=str(self._services.runtime_dir / "workers.sock"),
                node=config.name,
                host=self._registration.record.host,
                ports=config.worker_ports,
                shared_port=self._registration.record.address if config.one_port else "",
                inner_port=self._services.inner_port,
                certificates=str(config.certificates),
                renewals=str(config.renewals_dir),
                history_dir=str(config.history_dir or ""),
            ),
            output_dir=config.state_dir / "workers",
            logs_dir=config.logs_dir,
            num_spares=config.num_spares,
            is_to_be_measured=lambda device: not self._speeds.knows(device),
        )
