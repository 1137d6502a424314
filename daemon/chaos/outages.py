"""Faults that last: each coroutine takes a resource from a local cluster for some seconds and returns it."""

import asyncio
import os
import resource
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from headway.daemon.chaos.connections import Parting
from headway.daemon.chaos.targets import LocalTargets
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.errors import StoreError
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import SpecRecord

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
