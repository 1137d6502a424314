"""Injects faults, and undoes those that last.

It continues stopped processes when the fault's time is over or when it is closed. If its own process is killed, a shell
at the end of a pipe continues them. Only processes that were just found below the process that started the cluster are
signalled: a daemon is its child, a worker is a child of a daemon. A process with a reused number is neither.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

from headway.daemon.base.errors import ConfigError, StoreError
from headway.daemon.client.cluster_access import CLUSTER_FILE, ClusterSession, read_cluster_file
from headway.daemon.client.node_requests import drain
from headway.daemon.cluster.keys import Keys
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.local.fault_schedule import REMOTE, Blow, FaultKind, Strike
from headway.daemon.local.processes import LastWill

SLOW_STOPPED_S: Final = 0.08
SLOW_RUNNING_S: Final = 0.02
NUM_FLAPS: Final = 3
ETCD_TIMEOUT_S: Final = 10.0
ETCD_RESTART_S: Final = 60.0
POLL_S: Final = 0.1

TargetT = TypeVar("TargetT")


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


class Hit(NamedTuple):
    """What a fault has met."""

    target: str
    lasting: Awaitable[None] | None = None
    """Work that goes on while the fault lasts; None: it is over."""
    takes_worker: bool = False


class Injector:
    """Injects faults into one cluster. An async context manager: leaving it undoes all faults."""

    def __init__(
        self,
        session: ClusterSession,
        *,
        targets: LocalTargets | None,
        job: str | None = None,
        nodes: Sequence[str] = (),
    ) -> None:
        """targets None: not a cluster of this machine. job: strike at its workers; None: any. nodes: strike only at
        these; none: all.
        """
        self._session = session
        self._local_targets = targets
        self._job = job
        self._nodes = frozenset(nodes)
        self._began = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self.will = LastWill()
        """Undoes what lasts if this process is killed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def now_s(self) -> float:
        """Return the seconds since it was made: the clock of blows."""
        return time.monotonic() - self._began

    @property
    def targets(self) -> LocalTargets:
        """Return the processes of a cluster on this machine."""
        assert self._local_targets is not None, "refused before"
        return self._local_targets

    def refuse(self, kinds: Sequence[str]) -> None:
        """Raise ConfigError for the first kind that is impossible on this cluster."""
        for kind in kinds:
            if self._local_targets is None and kind not in REMOTE:
                what = "needs a cluster of this machine (`headway up`)"
                raise ConfigError(f"{what}; other clusters allow: {', '.join(REMOTE)}", f"--faults {kind}")

    async def strike(self, strike: Strike, view: ClusterView) -> Blow | None:
        """Inject a fault. Return its target, or None when no target exists. A fault that lasts continues in the
        background.
        """
        began_s = self.now_s
        if (hit := await self.hit(strike, view)) is None:
            return None
        blow = Blow(
            number=strike.number,
            kind=str(strike.kind),
            target=hit.target,
            at_s=began_s,
            until_s=began_s if hit.lasting is None else None,
            takes_worker=hit.takes_worker,
        )
        if hit.lasting is not None:
            task = asyncio.create_task(self._until_over(blow, hit.lasting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return blow

    async def close(self) -> None:
        """End lasting faults, and continue every stopped process. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await self.finish()
        self.will.close()

    async def finish(self) -> None:
        """Wait for the end of every lasting fault; the longest strike bounds the wait."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _until_over(self, blow: Blow, lasting: Awaitable[None]) -> None:
        try:
            await lasting
        finally:
            blow.until_s = self.now_s

    async def hit(self, strike: Strike, view: ClusterView) -> Hit | None:
        """Begin a fault. Return what it has met, or None when no target exists."""
        match strike.kind:
            case FaultKind.LEASE_LOSS | FaultKind.LEADER_LOSS | FaultKind.DRAIN:
                return await self._by_etcd(strike, view)
            case FaultKind.CORRUPT | FaultKind.TRUNCATE:
                return self._damage(strike)
            case FaultKind.ETCD_STOP | FaultKind.ETCD_KILL:
                return self._at_etcd(strike)
            case FaultKind.KILL | FaultKind.WORKER_PAUSE | FaultKind.SLOW:
                return self._at_worker(strike, view)
        return self._at_daemon(strike, view)

    def _at_worker(self, strike: Strike, view: ClusterView) -> Hit | None:
        if (victim := pick(self.plan_workers(view), strike)) is None:
            return None
        if strike.kind == FaultKind.KILL:
            _signal(victim.pid, signal.SIGKILL)
            return Hit(f"{victim.name} (pid {victim.pid})", takes_worker=True)
        stopped = self._slow if strike.kind == FaultKind.SLOW else self._pause
        return lasting(victim.name, strike, stopped([victim.pid], strike.seconds))

    def _at_daemon(self, strike: Strike, view: ClusterView) -> Hit | None:
        daemons = self.daemons()
        if strike.kind == FaultKind.LEADER_KILL:
            leader = view.leader.node if view.leader is not None else ""
            daemons = [daemon for daemon in daemons if daemon.name == leader]
        if (victim := pick(daemons, strike)) is None:
            return None
        if strike.kind in (FaultKind.DAEMON_KILL, FaultKind.LEADER_KILL):
            in_plan = any(worker.name == f"worker of {victim.name}" for worker in self.plan_workers(view))
            _signal(victim.pid, signal.SIGKILL)
            return Hit(f"{victim.name} (pid {victim.pid})", takes_worker=in_plan)
        pids = [victim.pid, *(worker.pid for worker in self.targets.workers(victim.name))]
        stopped = self._flap if strike.kind == FaultKind.FLAP else self._pause
        return lasting(victim.name, strike, stopped(pids, strike.seconds))

    def _at_etcd(self, strike: Strike) -> Hit | None:
        if (etcd := self.targets.etcd()) is None:
            return None
        if strike.kind == FaultKind.ETCD_STOP:
            return lasting(etcd.name, strike, self._pause([etcd.pid], strike.seconds))
        _signal(etcd.pid, signal.SIGKILL)
        return Hit(f"etcd (pid {etcd.pid})", self._another_etcd(etcd.pid))

    async def _another_etcd(self, pid: int) -> None:
        """Wait until the cluster's supervisor has restarted etcd, within a limit."""
        deadline = time.monotonic() + ETCD_RESTART_S
        while time.monotonic() < deadline:
            etcd = self.targets.etcd()
            if etcd is not None and etcd.pid != pid:
                return
            await asyncio.sleep(POLL_S)

    async def _pause(self, pids: Sequence[int], seconds: float) -> None:
        try:
            for pid in pids:
                self.will.promise("kill", "-CONT", str(pid))
                _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            for pid in reversed(pids):
                _signal(pid, signal.SIGCONT)

    async def _flap(self, pids: Sequence[int], seconds: float) -> None:
        for _ in range(NUM_FLAPS):
            await self._pause(pids, seconds / (2 * NUM_FLAPS))
            await asyncio.sleep(seconds / (2 * NUM_FLAPS))

    async def _slow(self, pids: Sequence[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await self._pause(pids, SLOW_STOPPED_S)
            await asyncio.sleep(SLOW_RUNNING_S)

    def _damage(self, strike: Strike) -> Hit | None:
        if (path := pick(self.targets.layer_files(), strike)) is None:
            return None
        try:
            with path.open("r+b") as file:
                offset = int(strike.share * file.seek(0, os.SEEK_END))
                if strike.kind == FaultKind.TRUNCATE:
                    file.truncate(offset)
                else:
                    file.seek(offset)
                    byte = file.read(1)
                    file.seek(offset)
                    file.write(bytes([byte[0] ^ (1 << strike.ordinal % 8)]) if byte else b"")
        except FileNotFoundError:
            return None  # replaced by a newer file after it was listed
        return Hit(f"{'/'.join(path.parts[-5:])} at byte {offset}")

    async def _by_etcd(self, strike: Strike, view: ClusterView) -> Hit | None:
        if (name := pick(self._allowed(sorted(view.nodes)), strike)) is None:
            return None
        try:
            async with asyncio.timeout(ETCD_TIMEOUT_S):
                if strike.kind == FaultKind.DRAIN:
                    await drain(self._session, name)
                    return Hit(name)
                is_leader = strike.kind == FaultKind.LEADER_LOSS
                entry = await self._session.client.get(Keys.LEADER if is_leader else Keys.node(name))
                if entry is None or not entry.lease_id:
                    return None
                await self._session.client.revoke_lease(entry.lease_id)
        except (StoreError, ConfigError, TimeoutError):
            return None  # etcd is unreachable, or the node has left in the meantime
        return Hit("the leader's lease" if is_leader else f"the lease of {name}")

    def _allowed(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not self._nodes or name in self._nodes]

    def daemons(self) -> list[Process]:
        """Return the daemons that may be struck at."""
        daemons = self.targets.daemons()
        return [daemons[name] for name in self._allowed(daemons)]

    def plan_workers(self, view: ClusterView) -> list[Process]:
        """Return the workers that compute a stage now, if they are processes below their daemons."""
        running = {
            (record.node, record.pid)
            for job in view.jobs.values()
            if job.plan is not None and (self._job is None or job.name == self._job)
            for record in job.workers_of(job.plan).values()
        }
        nodes = self._allowed(sorted({node for node, _ in running}))
        return [process for node in nodes for process in self.targets.workers(node) if (node, process.pid) in running]


def pick(targets: Sequence[TargetT], strike: Strike) -> TargetT | None:
    """Return the target of a strike's ordinal; None: there is none."""
    return targets[strike.ordinal % len(targets)] if targets else None


def lasting(target: str, strike: Strike, work: Awaitable[None]) -> Hit:
    """Return the hit of a fault that lasts for the strike's seconds."""
    return Hit(f"{target} for {strike.seconds:.1f} s", work)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
