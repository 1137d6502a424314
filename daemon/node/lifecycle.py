"""The daemon's life on one screen: run, start up, serve, shut down.

SIGTERM and SIGINT ask it to leave cleanly: exit status 0, so that systemd sees a successful stop. A second signal
forces the end: the workers are killed, and the signal is raised again, so that the exit status is true.
"""

import asyncio
import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio
import structlog

from headway.daemon.base.activities import Activities
from headway.daemon.base.addresses import NodeEndpoint, join_address, split_address
from headway.daemon.base.allowed_places import AllowedPlaces
from headway.daemon.base.errors import ConfigError, InvariantLostError, StoreError
from headway.daemon.base.fault_points import arm
from headway.daemon.base.file_system import allow_only
from headway.daemon.base.logging import configure_logs
from headway.daemon.base.machine_share import memory_bytes
from headway.daemon.base.own_process import keep_what_stays
from headway.daemon.base.owned_folders import OwnedFolder, remove_ownerless
from headway.daemon.blobs import file_threads as answering_folder
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.binary import remark
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch, log_plans
from headway.daemon.net.certificates import (
    CertificateAuthority,
    certificate_ends,
    fingerprint,
    names_in,
    own_names,
    read_certificate,
)
from headway.daemon.net.join_port import JoinPort
from headway.daemon.net.port_process import PortProcess
from headway.daemon.net.rate_limit import OutgoingTransfers
from headway.daemon.net.renewals import Renewals
from headway.daemon.net.signer import Signer, open_authority
from headway.daemon.node.config import advertised_host, check_worker_ports, listen_address
from headway.daemon.node.hardware import class_of, find_devices
from headway.daemon.node.identity import read_identity
from headway.daemon.node.membership import Membership, Services
from headway.daemon.node.memory import NodeMemory
from headway.daemon.node.notify import Notifier
from headway.daemon.node.own_host import check_advertised_host, mapped_address
from headway.daemon.node.preemption import PreemptionWatch, leave_within_s
from headway.daemon.node.relays import StandingBy, read_relays
from headway.daemon.node.revocations import Revocations
from headway.daemon.node.service import NodeDesk, add_node_service
from headway.daemon.node.settings import NodeConfig
from headway.daemon.node.stream_limits import StreamLimits, bind_node_service
from headway.stages.sockets.open_files import raise_open_file_limit
from headway.stages.sockets.shared_port import dial_within
from headway.stages.sockets.tls_identity import CERTIFICATE_FILE, RenewableIdentity
from headway.stages.stage.allocator import keep_freed_memory

log = structlog.get_logger()

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SERVICE_GRACE_S = 1.0
END_TIMEOUT_S = 30.0
"""Time for workers to quit and leases to be given back, once no plan needs this node."""
MAX_RUNTIME_DIR_BYTES = 80
"""Maximum length of the folder's path: a unix socket's whole path has room for 107 bytes."""
KEPT_BYTES = 64 << 20
"""Maximum freed memory kept at the end of a daemon's heap, because the next piece of a file needs as much again."""


def run(config: NodeConfig) -> int:
    """Serve until told to stop; return 0. Raises ConfigError and StoreError when it cannot start."""
    arm()
    raise_open_file_limit()
    keep_freed_memory(most_bytes=KEPT_BYTES, growth_bytes=None)
    try:
        configure_logs(config.log_level, config.log_format, node=config.name, history=config.history_dir)
    except OSError as error:
        raise ConfigError(f"cannot be used as history_dir: {error.strerror}", str(config.history_dir)) from error
    forced_by = asyncio.run(Daemon(config).run())
    if forced_by is not None:
        signal.signal(forced_by, signal.SIG_DFL)
        signal.raise_signal(forced_by)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """What a daemon has of its machine, before anybody hears of it."""

    identity: RenewableIdentity
    password: str
    """Of etcd's user; empty without one."""
    devices: tuple[Device, ...]
    authority: CertificateAuthority | None
    memory: NodeMemory
    store: StateStore
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    """The port at which a daemon will answer."""

    server: grpc.aio.Server
    limits: StreamLimits
    front: PortProcess | None
    """Serves the one port; None: the daemon listens itself."""
    number: int
    announced: str
    """The address that others dial; empty: that of this machine."""


_Keep = Callable[[str, Callable[[], Awaitable[None]]], "asyncio.Task[None]"]
"""Runs an activity by name until the daemon ends."""


class Daemon:
    """The daemon of one node. `run` once."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._signals: list[signal.Signals] = []
        self._stop, self._force, self._overdue = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._stop_timeout_s = config.stop_timeout_s
        self._notifier = Notifier()
        self._refused: BaseException | None = None
        """Why this daemon had to end, if etcd refused it or its certificate was revoked."""
        self._runtime_dir = Path()

    async def run(self) -> signal.Signals | None:
        """Run the whole life. Return the signal that forced the end, or None after a clean one."""
        async with AsyncExitStack() as stack:
            stack.enter_context(self._notifier)
            membership, desk = await self._start_up(stack)
            keep_what_stays()
            working = await self._serve(membership)
            await self._shut_down(membership, working, desk)
            if self._refused is not None:
                raise self._refused
        return self._signals[1] if self._force.is_set() else None

    async def _start_up(self, stack: AsyncExitStack) -> tuple[Membership, NodeDesk]:
        """Start up. Every mistake of the user is found here, before the cluster sees the daemon."""
        machine = await self._open_machine(stack)
        port = await self._bind(stack, machine.identity)
        activities = Activities(node=self._config.name)
        activities.watch_callbacks()

        def keep(name: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
            task = asyncio.create_task(activities.keep(name, run), name=name)
            stack.push_async_callback(_cancel, task)
            return task

        etcd, cluster, revocations = await self._follow_etcd(stack, machine, port, keep)
        # Signals are handled from here on, because from here on the daemon has records to remove.
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        if self._config.preemption != "none":
            keep("preemption", self._preemption_watch().run)
        client = NodeClient(machine.identity)
        stack.push_async_callback(client.close)
        keep("renewals", self._renewals(cluster, machine.identity, activities).run)
        relayed = await self._stand_by(client, cluster, port, keep)
        services = self._services(machine, port, relayed, etcd, cluster, client, activities)
        membership = Membership(services)
        if relayed is not None:
            relayed.moved, relayed.tell = membership.announce, membership.stands_by_nowhere
        desk = _desk(services, membership, port.front)
        if machine.authority is not None:
            desk.signer = self._invite(stack, machine.authority, services, keep)
        # Start serving last: its parts exist and the revoked names are known.
        await self._until_revoked_are_known(revocations)
        add_node_service(port.server, desk)
        await port.server.start()
        stack.callback(desk.ending.set)
        if self._config.metrics_listen:
            self._serve_metrics(stack, desk, activities)
        return membership, desk

    async def _open_machine(self, stack: AsyncExitStack) -> _Machine:
        """Open the local parts: certificates, devices, folders. Raises ConfigError."""
        config = self._config
        answered = partial(answering_folder.answered, tell=self._notifier.status)
        await answered("state_dir", config.state_dir, config.state_dir.exists)  # renewed certificates lie in it
        identity, password = await answered("certificates", config.certificates, lambda: read_identity(config))
        devices = find_devices(
            config.devices,
            config.num_devices,
            num_sharers=config.card_sharers,
            reserve_gib=config.cuda_reserve_gib,
        )
        check_worker_ports(config, len(devices))
        authority, trusted = None, identity.now().ca
        if (folder := config.authority) is not None:
            authority = await answered("authority", folder, partial(open_authority, folder, trusted))
        memory = NodeMemory(config.state_dir)
        await answered("state_dir", config.state_dir, memory.open)
        stack.callback(memory.close)
        await self._own_store(stack)
        store = StateStore(config.layer_store_dir, quota_bytes=config.store_quota_bytes)
        await answered("store_dir", config.layer_store_dir, store.open)
        room_bytes = await answered("store_dir", config.layer_store_dir, store.room_bytes)
        stack.push_async_callback(store.close)
        self._runtime_dir = _make_runtime_dir(config.state_dir)
        stack.callback(shutil.rmtree, self._runtime_dir, ignore_errors=True)
        for setting, folder in config.folders_of_jobs:
            await answered(setting, folder, folder.resolve)
        places = list(config.allowed_places)
        if places and config.checkpoint_root is not None:
            places.append(str(config.checkpoint_root.resolve()))
        allow_only(AllowedPlaces(places, never=[str(path.resolve()) for path in config.secrets]))
        return _Machine(
            identity=identity,
            password=password,
            devices=devices,
            authority=authority,
            memory=memory,
            store=store,
            room_bytes=room_bytes,
        )

    async def _own_store(self, stack: AsyncExitStack) -> None:
        """Own the folder of layer files, if it is in shared memory, where folders of killed daemons stay behind."""
        folder = self._config.layer_store_dir
        if self._config.store_dir or folder.parent == self._config.state_dir:
            return
        for ownerless in await asyncio.to_thread(remove_ownerless, folder.parent):
            log.warning("ownerless_folder_removed", folder=str(ownerless))
        owned = OwnedFolder(folder)
        if not await asyncio.to_thread(owned.claim):
            raise ConfigError("another process keeps its layer files there", str(folder))
        stack.callback(owned.release)

    async def _bind(self, stack: AsyncExitStack, identity: RenewableIdentity) -> _Port:
        """Take the port, and find the address that others dial. Raises ConfigError."""
        config = self._config
        announced = config.announce
        if config.one_port and not announced and (announced := mapped_address(os.environ, listen_address(config)[1])):
            log.info("announced_as_mapped", address=announced)
        if not announced and not config.relay:
            await check_advertised_host(config)
        # Bound but not started: the port is known for the record, and a caller meets no half-built service.
        inner = ("127.0.0.1", 0) if config.one_port else listen_address(config)
        limits = StreamLimits()
        server, number = bind_node_service(identity, *inner, stream_limits=limits)
        stack.push_async_callback(server.stop, SERVICE_GRACE_S)
        front: PortProcess | None = None
        if config.one_port:
            front = PortProcess(*listen_address(config), daemon_port=number, folder=self._runtime_dir)
            stack.callback(front.close)
            number = front.port
            if announced and not config.relay:
                dial_within(announced, front.inner_address)
        return _Port(server=server, limits=limits, front=front, number=number, announced=announced)

    async def _follow_etcd(
        self, stack: AsyncExitStack, machine: _Machine, port: _Port, keep: _Keep
    ) -> tuple[EtcdClient, ClusterWatch, Revocations]:
        """Ask etcd once, so that a wrong address is reported at once, and follow it. Later outages only delay."""
        config, identity = self._config, machine.identity
        access = EtcdAccess(endpoints=config.etcd, identity=identity, user=config.etcd_user, password=machine.password)
        etcd = await stack.enter_async_context(EtcdClient(access))
        if told := remark((await etcd.status()).version):
            log.warning("etcd_is_faulty", advice=told)
        cluster = ClusterWatch(etcd, view=ClusterView(), chooses_relays=bool(config.relay))
        cluster.leads = lambda: False  # until it stands for leader
        # Only etcd's final refusal ends the watch; an outage is retried inside.
        keep("cluster watch", cluster.run).add_done_callback(self._on_watch_end)
        if port.front is not None:
            keep("shared port", port.front.run)
        keep("sightings", lambda: log_plans(cluster))
        revocations = Revocations(
            cluster,
            names=own_names(names_in(read_certificate(identity.now().certificate, CERTIFICATE_FILE))),
            where=str(config.certificates / CERTIFICATE_FILE),
            revoke=port.limits.revoke,
            on_own=self._on_own_revocation,
        )
        keep("revocations", revocations.run)
        return etcd, cluster, revocations

    def _renewals(self, cluster: ClusterWatch, identity: RenewableIdentity, activities: Activities) -> Renewals:
        return Renewals(
            cluster,
            identity,
            name=self._config.name,
            folder=self._config.renewals_dir,
            tell=lambda reason: activities.trouble("certificate", reason),
        )

    async def _stand_by(self, client: NodeClient, cluster: ClusterWatch, port: _Port, keep: _Keep) -> StandingBy | None:
        """Stand by at relays, if others cannot dial this node."""
        if port.front is None or not self._config.relay:
            return None
        relays = read_relays(self._config.relay, "relay")
        standing = StandingBy(port.front, client, cluster, node=self._config.name, relays=relays)
        await standing.choose()
        keep("relay", standing.run)
        return standing

    def _services(
        self,
        machine: _Machine,
        port: _Port,
        relayed: StandingBy | None,
        etcd: EtcdClient,
        cluster: ClusterWatch,
        client: NodeClient,
        activities: Activities,
    ) -> Services:
        config, host, store = self._config, advertised_host(self._config), machine.store
        announced = relayed.address if relayed is not None else port.announced
        authority = machine.authority
        record = NodeRecord(
            name=config.name,
            incarnation="",
            address=announced or join_address(host, port.number),
            host=host,
            site=config.site,
            site_is_private=config.site_is_private,
            devices=machine.devices,
            memory_bytes=min(memory_bytes(), machine.room_bytes),
            layer_folder=str(store.directory) if machine.room_bytes < memory_bytes() else "",
            arithmetic_class=class_of(machine.devices),
            worker_ports=str(port.number) if config.one_port else config.worker_ports,
            has_authority=authority is not None,
            authority=fingerprint(authority.certificate) if authority is not None else "",
            allow_plugins=config.allow_plugins,
        )
        front = port.front
        return Services(
            config=config,
            record=record,
            memory=machine.memory,
            etcd=etcd,
            cluster=cluster,
            store=store,
            library=DataLibrary(
                config.data_cache_dir,
                client,
                lambda: _other_endpoints(cluster, config.name),
                memory=config.state_dir / "verified_data.json",
            ),
            client=client,
            identity=machine.identity,
            outgoing=OutgoingTransfers(config.transfer_mbit_s),
            activities=activities,
            runtime_dir=self._runtime_dir,
            inner_port=front.inner_address if front is not None and announced and relayed is None else "",
        )

    def _invite(
        self, stack: AsyncExitStack, authority: CertificateAuthority, services: Services, keep: _Keep
    ) -> Signer:
        """Let new machines join at this node."""
        signer = Signer(
            authority,
            services.etcd,
            is_member=lambda name: _is_member(services.cluster, name),
            trusted=lambda: services.identity.now().ca,
        )
        joins = JoinPort(
            authority,
            signer.join,
            folder=self._runtime_dir,
            tell=lambda reason: services.activities.trouble("join port", reason),
        )
        stack.callback(joins.close)
        keep("join port", joins.run)
        return signer

    async def _until_revoked_are_known(self, revocations: Revocations) -> None:
        """Wait for etcd's first listing, or a signal. Whether etcd is there was asked before, so this is short."""
        waits = [asyncio.create_task(event.wait()) for event in (revocations.known, self._stop)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            await _cancel(wait)

    async def _serve(self, membership: Membership) -> "asyncio.Task[None]":
        """Be a member until a signal. Return the work that is to be ended; raise what ended it before."""
        await membership.join()
        working = asyncio.create_task(membership.run(), name="membership")
        self._notifier.ready(f"node {self._config.name}, {membership.num_devices} worker(s)")
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(stopping)
        # A membership that ended by itself raises its error here, but its records go first.
        if working.done():
            await _in_time(membership.leave(), "lease")
            working.result()
        return working

    async def _shut_down(self, membership: Membership, working: "asyncio.Task[None]", desk: NodeDesk) -> None:
        """Leave in order, each step with its deadline; a second signal skips the waiting."""
        # 1. Wait for plans without this node.
        wish = "waiting for plans without this node"
        is_etcd_reachable = desk.etcd_away_s() is None
        if not is_etcd_reachable:
            wish = f"etcd is away, nobody can plan without this node: leaving within {self._stop_timeout_s:g} s"
        self._notifier.stopping(wish)
        self._notifier.extend_timeout(self._stop_timeout_s + 2 * END_TIMEOUT_S)
        log.info("leave_began", deadline_s=self._stop_timeout_s, is_etcd_reachable=is_etcd_reachable)
        self._end_leave_in(self._stop_timeout_s)
        draining = asyncio.create_task(membership.drain(), name="drain")
        forcing, overdue = (asyncio.create_task(event.wait()) for event in (self._force, self._overdue))
        await asyncio.wait({draining, forcing, overdue, working}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            log.warning("leave_forced" if self._force.is_set() else "leave_overdue")
        elif draining.exception() is not None:
            log.warning("drain_failed", error=str(draining.exception()))
        for task in (draining, forcing, overdue):
            await _cancel(task)
        # 2. Release the workers, resign.
        self._notifier.status("stopping workers")
        await _in_time(_cancel(working), "workers")
        # 3. Take the node's records away.
        await _in_time(membership.leave(), "lease")

    def _serve_metrics(self, stack: AsyncExitStack, desk: NodeDesk, activities: Activities) -> None:
        from headway.daemon.node.metrics import serve_metrics

        host, number = split_address(self._config.metrics_listen, "metrics_listen")
        port, stop = serve_metrics(host, number, desk, activities)
        stack.push_async_callback(asyncio.to_thread, stop)
        log.info("metrics_served", port=port)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        self._stop.set()
        if len(self._signals) > 1:
            self._force.set()

    def _preemption_watch(self) -> PreemptionWatch:
        config = self._config
        assert config.preemption != "none"
        host, port = split_address(config.preemption_server or ":80", "preemption_server")
        return PreemptionWatch(config.preemption, self._on_preemption, host=host, port=port)

    def _on_preemption(self, left_s: float) -> None:
        """Leave as at SIGTERM, but within the notice. A leave that is under way gets less time."""
        self._stop_timeout_s = leave_within_s(left_s, self._config.stop_timeout_s)
        self._end_leave_in(self._stop_timeout_s)
        self._stop.set()

    def _end_leave_in(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._overdue.set)

    def _on_own_revocation(self, error: ConfigError) -> None:
        """End the daemon at once: nobody answers it any more."""
        self._refused = error
        self._stop.set()
        self._overdue.set()

    def _on_watch_end(self, following: "asyncio.Task[None]") -> None:
        """End the daemon as a signal would, because etcd refuses it for good.

        The error is etcd's own, and may be cured elsewhere. So a service manager starts the daemon again.
        """
        if not following.cancelled() and isinstance(lost := following.exception(), InvariantLostError):
            self._refused = lost.__cause__ if isinstance(lost.__cause__, StoreError) else lost
            log.error("cluster_watch_ended", error=str(self._refused))
            self._stop.set()


def _make_runtime_dir(state_dir: Path) -> Path:
    """Make a private folder for the workers' socket: below systemd's for this unit, or a temporary one.

    Its name comes from the state folder, which this daemon has locked. A killed daemon leaves its folder behind, and
    the next one deletes it. Another user's folder of that name is left alone.
    """
    name = f"headway-{os.getuid()}-{hashlib.sha256(os.fsencode(state_dir.absolute())).hexdigest()[:12]}"
    parent = Path(os.environ.get("RUNTIME_DIRECTORY") or tempfile.gettempdir())
    if len(str(parent / name)) > MAX_RUNTIME_DIR_BYTES:
        parent = Path("/tmp")
    shutil.rmtree(parent / name, ignore_errors=True)
    try:
        (parent / name).mkdir(mode=0o700)
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix="headway-", dir=parent))
    return parent / name


def _desk(services: Services, membership: Membership, front: PortProcess | None) -> NodeDesk:
    """Return what the service answers from."""
    config, cluster = services.config, services.cluster
    return NodeDesk(
        node=config.name,
        incarnation=membership.incarnation,
        view=cluster.view,
        store=services.store,
        library=services.library,
        client=services.client,
        logs_dir=config.logs_dir,
        checkpoint_root=config.checkpoint_root,
        outgoing=services.outgoing,
        recent_operations=membership.recent_operations,
        dial_peers=membership.dial_peers,
        standing_by=front.standing_by if front is not None else None,
        met_rival=membership.met_rival,
        etcd_away_s=lambda: None if cluster.is_reachable else time.monotonic() - cluster.reachable_since,
        certificate_ends=lambda: certificate_ends(services.identity.now()),
    )


def _is_member(cluster: ClusterWatch, name: str) -> bool:
    """Whether a node has a name, in any case: peers compare names that way."""
    return any(node.casefold() == name.casefold() for node in cluster.view.nodes)


def _other_endpoints(cluster: ClusterWatch, name: str) -> list[NodeEndpoint]:
    return [node.endpoint for node in cluster.view.nodes.values() if node.name != name]


async def _cancel(task: "asyncio.Task[None] | asyncio.Task[bool]") -> None:
    """End a task and wait for its end; its error was reported before."""
    task.cancel()
    await asyncio.wait([task])


async def _in_time(step: Awaitable[None], what: str) -> None:
    """Await a step of the end for a limited time: an unfinished rest ends with this process, or with its lease."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await step
    except TimeoutError:
        log.error("end_overdue", what=what, deadline_s=END_TIMEOUT_S)
