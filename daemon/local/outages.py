"""Faults that last: each coroutine takes a resource from a local cluster for some seconds and returns it.

TCP connections are destroyed by the kernel, which lists and destroys sockets over netlink (sock_diag(7)). A round takes
one or two milliseconds, less than a TLS handshake. So rounds without pause let no connection through. A full disk is
imitated by a limit on the size of files, zero (prlimit(2)): every write to a regular file then fails with an OSError;
sockets and pipes still work. What outlives this process is undone by a shell at the end of a pipe.
"""

import asyncio
import os
import re
import resource
import shlex
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from headway.daemon.base.errors import ConfigError, StoreError
from headway.daemon.client.cluster_access import CLUSTER_FILE, ClusterSession, read_cluster_file
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import SpecRecord

KERNEL_TIMEOUT_S = 5.0
PAUSE_S = 0.0005
"""Pause between two rounds while nodes are cut off. A longer pause would let a process say hello and renew
its lease.
"""

_SOCK_DIAG: Final = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY, _DESTROY = 20, 21  # SOCK_DIAG_BY_FAMILY, SOCK_DESTROY
_ERROR, _DONE = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300  # NLM_F_*
_ESTABLISHED, _SYN_SENT, _LISTEN = 1, 2, 10
_STATES: Final = 1 << _ESTABLISHED | 1 << _SYN_SENT | 1 << _LISTEN
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, sender
_QUESTION = struct.Struct("=BBBxI48s")  # inet_diag_req_v2: family, protocol, extensions, states, socket
_ANSWER = struct.Struct("=BBBB48s4xII4xI")  # inet_diag_msg: family, state, -, -, socket, -, queues, user, inode
_PORTS = struct.Struct("!HH")  # inet_diag_sockid begins with them
_INODE = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class _Socket:
    """A socket in the kernel's list."""

    family: int
    state: int
    identity: bytes
    """Addresses, ports and cookie, in the kernel's form."""
    inode: int
    """Inode; 0 until the connection is accepted."""

    @property
    def ports(self) -> tuple[int, int]:
        """Return the local and the remote port."""
        local, remote = _PORTS.unpack_from(self.identity)
        return local, remote


def can_destroy() -> bool:
    """Return whether this user may destroy connections: the kernel reserves it for root."""
    return os.geteuid() == 0


def destroy_connections(pids: Collection[int], *, others: Collection[int] | None = None) -> int:
    """Reset TCP connections of these processes, including half-open ones; return their number.

    others: only connections with these processes; None: all. Both ends are reset. An ended process has none. Raises
    OSError if the kernel cannot destroy sockets.

    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(KERNEL_TIMEOUT_S)
        known = [found for family in (socket.AF_INET, socket.AF_INET6) for found in _listed(kernel, family)]
        theirs = _connections(known, pids)
        if others is not None:
            # Ports distinguish the ends of one machine's connections.
            ports = {found.ports[0] for found in _connections(known, others)}
            theirs = [found for found in theirs if found.ports[1] in ports]
        for found in theirs:
            _destroy(kernel, found)
    return len(theirs)


def _connections(known: Collection[_Socket], pids: Collection[int]) -> list[_Socket]:
    """Return the connections of these processes. An unaccepted one belongs to the process that listens at its port."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    listening = {found.ports[0] for found in known if found.state == _LISTEN and found.inode in inodes}
    return [
        found for found in known if found.state != _LISTEN and (found.inode in inodes or found.ports[0] in listening)
    ]


class Parting:
    """Keeps destroying new connections of some processes, in a thread, while the context lasts."""

    def __init__(self) -> None:
        self.pids: Collection[int] = ()
        """The processes; may be replaced at any time."""
        self.others: Collection[int] | None = None
        """Destroy only connections with these processes; None: all. May be replaced at any time."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-parting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(KERNEL_TIMEOUT_S)

    def _run(self) -> None:
        while not self._end.wait(PAUSE_S):
            destroy_connections(self.pids, others=self.others)


def _inodes(pid: int) -> Iterator[int]:
    """Yield the inodes of a process's sockets."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if found := _INODE.fullmatch(str(entry.readlink())):
                    yield int(found.group(1))


def _listed(kernel: socket.socket, family: int) -> Iterator[_Socket]:
    _ask(kernel, _BY_FAMILY, _DUMP, _QUESTION.pack(family, socket.IPPROTO_TCP, 0, _STATES, bytes(48)))
    while True:
        for kind, body in _messages(kernel.recv(1 << 16)):
            if kind == _DONE:
                return
            _raise_error(kind, body)
            family, state, _, _, identity, _, _, inode = _ANSWER.unpack_from(body)
            yield _Socket(family, state, identity, inode)


def _destroy(kernel: socket.socket, found: _Socket) -> None:
    """Destroy a socket. A socket that is already gone is no error."""
    states = 1 << found.state
    _ask(kernel, _DESTROY, _ACK, _QUESTION.pack(found.family, socket.IPPROTO_TCP, 0, states, found.identity))
    for kind, body in _messages(kernel.recv(1 << 16)):
        with suppress(FileNotFoundError):
            _raise_error(kind, body)


def _ask(kernel: socket.socket, kind: int, flags: int, question: bytes) -> None:
    kernel.send(_HEADER.pack(_HEADER.size + len(question), kind, _REQUEST | flags, 1, 0) + question)


def _messages(received: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, body) of each message."""
    offset = 0
    while offset + _HEADER.size <= len(received):
        length, kind, *_ = _HEADER.unpack_from(received, offset)
        yield kind, received[offset + _HEADER.size : offset + length]
        offset += -(-length // 4) * 4


def _raise_error(kind: int, body: bytes) -> None:
    if kind == _ERROR and (number := -int.from_bytes(body[:4], "little", signed=True)):
        raise OSError(number, os.strerror(number))


TIMEOUT_S = 10.0

_SCRIPT = """
undo=""
while IFS= read -r command; do undo="$undo
$command"; done
eval "$undo" >/dev/null 2>&1
exit 0
"""


class Healer:
    """Stops and continues processes, and holds the commands that undo other faults.

    When this process ends, the shell undoes the remaining faults. Every command may run twice: a second run must do
    nothing.

    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "headway-healer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._told: set[str] = set()
        self._stopped: set[int] = set()

    def promise(self, *command: str) -> None:
        """Run a command when this process ends. It must do nothing if the fault was already undone."""
        line = shlex.join(command)
        if line in self._told:
            return
        assert "\n" not in line, "one command is one line"
        assert self._shell.stdin is not None
        self._shell.stdin.write(line.encode() + b"\n")
        self._shell.stdin.flush()
        self._told.add(line)

    def stop(self, pid: int) -> None:
        """Send SIGSTOP, after registering its undoing. An ended process is no error."""
        self.promise("kill", "-CONT", str(pid))
        self._stopped.add(pid)
        _signal(pid, signal.SIGSTOP)

    def go_on(self, pid: int) -> None:
        """Send SIGCONT."""
        self._stopped.discard(pid)
        _signal(pid, signal.SIGCONT)

    def close(self) -> None:
        """Continue every stopped process. Idempotent."""
        for pid in list(self._stopped):
            self.go_on(pid)
        if self._shell.stdin is not None and not self._shell.stdin.closed:
            self._shell.stdin.close()
        self._shell.wait(TIMEOUT_S)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


UNLIMITED: Final = "unlimited"


class FullDisk:
    """Limits processes, and restores their previous limits."""

    def __init__(self, healer: Healer) -> None:
        self._healer = healer
        self._limits_before: dict[int, tuple[int, int]] = {}

    def spread(self, pids: Collection[int]) -> None:
        """Limit these processes too. An ended process is no error."""
        for pid in set(pids) - self._limits_before.keys():
            with suppress(ProcessLookupError, PermissionError):
                soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                # a child inherits its parent's limit of zero
                self._limits_before[pid] = (hard if soft == 0 else soft, hard)
                self._healer.promise("prlimit", f"--pid={pid}", f"--fsize={_text(hard)}:{_text(hard)}")
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

    def end(self, pids: Collection[int]) -> None:
        """Lift the limit, also from these processes: a child inherited it from a limited one."""
        for pid in {*pids, *self._limits_before}:
            with suppress(ProcessLookupError, PermissionError):
                soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                if soft == 0:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, self._limits_before.get(pid, (hard, hard)))


def _text(limit: int) -> str:
    return UNLIMITED if limit == resource.RLIM_INFINITY else str(limit)


NUM_CONNECTIONS: Final = 1500
"""Number of connections: more than the usual limit of 1,024 open files of a process."""
SPARE_FILES: Final = 200


class IdleConnections:
    """Holds connections to one address. An async context manager."""

    def __init__(self, host: str, port: int, *, number: int = NUM_CONNECTIONS) -> None:
        self._address = (host, port)
        self._number = number
        self._sockets: list[socket.socket] = []

    async def __aenter__(self) -> "IdleConnections":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = min(hard, max(soft, self._number + SPARE_FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        loop = asyncio.get_running_loop()
        for _ in range(min(self._number, wanted - SPARE_FILES)):
            connection = socket.socket()
            connection.setblocking(False)
            self._sockets.append(connection)
            with suppress(OSError, TimeoutError):  # a refused connection shows that the defence works
                async with asyncio.timeout(1.0):
                    await loop.sock_connect(connection, self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._sockets:
            connection.close()
        self._sockets.clear()


AWAY = ".away"


class StorageAway:
    """Makes a local folder unreachable, and restores it when the last overlapping fault ends."""

    def __init__(self, folder: Path, healer: Healer) -> None:
        self._folder = folder
        self._away = folder.with_name(folder.name + AWAY)
        self._healer = healer
        self._num_takers = 0

    def take(self) -> None:
        """Move the folder away: a process that opens its path finds a file. Raises OSError."""
        self._num_takers += 1
        if self._num_takers > 1:
            return
        script = 'test -e "$1" && { rm -f "$0"; mv -T "$1" "$0"; }'
        self._healer.promise("sh", "-c", script, str(self._folder), str(self._away))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.rename(self._away)
        self._folder.touch()

    def bring_back(self) -> None:
        """Restore the folder, once for each `take`. A second restore is no error."""
        self._num_takers = max(self._num_takers - 1, 0)
        if self._num_takers or not self._away.exists():
            return
        with suppress(FileNotFoundError):
            self._folder.unlink()
        os.rename(self._away, self._folder)  # noqa: PTH104 (the name is a folder's, in one step)


AGAIN_S: Final = 0.5
"""Interval at which a node's processes are listed, so that new workers are affected too."""
ETCD_TIMEOUT_S: Final = 10.0


PROC = Path("/proc")
LAYER_FILES = "*.safetensors"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the cluster."""

    name: str
    """`node-2` for its daemon, `worker of node-2`, `etcd`."""
    pid: int
    arguments: tuple[str, ...] = ()

    def flag(self, name: str) -> str | None:
        """Return the value of `--name=value` among its arguments."""
        start = f"--{name}="
        return next((word.removeprefix(start) for word in self.arguments if word.startswith(start)), None)


class LocalTargets:
    """The processes and files of the cluster that a process of this machine runs."""

    def __init__(self, cluster_pid: int) -> None:
        """cluster_pid: as in `cluster.json`. Raises ConfigError when this user may not signal the cluster's
        processes.
        """
        self._cluster_pid = cluster_pid
        if not self.daemons():
            raise ConfigError("has no daemon that this user may signal", f"the cluster of process {cluster_pid}")

    @classmethod
    def of(cls, state_dir: Path) -> Self:
        """Return the targets of the cluster on a state folder. Raises ConfigError."""
        if (found := read_cluster_file(state_dir)) is None:
            raise ConfigError("there is none: no cluster runs here", str(state_dir / CLUSTER_FILE))
        return cls(found.pid)

    def daemons(self) -> dict[str, Process]:
        """Return node name to daemon."""
        found = {}
        for pid in _children(self._cluster_pid):
            arguments = _arguments(pid)
            process = Process("", pid, arguments)
            name = process.flag("name")
            if name is not None and "daemon" in arguments:
                found[name] = Process(name, pid, arguments)
        return dict(sorted(found.items()))

    def etcd(self) -> Process | None:
        """Return the cluster's etcd."""
        for pid in _children(self._cluster_pid):
            process = Process("etcd", pid, _arguments(pid))
            if process.flag("listen-client-urls") is not None:
                return process
        return None

    def workers(self, node: str) -> list[Process]:
        """Return the workers of a node, with spares, oldest first."""
        daemon = self.daemons().get(node)
        if daemon is None:
            return []
        found = [Process(f"worker of {node}", pid, _arguments(pid)) for pid in sorted(_children(daemon.pid))]
        return [process for process in found if any("headway.daemon.worker" in word for word in process.arguments)]

    def layer_files(self) -> list[Path]:
        """Return the finished layer files of all nodes' stores, in order of their names."""
        found = []
        for daemon in self.daemons().values():
            if (folder := daemon.flag("store-dir")) is not None:
                found += sorted(Path(folder).rglob(LAYER_FILES))
        return found

    def checkpoint_folder(self, checkpoint_dir: str) -> Path | None:
        """Return a job's checkpoint folder on this machine; None: it lies elsewhere."""
        roots = [root for daemon in self.daemons().values() if (root := daemon.flag("checkpoint-root")) is not None]
        if "://" in checkpoint_dir or not (roots or Path(checkpoint_dir).is_absolute()):
            return None
        return Path(*roots[:1], checkpoint_dir)


def _children(parent: int) -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit() and _parent(entry) == parent]


def _parent(entry: Path) -> int | None:
    """Return the parent of a process; None when it is gone, or dead and not yet waited for."""
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return int(parent) if state not in "ZX" else None


def _arguments(pid: int) -> tuple[str, ...]:
    try:
        return tuple((PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
    except OSError:
        return ()


class Outages:
    """The outages of one cluster. Cancelling a coroutine ends its outage."""

    def __init__(
        self,
        session: ClusterSession,
        targets: LocalTargets | None,
        healer: Healer,
    ) -> None:
        self._session = session
        self._targets = targets
        self._healer = healer
        self._storages: dict[Path, StorageAway] = {}
        """Every folder that was ever out of reach. Overlapping faults are one outage."""

    async def parted(self, node: str, seconds: float, *, other: str = "") -> None:
        """Cut a node off from everybody, etcd too, or from another node alone: destroy connections as they open."""
        with Parting() as parting:
            async for _ in self._looks(seconds):
                if other:
                    parting.others = await asyncio.to_thread(self._pids_of, other)
                parting.pids = await asyncio.to_thread(self._pids_of, node)

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
        assert self._targets is not None, "refused before"
        daemon = self._targets.daemons().get(node)
        return (daemon.pid, *(worker.pid for worker in self._targets.workers(node))) if daemon is not None else ()


NUM_HUGE_LAYERS: Final = 50_000_000
GARBAGE: Final = b'\xff\xfe{"spec": '


def poison(number: int, name: str, submission: SpecRecord) -> tuple[str, str, bytes]:
    """Return (description, key, value) of the poison with this number, counted off among the kinds.

    submission: of a healthy job, which the poisoned one resembles.
    """
    spec = submission.spec
    named = replace(spec, job=replace(spec.job, name=name))
    headless = replace(named, model=replace(spec.model, num_attention_heads=0))
    huge = replace(named, model=replace(spec.model, num_hidden_layers=NUM_HUGE_LAYERS))
    record = replace(submission, uid=f"{name}-uid")
    kinds = (
        ("a job without attention heads", Keys.of(name, "spec"), encode(replace(record, spec=headless))),
        (f"a job of {NUM_HUGE_LAYERS} layers", Keys.of(name, "spec"), encode(replace(record, spec=huge))),
        ("an unreadable job", Keys.of(name, "spec"), GARBAGE),
        ("an unreadable node", Keys.node(name), GARBAGE),
    )
    return kinds[number % len(kinds)]
