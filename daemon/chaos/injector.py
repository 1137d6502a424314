"""Injects faults, and undoes those that last.

It continues stopped processes when the fault's time is over or when it is closed. If its own process is killed, the
healer continues them.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from headway.daemon.chaos.connections import can_destroy, destroy_connections
from headway.daemon.chaos.fault_schedule import CUTTING, REMOTE, Blow, FaultKind, Strike
from headway.daemon.chaos.outages import Healer, Outages, poison
from headway.daemon.chaos.targets import LocalTargets, Process
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.node_requests import drain
from headway.daemon.errors import ConfigError, StoreError
from headway.daemon.records.keys import Keys
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView

SLOW_STOPPED_S: Final = 0.08
SLOW_RUNNING_S: Final = 0.02
NUM_FLAPS: Final = 3
ETCD_TIMEOUT_S: Final = 10.0
ETCD_RESTART_S: Final = 60.0
POLL_S: Final = 0.1

TargetT = TypeVar("TargetT")


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
        these; none:
        all.
        """
        self._session = session
        self._targets = targets
        self._job = job
        self._nodes = frozenset(nodes)
        self._began = time.monotonic()
        self._healer = Healer()
        self._outages = Outages(session, targets, self._healer) if targets is not None else None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Injector":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def now_s(self) -> float:
        """Return the seconds since it was made: the clock of blows."""
        return time.monotonic() - self._began

    def refuse(self, kinds: Sequence[FaultKind]) -> None:
        """Raise ConfigError for the first kind that is impossible on this cluster."""
        for kind in kinds:
            if self._targets is None and kind not in REMOTE:
                possible = ", ".join(sorted(REMOTE))
                raise ConfigError(
                    f"needs a cluster of this machine (`headway up`); other clusters allow: {possible}",
                    f"--faults {kind}",
                )
            if kind in CUTTING and not can_destroy():
                raise ConfigError("needs root", f"--faults {kind}")

    async def strike(self, strike: Strike, view: ClusterView) -> Blow | None:
        """Inject a fault. Return its target, or None when no target exists. A fault that lasts continues in the
        background.
        """
        match strike.kind:
            case FaultKind.KILL:
                return self._kill_worker(strike, view)
            case FaultKind.DAEMON_KILL | FaultKind.LEADER_KILL:
                return self._kill_daemon(strike, view)
            case FaultKind.WORKER_PAUSE | FaultKind.PAUSE | FaultKind.FLAP | FaultKind.SLOW | FaultKind.ETCD_STOP:
                return self._stop_for_a_while(strike, view)
            case FaultKind.CORRUPT | FaultKind.TRUNCATE:
                return self._damage(strike)
            case FaultKind.ETCD_KILL:
                return self._kill_etcd(strike)
            case FaultKind.LEASE_LOSS | FaultKind.LEADER_LOSS | FaultKind.DRAIN:
                return await self._by_etcd(strike, view)
            case FaultKind.LINK_CUT:
                return await self._cut_links(strike, view)
            case FaultKind.PARTITION | FaultKind.UNREACHABLE | FaultKind.DISK_FULL | FaultKind.IDLE_CONNECTIONS:
                return self._take_from_node(strike, view)
            case FaultKind.STORAGE_AWAY:
                return self._take_storage(strike, view)
            case FaultKind.POISON_JOB:
                return self._poison(strike, view)

    async def close(self) -> None:
        """End lasting faults, and continue every stopped process. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._healer.close()

    async def finish(self) -> None:
        """Wait for the end of every lasting fault; the longest strike bounds the wait."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- Kills --------------------------------------------------------------------------------------------------------

    def _kill_worker(self, strike: Strike, view: ClusterView) -> Blow | None:
        victim = _pick(self._plan_workers(view), strike)
        if victim is None:
            return None
        blow = self._blow(strike, f"{victim.name} (pid {victim.pid})", is_over=True, takes_worker=True)
        _send(victim.pid, signal.SIGKILL)
        return blow

    def _kill_daemon(self, strike: Strike, view: ClusterView) -> Blow | None:
        daemons = self._daemons()
        if strike.kind is FaultKind.LEADER_KILL:
            leader = view.leader.node if view.leader is not None else ""
            daemons = [daemon for daemon in daemons if daemon.name == leader]
        victim = _pick(daemons, strike)
        if victim is None:
            return None
        in_plan = any(worker.name == f"worker of {victim.name}" for worker in self._plan_workers(view))
        blow = self._blow(strike, f"{victim.name} (pid {victim.pid})", is_over=True, takes_worker=in_plan)
        _send(victim.pid, signal.SIGKILL)
        return blow

    def _kill_etcd(self, strike: Strike) -> Blow | None:
        assert self._targets is not None, "refused before"
        etcd = self._targets.etcd()
        if etcd is None:
            return None
        blow = self._blow(strike, f"etcd (pid {etcd.pid})")
        _send(etcd.pid, signal.SIGKILL)
        self._begin(self._until(blow, self._another_etcd(self._targets, etcd.pid)))
        return blow

    async def _another_etcd(self, targets: LocalTargets, pid: int) -> None:
        """Wait without limit until the cluster's supervisor has restarted etcd."""
        deadline = time.monotonic() + ETCD_RESTART_S
        while time.monotonic() < deadline:
            etcd = targets.etcd()
            if etcd is not None and etcd.pid != pid:
                return
            await asyncio.sleep(POLL_S)

    # --- Lasting faults
    # ------------------------------------------------------------------------------------------------

    def _stop_for_a_while(self, strike: Strike, view: ClusterView) -> Blow | None:
        assert self._targets is not None, "refused before"
        if strike.kind is FaultKind.ETCD_STOP:
            etcd = self._targets.etcd()
            victim, pids = etcd, [etcd.pid] if etcd is not None else []
        elif strike.kind in (FaultKind.WORKER_PAUSE, FaultKind.SLOW):
            victim = _pick(self._plan_workers(view), strike)
            pids = [victim.pid] if victim is not None else []
        else:
            victim = _pick(self._daemons(), strike)
            pids = [victim.pid, *(w.pid for w in self._targets.workers(victim.name))] if victim is not None else []
        if victim is None:
            return None
        blow = self._blow(strike, f"{victim.name} for {strike.seconds:.1f} s")
        lasting = {FaultKind.FLAP: self._flap, FaultKind.SLOW: self._slow}.get(strike.kind, self._pause)
        self._begin(self._until(blow, lasting(pids, strike.seconds)))
        return blow

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

    # --- Files, connections, records ----------------------------------------------------------------------------------

    def _damage(self, strike: Strike) -> Blow | None:
        assert self._targets is not None, "refused before"
        path = _pick(self._targets.layer_files(), strike)
        if path is None:
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
        return self._blow(strike, f"{'/'.join(path.parts[-5:])} at byte {offset}", is_over=True)

    async def _cut_links(self, strike: Strike, view: ClusterView) -> Blow | None:
        victim = _pick(self._plan_workers(view), strike)
        if victim is None:
            return None
        number = await asyncio.to_thread(destroy_connections, [victim.pid])
        return self._blow(strike, f"{number} connections of {victim.name}", is_over=True)

    def _take_from_node(self, strike: Strike, view: ClusterView) -> Blow | None:
        assert self._outages is not None, "refused before"
        names = [daemon.name for daemon in self._daemons()]
        name = _pick(names, strike)
        if name is None:
            return None
        target, others = name, [other for other in names if other != name]
        match strike.kind:
            case FaultKind.PARTITION:
                outage = self._outages.parted(name, strike.seconds)
            case FaultKind.DISK_FULL:
                outage = self._outages.full_disk(name, strike.seconds)
            case FaultKind.UNREACHABLE:
                if not others:
                    return None
                other = others[int(strike.share * len(others))]
                target = f"{name} and {other}"
                outage = self._outages.unreachable(name, other, strike.seconds)
            case _:
                if name not in view.nodes:
                    return None
                outage = self._outages.idle_connections(view.nodes[name].address, strike.seconds)
        blow = self._blow(strike, f"{target} for {strike.seconds:.1f} s")
        self._begin(self._until(blow, outage))
        return blow

    def _take_storage(self, strike: Strike, view: ClusterView) -> Blow | None:
        assert self._targets is not None, "refused before"
        assert self._outages is not None, "refused before"
        job = self._job_of(view)
        folder = self._targets.checkpoint_folder(job.spec.fault.checkpoint_dir) if job and job.spec else None
        if folder is None or not folder.exists():
            return None
        blow = self._blow(strike, f"{folder} for {strike.seconds:.1f} s")
        self._begin(self._until(blow, self._outages.storage_away(folder, strike.seconds)))
        return blow

    def _poison(self, strike: Strike, view: ClusterView) -> Blow | None:
        assert self._outages is not None, "refused before"
        job = self._job_of(view)
        if job is None or job.submission is None:
            return None
        name = f"chaos-poison-{strike.number:04d}"
        what, key, value = poison(strike.ordinal, name, job.submission)
        prefix = key if key == Keys.node(name) else Keys.job(name)
        blow = self._blow(strike, f"{what} for {strike.seconds:.1f} s")
        self._begin(self._until(blow, self._outages.poisoned(key, value, prefix, strike.seconds)))
        return blow

    def _job_of(self, view: ClusterView) -> JobView | None:
        """Return the job to strike at, or any."""
        return next((job for job in view.jobs_in_order() if self._job in (None, job.name)), None)

    async def _by_etcd(self, strike: Strike, view: ClusterView) -> Blow | None:
        names = sorted(name for name in view.nodes if not self._nodes or name in self._nodes)
        name = _pick(names, strike)
        if name is None:
            return None
        try:
            async with asyncio.timeout(ETCD_TIMEOUT_S):
                if strike.kind is FaultKind.DRAIN:
                    await drain(self._session, name)
                    return self._blow(strike, name, is_over=True)
                is_leader = strike.kind is FaultKind.LEADER_LOSS
                entry = await self._session.client.get(Keys.LEADER if is_leader else Keys.node(name))
                if entry is None or not entry.lease_id:
                    return None
                await self._session.client.revoke_lease(entry.lease_id)
        except (StoreError, ConfigError, TimeoutError):
            return None  # etcd is unreachable, or the node has left in the meantime
        return self._blow(strike, "the leader's lease" if is_leader else f"the lease of {name}", is_over=True)

    # --- Targets
    # ---------------------------------------------------------------------------------------------------------

    def _daemons(self) -> list[Process]:
        assert self._targets is not None, "refused before"
        return [d for name, d in self._targets.daemons().items() if not self._nodes or name in self._nodes]

    def _plan_workers(self, view: ClusterView) -> list[Process]:
        """Return the workers that compute a stage now, if they are processes below their daemons."""
        assert self._targets is not None, "refused before"
        running = {
            (record.node, record.pid)
            for job in view.jobs.values()
            if job.plan is not None and (self._job is None or job.name == self._job)
            for record in job.workers_of(job.plan).values()
        }
        nodes = sorted({node for node, _ in running if not self._nodes or node in self._nodes})
        return [process for node in nodes for process in self._targets.workers(node) if (node, process.pid) in running]

    def _blow(self, strike: Strike, target: str, *, is_over: bool = False, takes_worker: bool = False) -> Blow:
        now_s = self.now_s
        return Blow(
            number=strike.number,
            kind=strike.kind.value,
            target=target,
            at_s=now_s,
            until_s=now_s if is_over else None,
            takes_worker=takes_worker,
        )

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until(self, blow: Blow, work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            blow.until_s = self.now_s


def _pick(targets: Sequence[TargetT], strike: Strike) -> TargetT | None:
    return targets[strike.ordinal % len(targets)] if targets else None


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
