"""The soak's own faults: each takes a resource from a local cluster for some seconds and returns it.

TCP connections are destroyed by the kernel, which lists and destroys sockets over netlink (sock_diag(7)). A round takes
one or two milliseconds, less than a TLS handshake. So rounds without pause let no connection through. A full disk is
imitated by a limit on the size of files, zero (prlimit(2)): every write to a regular file then fails with an OSError;
sockets and pipes still work.
"""

import asyncio
import os
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from headway.daemon.base.errors import StoreError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import SpecRecord
from headway.daemon.cluster.transaction import Delete
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.local.fault_schedule import FaultKind, Strike, parse_kinds
from headway.daemon.local.injector import Hit, Injector, LocalTargets, lasting, pick
from headway.daemon.local.processes import LastWill

CUTTING: Final = ("partition", "link-cut", "unreachable")
"""Faults that destroy connections, for which the kernel requires root."""
ALL_KINDS: Final = (*FaultKind, *CUTTING, "storage-away", "poison-job", "idle-connections", "disk-full")


def kinds_of(text: str) -> tuple[str, ...]:
    """Return the kinds of `kill,disk-full`. Raises ConfigError."""
    return parse_kinds(text, ALL_KINDS)


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


UNLIMITED: Final = "unlimited"


class FullDisk:
    """Limits processes, and restores their previous limits."""

    def __init__(self, will: LastWill) -> None:
        self._will = will
        self._limits_before: dict[int, tuple[int, int]] = {}

    def spread(self, pids: Collection[int]) -> None:
        """Limit these processes too. An ended process is no error."""
        for pid in set(pids) - self._limits_before.keys():
            with suppress(ProcessLookupError, PermissionError):
                soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                # a child inherits its parent's limit of zero
                self._limits_before[pid] = (hard if soft == 0 else soft, hard)
                self._will.promise("prlimit", f"--pid={pid}", f"--fsize={_text(hard)}:{_text(hard)}")
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

    def __init__(self, folder: Path, will: LastWill) -> None:
        self._folder = folder
        self._away = folder.with_name(folder.name + AWAY)
        self._will = will
        self._num_takers = 0

    def take(self) -> None:
        """Move the folder away: a process that opens its path finds a file. Raises OSError."""
        self._num_takers += 1
        if self._num_takers > 1:
            return
        script = 'test -e "$1" && { rm -f "$0"; mv -T "$1" "$0"; }'
        self._will.promise("sh", "-c", script, str(self._folder), str(self._away))
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


class SoakInjector(Injector):
    """Also takes connections, disks, the checkpoint folder and etcd's good sense. Cancelling a fault ends it."""

    def __init__(self, session: ClusterSession, *, targets: LocalTargets | None, job: str | None = None) -> None:
        super().__init__(session, targets=targets, job=job)
        self.storages: dict[Path, StorageAway] = {}
        """Every folder that was ever out of reach. Overlapping faults are one outage."""

    async def hit(self, strike: Strike, view: ClusterView) -> Hit | None:
        """Begin a fault of `ALL_KINDS`."""
        match strike.kind:
            case "storage-away" | "poison-job":
                return self._at_job(strike, view)
            case "link-cut":
                if (victim := pick(self.plan_workers(view), strike)) is None:
                    return None
                number = await asyncio.to_thread(destroy_connections, [victim.pid])
                return Hit(f"{number} connections of {victim.name}")
            case "partition" | "unreachable" | "disk-full" | "idle-connections":
                return self._at_node(strike, view)
        return await super().hit(strike, view)

    def _at_node(self, strike: Strike, view: ClusterView) -> Hit | None:
        names = [daemon.name for daemon in self.daemons()]
        if (name := pick(names, strike)) is None:
            return None
        others, seconds = [other for other in names if other != name], strike.seconds
        match strike.kind:
            case "partition":
                return lasting(name, strike, self.parted(name, seconds))
            case "disk-full":
                return lasting(name, strike, self.full_disk(name, seconds))
            case "unreachable" if others:
                other = others[int(strike.share * len(others))]
                return lasting(f"{name} and {other}", strike, self.parted(name, seconds, other=other))
            case "idle-connections" if name in view.nodes:
                return lasting(name, strike, self.idle_connections(view.nodes[name].address, seconds))
        return None

    def _at_job(self, strike: Strike, view: ClusterView) -> Hit | None:
        job = next((each for each in view.jobs_in_order() if self._job in (None, each.name)), None)
        if job is None or job.submission is None:
            return None
        if strike.kind == "storage-away":
            folder = checkpoint_folder(self.targets, job.submission.spec.fault.checkpoint_dir)
            if folder is None or not folder.exists():
                return None
            return lasting(str(folder), strike, self.storage_away(folder, strike.seconds))
        name = f"chaos-poison-{strike.number:04d}"
        what, key, value = poison(strike.ordinal, name, job.submission)
        prefix = key if key == Keys.node(name) else Keys.job(name)
        return lasting(what, strike, self.poisoned(key, value, prefix, strike.seconds))

    async def parted(self, node: str, seconds: float, *, other: str = "") -> None:
        """Cut a node off from everybody, etcd too, or from another node alone: destroy connections as they open."""
        with Parting() as parting:
            async for _ in self._looks(seconds):
                if other:
                    parting.others = await asyncio.to_thread(self._pids_of, other)
                parting.pids = await asyncio.to_thread(self._pids_of, node)

    async def full_disk(self, node: str, seconds: float) -> None:
        """Let no file of a node's processes grow."""
        disk = FullDisk(self.will)
        try:
            async for _ in self._looks(seconds):
                disk.spread(await asyncio.to_thread(self._pids_of, node))
        finally:
            disk.end(self._pids_of(node))

    async def storage_away(self, folder: Path, seconds: float) -> None:
        """Put the checkpoint folder out of reach until the last overlapping fault ends."""
        storage = self.storages.setdefault(folder, StorageAway(folder, self.will))
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
                    await self._session.client.transaction([], [Delete(prefix, is_prefix=True)])
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
        daemon = self.targets.daemons().get(node)
        return (daemon.pid, *(worker.pid for worker in self.targets.workers(node))) if daemon is not None else ()


def checkpoint_folder(targets: LocalTargets, checkpoint_dir: str) -> Path | None:
    """Return a job's checkpoint folder on this machine; None: it lies elsewhere."""
    roots = [root for daemon in targets.daemons().values() if (root := daemon.flag("checkpoint-root")) is not None]
    if "://" in checkpoint_dir or not (roots or Path(checkpoint_dir).is_absolute()):
        return None
    return Path(*roots[:1], checkpoint_dir)


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
