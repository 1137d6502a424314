"""A whole cluster on this machine: etcd and N daemons as child processes, for a laptop, a demo or a test.

What must survive lies in the state folder: etcd's data, checkpoints, each node's own folder and log, `cluster.json`.
What must not (the throw-away certificates, sockets, layer files in memory) lies in a run folder, which a sweeper
process deletes even if this one is killed. All other children die with this process too, however it ends.
"""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from headway.daemon.certificates import CertificateAuthority
from headway.daemon.client.cluster_access import CLUSTER_FILE, ClusterAddress, ClusterFile, ClusterSession
from headway.daemon.errors import ConfigError
from headway.daemon.jobs.resolve import default_cache_dir
from headway.daemon.local import tethered
from headway.daemon.local.etcd_server import EtcdServer, EtcdServerConfig, find_etcd_binary
from headway.daemon.local.sweeper import Sweeper
from headway.stages.errors import UnavailableError

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
"""The longest wait for the jobs' checkpoints when the cluster stops."""
KILL_TIMEOUT_S = 10.0
POLL_S = 0.05
GUARD_INTERVAL_S = 0.5
IN_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class NodeProcess:
    """One daemon."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    started_at: float


class LocalCluster:
    """Start it, add nodes to it, stop it. An async context manager, for the main thread of a process."""

    def __init__(
        self,
        state_dir: Path,
        *,
        num_nodes: int,
        etcd_binary: Path | None = None,
        etcd_port: int = 0,
        force: asyncio.Event | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        """etcd_port: 0 takes a free one. force: once set, a stop does not wait for checkpoints any more."""
        if num_nodes < 1:
            raise ConfigError(f"a cluster needs at least 1 node, not {num_nodes}", "--nodes")
        self.state_dir = state_dir.absolute()
        self.force = force or asyncio.Event()
        self.nodes: list[NodeProcess] = []
        self._addresses: dict[str, str] = {}
        self._num_nodes = num_nodes
        self._etcd_binary = etcd_binary
        self._etcd_port = etcd_port
        self._stop_timeout_s = stop_timeout_s
        self._lock: IO[str] | None = None
        self._sweeper: Sweeper | None = None
        self._run_dir: Path | None = None
        self._store_dir: Path | None = None
        self._authority: CertificateAuthority | None = None
        self._etcd: EtcdServer | None = None

    @property
    def address(self) -> ClusterAddress:
        """How clients reach it, once it has started."""
        assert self._etcd is not None, "the cluster has not started"
        assert self._run_dir is not None
        return ClusterAddress(
            etcd=(self._etcd.endpoint,), certificates=self._run_dir / "ca" / "client", state_dir=self.state_dir
        )

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
        """Everything up and every node registered.

        Raises ConfigError: the state folder is in use or cannot be used, no etcd binary; UnavailableError: a daemon
        ended, or was not registered within its deadline.
        """
        binary = find_etcd_binary(self._etcd_binary)
        self._take_state_dir()
        self._run_dir = Path(tempfile.mkdtemp(prefix=f"headway-{os.getpid()}-"))
        in_memory = IN_MEMORY if os.access(IN_MEMORY, os.W_OK | os.X_OK) else self._run_dir
        self._store_dir = Path(tempfile.mkdtemp(prefix=f"headway-{os.getpid()}-store-", dir=in_memory))
        self._sweeper = Sweeper([self._run_dir, self._store_dir])
        (self._run_dir / "tmp").mkdir(mode=0o700)
        self._authority = CertificateAuthority.create(self._run_dir / "ca")
        self._authority.issue("client")
        self._etcd = await EtcdServer.start(
            EtcdServerConfig(
                binary=binary,
                data_dir=self.state_dir / "etcd",
                log_file=self.state_dir / "etcd.log",
                certificates=self._authority.issue("etcd"),
                client_port=self._etcd_port,
            )
        )
        names = [f"node-{index}" for index in range(1, self._num_nodes + 1)]
        for name in names:
            self._spawn(name)
        await self._registered(self.nodes)
        self._write_cluster_file()

    async def add_node(self) -> str:
        """One node more; returns its name when it is registered. Raises UnavailableError."""
        node = self._spawn(f"node-{len(self.nodes) + 1}")
        await self._registered([node])
        self._write_cluster_file()
        return node.name

    def check(self) -> None:
        """Raise UnavailableError if etcd or a daemon has ended without having been asked to."""
        assert self._etcd is not None, "the cluster has not started"
        if self._etcd.returncode is not None:
            raise UnavailableError(
                "etcd", f"ended with status {self._etcd.returncode}; see {self.state_dir / 'etcd.log'}"
            )
        for node in self.nodes:
            if node.process.poll() is not None:
                raise UnavailableError(node.name, _ended(node))

    async def guard(self, *, grace_s: float = 0.0) -> None:
        """Never returns: raises UnavailableError when something has ended, `grace_s` after it was seen."""
        while True:
            try:
                self.check()
            except UnavailableError:
                await asyncio.sleep(grace_s)
                raise
            await asyncio.sleep(GUARD_INTERVAL_S)

    async def stop(self) -> None:
        """Stop all daemons at once, so that each job ends in a checkpoint and is still wanted; then etcd. Idempotent.

        Daemons that are not done by their deadline, or when `force` is set, are killed.
        """
        if self._lock is not None:  # else the folder, and the file in it, are another cluster's
            (self.state_dir / CLUSTER_FILE).unlink(missing_ok=True)
        for node in self.nodes:
            _signal(node.process, signal.SIGTERM)
        await self._ended(self._stop_timeout_s)
        for node in self.nodes:
            _signal(node.process, signal.SIGKILL)
        await self._ended(KILL_TIMEOUT_S, is_forced=True)
        self.nodes.clear()
        if self._etcd is not None:
            await self._etcd.stop()
            self._etcd = None
        if self._authority is not None:
            self._authority.delete()
            self._authority = None
        if self._sweeper is not None:
            self._sweeper.sweep()
            self._sweeper = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

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
        self._lock = lock

    def _spawn(self, name: str) -> NodeProcess:
        assert self._authority is not None
        assert self._etcd is not None
        assert self._run_dir is not None
        assert self._store_dir is not None
        state_dir = self.state_dir / "nodes" / name
        state_dir.mkdir(parents=True, exist_ok=True)
        flags = {
            "name": name,
            "etcd": self._etcd.endpoint,
            "certificates": self._authority.issue(name),
            "listen": "127.0.0.1:0",
            "state-dir": state_dir,
            "store-dir": self._store_dir / name,
            "cache-dir": default_cache_dir().absolute(),
            "checkpoint-root": self.state_dir,
            "stop-timeout-s": self._stop_timeout_s,
            "log-format": "json",
        }
        command = [sys.executable, tethered.__file__, str(os.getpid()), sys.executable, "-m", "headway.daemon.cli"]
        command += ["daemon", *(f"--{flag}={value}" for flag, value in flags.items())]
        log_path = state_dir / "daemon.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches the parent only
                env={**os.environ, "TMPDIR": str(self._run_dir / "tmp")},
            )
        node = NodeProcess(name, process, log_path, time.time())
        self.nodes.append(node)
        return node

    async def _registered(self, nodes: Iterable[NodeProcess]) -> None:
        """Return when the nodes' records are in etcd, written by these very processes."""
        missing = {node.name: node for node in nodes}
        reason = f"not registered within {READY_TIMEOUT_S:g} s"
        try:
            async with asyncio.timeout(READY_TIMEOUT_S), ClusterSession(self.address) as session:
                while missing:
                    self.check()
                    view = await session.view()
                    for name in list(missing):
                        record = view.nodes.get(name)
                        if record is not None and record.started_at >= missing[name].started_at:
                            del missing[name]
                            self._addresses[name] = record.address
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            names = ", ".join(sorted(missing))
            raise UnavailableError(names, f"{reason}; see {next(iter(missing.values())).log_path}") from error

    async def _ended(self, timeout_s: float, *, is_forced: bool = False) -> None:
        """Wait until every daemon has ended, the time is up, or `force` is set (unless it has been obeyed)."""
        deadline = time.monotonic() + timeout_s
        while any(node.process.poll() is None for node in self.nodes):
            if (self.force.is_set() and not is_forced) or time.monotonic() >= deadline:
                return
            await asyncio.sleep(POLL_S)

    def _write_cluster_file(self) -> None:
        address = self.address
        daemons = tuple(self._addresses.values())
        content = ClusterFile(
            pid=os.getpid(), etcd=address.etcd, certificates=str(address.certificates), daemons=daemons
        )
        path = self.state_dir / CLUSTER_FILE
        draft = path.with_suffix(".part")
        draft.write_bytes(msgspec.json.encode(content))
        draft.replace(path)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _ended(node: NodeProcess) -> str:
    """How a daemon ended, with the last line that it wrote."""
    text = node.log_path.read_text(errors="replace").strip()
    last = text.splitlines()[-1][:300] if text else "it wrote nothing"
    return f"its daemon ended with status {node.process.returncode}: {last} (see {node.log_path})"
