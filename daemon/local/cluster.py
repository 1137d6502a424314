"""A whole cluster on this machine: etcd and N daemons as child processes, for a laptop, a demo or a test.

Permanent files are in the state folder: etcd's data, its certificate authority, checkpoints, each node's own folder and
log, `cluster.json`. Temporary files (certificates, sockets, layer files in memory) are in a run folder, which a sweeper
process deletes even if this process is killed. All other children die with this process too, in any case.

A dead daemon or etcd is restarted with its name, address and data, as systemd would do.
"""

import asyncio
import fcntl
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec

from headway.daemon.base.addresses import join_address, split_address
from headway.daemon.base.errors import ConfigError, StoreError
from headway.daemon.base.machine_share import folder_in_memory
from headway.daemon.base.owned_folders import OwnedFolder, remove_ownerless
from headway.daemon.client.cluster_access import CLUSTER_FILE, ClusterAddress, ClusterFile, ClusterSession
from headway.daemon.cluster.binary import find_etcd_binary
from headway.daemon.jobs.resolve import default_cache_dir
from headway.daemon.local.cards import CardShare, free_share, machine_cards, share_cards, sharing
from headway.daemon.local.processes import MAX_FALSE_STARTS, EtcdServer, EtcdServerConfig, NodeProcess, will_that_sweeps
from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.errors import UnavailableError, check_installed
from headway.stages.sockets.roles import Role

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
"""Maximum wait for the jobs' checkpoints when the cluster stops."""
KILL_TIMEOUT_S = 10.0
POLL_S = 0.05
GUARD_INTERVAL_S = 0.5
KEEP_UP_INTERVAL_S = 0.1


class LocalCluster:
    """A local cluster: start it, add nodes, stop it. An async context manager for the main thread of a process."""

    # All three are there from `start` on.
    _run_dir: Path
    _store_dir: Path
    _authority: CertificateAuthority

    def __init__(
        self,
        state_dir: Path,
        *,
        num_nodes: int,
        most_nodes: int = 0,
        etcd_binary: Path | None = None,
        etcd_port: int = 0,
        force: asyncio.Event | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        node_settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        on_trouble: Callable[[str], None] = lambda _: None,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        """most_nodes: number of nodes with those that are added later; the machine's cards are dealt out to so many.

        etcd_port: 0 takes a free one. force: once set, a stop no longer waits for checkpoints. node_settings: fields of
        every NodeConfig; on one machine no node is in quarantine unless they say so. environment: variables of every
        every daemon. on_trouble: called for each daemon that does not start, while others run. on_step: called with a
        as each part has started.
        """
        if num_nodes < 1:
            raise ConfigError(f"a cluster needs at least 1 node, not {num_nodes}", "--nodes")
        self.state_dir = state_dir.absolute()
        if not str(self.state_dir).isprintable():
            what = "cannot be the state folder: its path is not UTF-8, or has a character that cannot be printed"
            raise ConfigError(f"{what}; name another one with --state-dir", str(state_dir))
        self.force = force or asyncio.Event()
        self.nodes: list[NodeProcess] = []
        self.has_ended_well = False
        """True if it was up, and every daemon then left by itself, with each job in a checkpoint."""
        self.metrics: dict[str, str] = {}
        """Node name to the address for Prometheus, if HEADWAY_METRICS_LISTEN names one."""
        self._addresses: dict[str, str] = {}
        self._num_nodes = num_nodes
        self._num_named = 0
        self._node_settings = {"quarantine_after": 0, **(node_settings or {})}
        self._environment = dict(environment or {})
        self._keeping_up: asyncio.Task[None] | None = None
        self._is_etcd_wanted = True
        self._etcd_failure = ""
        self._on_trouble, self._on_step = on_trouble, on_step
        self._told: dict[str, str] = {}
        self._etcd_binary = etcd_binary
        self._etcd_port = etcd_port
        self._stop_timeout_s = stop_timeout_s
        self._has_folder = False
        """True while the state folder, and the file in it, are this cluster's."""
        self._held = ExitStack()
        """What is let go after all processes, the state folder's lock last."""
        self._etcd: EtcdServer | None = None
        self.card_sharing = ""
        """Sentence on nodes that share a card, once it has started; empty: none do."""
        self._most_nodes = max(num_nodes, most_nodes)
        self._shares: tuple[CardShare, ...] = ()
        self._share_of: dict[str, int] = {}
        """Node name to the number of its share."""

    @property
    def address(self) -> ClusterAddress:
        """Return its address for clients, once it has started."""
        certificates = self._run_dir / "ca" / "client"
        return ClusterAddress(etcd=self.etcd_endpoints, certificates=certificates, state_dir=self.state_dir)

    @property
    def etcd_endpoints(self) -> tuple[str, ...]:
        """Return host:port of each member of etcd."""
        assert self._etcd is not None, "the cluster has not started"
        return (self._etcd.endpoint,)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything, and wait until every starting node is registered.

        Raises ConfigError: the state folder is in use or unusable, no etcd binary; MissingPackageError: no torch;
        UnavailableError: every daemon ended, or was not registered within its deadline.
        """
        check_installed("torch", "node", "a node on this machine")
        binary = find_etcd_binary(self._etcd_binary)
        self._take_state_dir()
        await self._share_cards()
        self._run_dir = Path(tempfile.mkdtemp(prefix=f"headway-{os.getpid()}-"))
        parent = folder_in_memory() or self.state_dir
        await asyncio.to_thread(remove_ownerless, parent)
        self._store_dir = parent / f"headway-{os.getpid()}-store-{secrets.token_hex(4)}"
        owned = OwnedFolder(self._store_dir)
        owned.claim()
        self._held.callback(owned.release)
        self._store_dir.mkdir(mode=0o700)
        swept = [self._run_dir, self._store_dir, owned.owner_file]
        self._held.callback(will_that_sweeps(swept).close)
        for path in swept:
            self._held.callback(shutil.rmtree, path, ignore_errors=True)
        (self._run_dir / "tmp").mkdir(mode=0o700)
        # Kept, because jobs outlive this run, and nodes check who has signed them.
        kept = CertificateAuthority.kept_in(self.state_dir / "authority")
        self._authority = kept.issuing_into(self._run_dir / "ca")
        self._held.callback(self._authority.delete)
        self._authority.issue("client", role=Role.OPERATOR)
        self._on_step(f"authority: {self.state_dir / 'authority'}")
        self._etcd = await self._start_etcd(
            EtcdServerConfig(
                binary=binary,
                data_dir=self.state_dir / "etcd",
                log_file=self.state_dir / "etcd.log",
                certificates=self._authority.issue("etcd"),
                client_port=self._etcd_port,
            )
        )
        self._on_step(f"etcd: {self._etcd.endpoint}")
        for _ in range(self._num_nodes):
            self._on_step(f"{self._spawn().name}: starting")
        await self._registered(self.nodes, is_any_enough=True)
        self._write_cluster_file()
        self._keeping_up = asyncio.create_task(self._keep_up(), name="local cluster")

    async def _share_cards(self) -> None:
        """Deal this machine's cards out to the nodes."""
        cards = await asyncio.to_thread(machine_cards, {**os.environ, **self._environment})
        self._shares = () if self._node_settings.get("devices") == "cpu" else share_cards(cards, self._most_nodes)
        self.card_sharing = sharing(self._shares)

    def _take_cards(self, name: str) -> CardShare | None:
        """Return the first share of the cards that no present node has; None: no cards. Raises ConfigError."""
        if not self._shares:
            return None
        present = {node.name for node in self.nodes}
        self._share_of = {other: number for other, number in self._share_of.items() if other in present}
        self._share_of[name] = free_share(self._shares, self._share_of.values())
        return self._shares[self._share_of[name]]

    async def _start_etcd(self, config: EtcdServerConfig) -> EtcdServer:
        """Start the etcd that is watched over."""
        return await EtcdServer.start(config)

    async def add_node(
        self, *, environment: Mapping[str, str] | None = None, settings: Mapping[str, object] | None = None
    ) -> str:
        """Add one node; return its name when it is registered. settings: in addition to those of all nodes.

        Raises UnavailableError; ConfigError when every card's memory is promised to other nodes.
        """
        node = self._spawn(environment, settings)
        await self._registered([node])
        self._write_cluster_file()
        return node.name

    # --- Actions of tests and chaos ---------------------------------------------------------------------------------

    @property
    def node_pids(self) -> dict[str, int]:
        """Return the process of each node's daemon."""
        return {node.name: node.pid for node in self.nodes}

    def kill_node(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a daemon a signal. If the signal ends it, it is restarted, unless it leaves cleanly."""
        self._node(name).signal(number)

    def remove_node(self, name: str) -> None:
        """Kill a daemon permanently."""
        node = self._node(name)
        node.signal(signal.SIGKILL)
        node.process.wait(KILL_TIMEOUT_S)
        self._addresses.pop(name, None)
        self.nodes = [other for other in self.nodes if other is not node]
        self._write_cluster_file()

    async def stop_etcd(self) -> None:
        """SIGKILL etcd, and leave it stopped until `start_etcd`."""
        assert self._etcd is not None, "the cluster has not started"
        self._is_etcd_wanted = False
        await self._etcd.kill()

    async def start_etcd(self) -> None:
        """Restart etcd on its port and data."""
        assert self._etcd is not None, "the cluster has not started"
        await self._etcd.restart()
        self._is_etcd_wanted = True

    def _node(self, name: str) -> NodeProcess:
        return next(node for node in self.nodes if node.name == name)

    # --- Watching over it --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise UnavailableError if etcd cannot be kept up, or if no daemon can, or if every daemon has left.

        A daemon that does not start while others run is reported, and tried again.
        """
        assert self._etcd is not None, "the cluster has not started"
        if self._etcd_failure:
            raise UnavailableError("etcd", self._etcd_failure)
        failures = {node.name: node.failure for node in self.nodes if node.failure}
        if failures and len(failures) == sum(not node.has_left for node in self.nodes):
            raise UnavailableError(*next(iter(failures.items())))
        for name, failure in failures.items():
            if self._told.get(name) != failure:
                self._told[name] = failure
                self._on_trouble(f"{name} does not start, and is retried: {failure}")
        if self.nodes and all(node.has_left for node in self.nodes):
            raise UnavailableError("the cluster", "every daemon was told to leave")

    async def _keep_up(self) -> None:
        """Restart dead processes, until cancelled."""
        num_etcd_failures = 0
        while True:
            await asyncio.sleep(KEEP_UP_INTERVAL_S)
            if [node for node in self.nodes if node.keep_up()]:
                self._write_cluster_file()
            if self._etcd is not None and self._is_etcd_wanted and self._etcd.returncode is not None:
                try:
                    await self._etcd.restart()
                    num_etcd_failures = 0
                except (ConfigError, StoreError) as error:
                    num_etcd_failures += 1
                    if num_etcd_failures >= MAX_FALSE_STARTS:
                        self._etcd_failure = f"{error} (see {self.state_dir / 'etcd.log'})"
                        return
                    await asyncio.sleep(num_etcd_failures * KEEP_UP_INTERVAL_S)

    async def guard(self, *, grace_s: float = 0.0) -> NoReturn:
        """Never return: raise UnavailableError when a process has ended, `grace_s` after it was seen."""
        while True:
            try:
                self.check()
            except UnavailableError:
                await asyncio.sleep(grace_s)
                raise
            await asyncio.sleep(GUARD_INTERVAL_S)

    async def stop(self) -> None:
        """Stop all daemons at once, so that each job ends in a checkpoint and continues later; then etcd. Idempotent.

        Daemons that are not done by their deadline, or when `force` is set, are killed.
        """
        if self._has_folder:
            (self.state_dir / CLUSTER_FILE).unlink(missing_ok=True)
        was_up = self._keeping_up is not None
        if self._keeping_up is not None:
            # First, because it would restart processes that are being stopped.
            self._keeping_up.cancel()
            await asyncio.wait([self._keeping_up])
            self._keeping_up = None
        # Jobs are saved through etcd, even if etcd was stopped or has died.
        await self._have_etcd()
        for node in self.nodes:
            # All at once: a leader among them then sees every node drain and ends the jobs in checkpoints.
            node.signal(signal.SIGTERM)
        await self._ended(self._stop_timeout_s)
        if self.nodes:
            self.has_ended_well = was_up and all(node.has_left for node in self.nodes)
        for node in self.nodes:
            node.signal(signal.SIGKILL)
        await self._ended(KILL_TIMEOUT_S, is_forced=True)
        self.nodes.clear()
        if self._etcd is not None:
            await self._etcd.stop()
            self._etcd = None
        self._has_folder = False
        self._held.close()

    async def _have_etcd(self) -> None:
        """Start etcd if it is stopped and a daemon needs it: jobs are not saved without it."""
        is_anybody_there = any(node.process.poll() is None for node in self.nodes)
        if self._etcd is not None and self._etcd.returncode is not None and is_anybody_there:
            with suppress(ConfigError, StoreError):
                await self._etcd.restart()

    def _take_state_dir(self) -> None:
        """Make the state folder and lock it. Raises ConfigError when it is in use or cannot be used."""
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True)
            lock = (self.state_dir / "lock").open("a")
        except OSError as error:
            raise ConfigError(
                f"cannot be used as state folder: {error.strerror}; name another with --state-dir", str(self.state_dir)
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ConfigError(
                "a cluster runs on this state folder; stop it, or name another with --state-dir", str(self.state_dir)
            ) from error
        self._has_folder = True
        self._held.callback(lock.close)

    def _spawn(
        self, environment: Mapping[str, str] | None = None, settings: Mapping[str, object] | None = None
    ) -> NodeProcess:
        self._num_named += 1
        name = f"node-{self._num_named}"
        state_dir = self.state_dir / "nodes" / name
        state_dir.mkdir(parents=True, exist_ok=True)
        on_cpu = (settings or {}).get("devices") == "cpu"
        share = None if on_cpu else self._take_cards(name)
        seen = share.environment if share is not None else {}
        flags = self._metrics_of(name) | {
            "etcd": ",".join(self.etcd_endpoints),
            "certificates": self._authority.issue(name, role=Role.NODE),
            "state_dir": state_dir,
            "store_dir": self._store_dir / name,
            "cache_dir": default_cache_dir().absolute(),
            "checkpoint_root": self.state_dir,
            "allow_plugins": "any",  # whoever can submit to this cluster is the user who runs it
            "stop_timeout_s": self._stop_timeout_s,
            "log_format": "json",
        }
        if share is not None and share.num_sharers > 1:
            flags["card_sharers"] = share.num_sharers
        node = NodeProcess(
            name=name,
            flags=flags | self._node_settings | dict(settings or {}),
            environment={"TMPDIR": str(self._run_dir / "tmp"), **seen, **self._environment, **(environment or {})},
            log_path=state_dir / "daemon.log",
        )
        self.nodes.append(node)
        return node

    def _metrics_of(self, name: str) -> dict[str, object]:
        """Return a node's metrics port. Each node takes its own, counting from the configured port."""
        told = {**os.environ, **self._environment}.get("HEADWAY_METRICS_LISTEN", "")
        if not told or "metrics_listen" in self._node_settings:
            return {}
        host, port = split_address(told, "HEADWAY_METRICS_LISTEN")
        if port:
            port += self._num_named - 1
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        self.metrics[name] = join_address(host, port)
        return {"metrics_listen": self.metrics[name]}

    async def _registered(self, nodes: Iterable[NodeProcess], *, is_any_enough: bool = False) -> None:
        """Return when the nodes' records are in etcd, written by these very processes.

        is_any_enough: ended ones are reported, and left to `_keep_up`, unless all end.
        """
        missing = {node.name: node for node in nodes}
        num_dispensable = len(missing) - 1 if is_any_enough else 0
        reason = f"not registered within {READY_TIMEOUT_S:g} s"
        try:
            async with asyncio.timeout(READY_TIMEOUT_S), ClusterSession(self.address) as session:
                while missing:
                    for node in [node for node in missing.values() if node.process.poll() is not None]:
                        if not num_dispensable:
                            raise UnavailableError(node.name, node.last_words)
                        num_dispensable -= 1
                        del missing[node.name]
                        self._on_trouble(f"{node.name} does not start, and is retried: {node.last_words}")
                    view = await session.view()
                    for name in list(missing):
                        record = view.nodes.get(name)
                        if record is not None and record.started_at >= missing[name].started_at:
                            _, _, port = record.address.rpartition(":")
                            missing.pop(name).port = int(port) if port.isdigit() else 0  # others dial it elsewhere
                            self._addresses[name] = record.address
                            self._on_step(f"{name}: up at {record.address}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            names = ", ".join(sorted(missing))
            raise UnavailableError(names, f"{reason}; see {next(iter(missing.values())).log_path}") from error

    async def _ended(self, timeout_s: float, *, is_forced: bool = False) -> None:
        """Wait until every daemon has ended, the time is up, or `force` is set (unless it was set before)."""
        deadline = time.monotonic() + timeout_s
        while any(node.process.poll() is None for node in self.nodes):
            if (self.force.is_set() and not is_forced) or time.monotonic() >= deadline:
                return
            await asyncio.sleep(POLL_S)

    def _write_cluster_file(self) -> None:
        address, daemons = self.address, tuple(self._addresses.values())
        folder = str(address.certificates)
        content = ClusterFile(
            pid=os.getpid(), etcd=address.etcd, certificates=folder, daemons=daemons, pids=self.node_pids
        )
        path = self.state_dir / CLUSTER_FILE
        draft = path.with_suffix(".part")
        draft.write_bytes(msgspec.json.encode(content))
        draft.replace(path)
