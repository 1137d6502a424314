"""Injects faults, and undoes those that last.

It continues stopped processes when the fault's time is over or when it is closed. If its own process is killed, the
healer continues them. Only processes that were just found below the process that started the cluster are signalled: a
daemon is its child, a worker is a child of a daemon. A process with a reused number is neither.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from headway.daemon.base.errors import ConfigError, StoreError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.node_requests import drain
from headway.daemon.cluster.keys import Keys
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.local.fault_schedule import CUTTING, LASTING, REMOTE, Blow, FaultKind, Strike
from headway.daemon.local.outages import (
    Healer,
    LocalTargets,
    Outages,
    Process,
    can_destroy,
    destroy_connections,
    poison,
)

SLOW_STOPPED_S: Final = 0.08
SLOW_RUNNING_S: Final = 0.02
NUM_FLAPS: Final = 3
ETCD_TIMEOUT_S: Final = 10.0
ETCD_RESTART_S: Final = 60.0
POLL_S: Final = 0.1

TargetT = TypeVar("TargetT")


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
        self._healer = Healer()
        self._outages = Outages(session, targets, self._healer)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Injector":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def now_s(self) -> float:
        """Return the seconds since it was made: the clock of blows."""
        return time.monotonic() - self._began

    @property
    def _targets(self) -> LocalTargets:
        assert self._local_targets is not None, "refused before"
        return self._local_targets

    def refuse(self, kinds: Sequence[FaultKind]) -> None:
        """Raise ConfigError for the first kind that is impossible on this cluster."""
        for kind in kinds:
            if self._local_targets is None and kind not in REMOTE:
                what = "needs a cluster of this machine (`headway up`)"
                raise ConfigError(f"{what}; other clusters allow: {', '.join(sorted(REMOTE))}", f"--faults {kind}")
            if kind in CUTTING and not can_destroy():
                raise ConfigError("needs root", f"--faults {kind}")

    async def strike(self, strike: Strike, view: ClusterView) -> Blow | None:
        """Inject a fault. Return its target, or None when no target exists. A fault that lasts continues in the
        background.
        """
        began_s = self.now_s
        if (hit := await self._hit(strike, view)) is None:
            return None
        target = f"{hit.target} for {strike.seconds:.1f} s" if strike.kind in LASTING else hit.target
        number, kind, until_s = strike.number, strike.kind.value, began_s if hit.lasting is None else None
        blow = Blow(
            number=number, kind=kind, target=target, at_s=began_s, until_s=until_s, takes_worker=hit.takes_worker
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
        self._healer.close()

    async def finish(self) -> None:
        """Wait for the end of every lasting fault; the longest strike bounds the wait."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _until_over(self, blow: Blow, lasting: Awaitable[None]) -> None:
        try:
            await lasting
        finally:
            blow.until_s = self.now_s

    async def _hit(self, strike: Strike, view: ClusterView) -> Hit | None:
        match strike.kind:
            case FaultKind.LEASE_LOSS | FaultKind.LEADER_LOSS | FaultKind.DRAIN:
                return await self._by_etcd(strike, view)
            case FaultKind.CORRUPT | FaultKind.TRUNCATE:
                return self._damage(strike)
            case FaultKind.ETCD_STOP | FaultKind.ETCD_KILL:
                return self._at_etcd(strike)
            case FaultKind.STORAGE_AWAY | FaultKind.POISON_JOB:
                return self._at_job(strike, view)
            case FaultKind.KILL | FaultKind.WORKER_PAUSE | FaultKind.SLOW | FaultKind.LINK_CUT:
                return await self._at_worker(strike, view)
            case FaultKind.DAEMON_KILL | FaultKind.LEADER_KILL | FaultKind.PAUSE | FaultKind.FLAP:
                return self._at_daemon(strike, view)
            case FaultKind.PARTITION | FaultKind.UNREACHABLE | FaultKind.DISK_FULL | FaultKind.IDLE_CONNECTIONS:
                return self._at_node(strike, view)

    async def _at_worker(self, strike: Strike, view: ClusterView) -> Hit | None:
        if (victim := _pick(self._plan_workers(view), strike)) is None:
            return None
        match strike.kind:
            case FaultKind.KILL:
                _kill(victim.pid)
                return Hit(f"{victim.name} (pid {victim.pid})", takes_worker=True)
            case FaultKind.LINK_CUT:
                number = await asyncio.to_thread(destroy_connections, [victim.pid])
                return Hit(f"{number} connections of {victim.name}")
        stopped = self._slow if strike.kind is FaultKind.SLOW else self._pause
        return Hit(victim.name, stopped([victim.pid], strike.seconds))

    def _at_daemon(self, strike: Strike, view: ClusterView) -> Hit | None:
        daemons = self._daemons()
        if strike.kind is FaultKind.LEADER_KILL:
            leader = view.leader.node if view.leader is not None else ""
            daemons = [daemon for daemon in daemons if daemon.name == leader]
        if (victim := _pick(daemons, strike)) is None:
            return None
        if strike.kind in (FaultKind.DAEMON_KILL, FaultKind.LEADER_KILL):
            in_plan = any(worker.name == f"worker of {victim.name}" for worker in self._plan_workers(view))
            _kill(victim.pid)
            return Hit(f"{victim.name} (pid {victim.pid})", takes_worker=in_plan)
        pids = [victim.pid, *(worker.pid for worker in self._targets.workers(victim.name))]
        stopped = self._flap if strike.kind is FaultKind.FLAP else self._pause
        return Hit(victim.name, stopped(pids, strike.seconds))

    def _at_etcd(self, strike: Strike) -> Hit | None:
        if (etcd := self._targets.etcd()) is None:
            return None
        if strike.kind is FaultKind.ETCD_STOP:
            return Hit(etcd.name, self._pause([etcd.pid], strike.seconds))
        _kill(etcd.pid)
        return Hit(f"etcd (pid {etcd.pid})", self._another_etcd(etcd.pid))

    async def _another_etcd(self, pid: int) -> None:
        """Wait until the cluster's supervisor has restarted etcd, within a limit."""
        deadline = time.monotonic() + ETCD_RESTART_S
        while time.monotonic() < deadline:
            etcd = self._targets.etcd()
            if etcd is not None and etcd.pid != pid:
                return
            await asyncio.sleep(POLL_S)

    async def _pause(self, pids: Sequence[int], seconds: float) -> None:
        try:
            for pid in pids:
                self._healer.stop(pid)
            await asyncio.sleep(seconds)
        finally:
            for pid in reversed(pids):
                self._healer.go_on(pid)

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
        if (path := _pick(self._targets.layer_files(), strike)) is None:
            return None
        try:
            with path.open("r+b") as file:
                offset = int(strike.share * file.seek(0, os.SEEK_END))
                if strike.kind is FaultKind.TRUNCATE:
                    file.truncate(offset)
                else:
                    file.seek(offset)
                    byte = file.read(1)
                    file.seek(offset)
                    file.write(bytes([byte[0] ^ (1 << strike.ordinal % 8)]) if byte else b"")
        except FileNotFoundError:
            return None  # replaced by a newer file after it was listed
        return Hit(f"{'/'.join(path.parts[-5:])} at byte {offset}")

    def _at_node(self, strike: Strike, view: ClusterView) -> Hit | None:
        names = [daemon.name for daemon in self._daemons()]
        if (name := _pick(names, strike)) is None:
            return None
        others, seconds = [other for other in names if other != name], strike.seconds
        match strike.kind:
            case FaultKind.PARTITION:
                return Hit(name, self._outages.parted(name, seconds))
            case FaultKind.DISK_FULL:
                return Hit(name, self._outages.full_disk(name, seconds))
            case FaultKind.UNREACHABLE if others:
                other = others[int(strike.share * len(others))]
                return Hit(f"{name} and {other}", self._outages.parted(name, seconds, other=other))
            case FaultKind.IDLE_CONNECTIONS if name in view.nodes:
                return Hit(name, self._outages.idle_connections(view.nodes[name].address, seconds))
        return None

    def _at_job(self, strike: Strike, view: ClusterView) -> Hit | None:
        job: JobView | None = next((each for each in view.jobs_in_order() if self._job in (None, each.name)), None)
        if job is None or job.submission is None:
            return None
        if strike.kind is FaultKind.STORAGE_AWAY:
            folder = self._targets.checkpoint_folder(job.submission.spec.fault.checkpoint_dir)
            if folder is None or not folder.exists():
                return None
            return Hit(str(folder), self._outages.storage_away(folder, strike.seconds))
        name = f"chaos-poison-{strike.number:04d}"
        what, key, value = poison(strike.ordinal, name, job.submission)
        prefix = key if key == Keys.node(name) else Keys.job(name)
        return Hit(what, self._outages.poisoned(key, value, prefix, strike.seconds))

    async def _by_etcd(self, strike: Strike, view: ClusterView) -> Hit | None:
        if (name := _pick(self._allowed(sorted(view.nodes)), strike)) is None:
            return None
        try:
            async with asyncio.timeout(ETCD_TIMEOUT_S):
                if strike.kind is FaultKind.DRAIN:
                    await drain(self._session, name)
                    return Hit(name)
                is_leader = strike.kind is FaultKind.LEADER_LOSS
                entry = await self._session.client.get(Keys.LEADER if is_leader else Keys.node(name))
                if entry is None or not entry.lease_id:
                    return None
                await self._session.client.revoke_lease(entry.lease_id)
        except (StoreError, ConfigError, TimeoutError):
            return None  # etcd is unreachable, or the node has left in the meantime
        return Hit("the leader's lease" if is_leader else f"the lease of {name}")

    def _allowed(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not self._nodes or name in self._nodes]

    def _daemons(self) -> list[Process]:
        daemons = self._targets.daemons()
        return [daemons[name] for name in self._allowed(daemons)]

    def _plan_workers(self, view: ClusterView) -> list[Process]:
        """Return the workers that compute a stage now, if they are processes below their daemons."""
        running = {
            (record.node, record.pid)
            for job in view.jobs.values()
            if job.plan is not None and (self._job is None or job.name == self._job)
            for record in job.workers_of(job.plan).values()
        }
        nodes = self._allowed(sorted({node for node, _ in running}))
        return [process for node in nodes for process in self._targets.workers(node) if (node, process.pid) in running]


def _pick(targets: Sequence[TargetT], strike: Strike) -> TargetT | None:
    return targets[strike.ordinal % len(targets)] if targets else None


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
