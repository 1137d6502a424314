"""The injector's effect on real processes and files, and how it is undone."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.cluster.records import PlanRecord, WorkerPart, WorkerRecord, WorkerState
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.local.fault_schedule import FaultKind, Strike
from headway.daemon.local.injector import Injector, LocalTargets
from tests.chaos.processes import stand_ins

NO_SESSION = cast(ClusterSession, None)
"""Nothing here asks etcd."""
Pids = tuple[int, int, int, int]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store" / "job" / "1" / "20"
    folder.mkdir(parents=True)
    (folder / "embed.safetensors").write_bytes(bytes(1000))
    (folder / "head.partial").write_bytes(bytes(1000))
    return tmp_path / "store"


@pytest.fixture
def pids(store: Path) -> Iterator[Pids]:
    with stand_ins(store) as found:
        yield found


def strike(kind: FaultKind, *, seconds: float = 0.0, share: float = 0.5) -> Strike:
    return Strike(number=1, at_s=0.0, kind=kind, ordinal=12, seconds=seconds, share=share)


def view_with(worker_pid: int) -> ClusterView:
    """A job of one stage, whose worker has this pid."""
    stage = WorkerPart(node="node-1", node_incarnation="x", device_index=0, layers=("embed",), depth=1)
    job = JobView(name="job", plan=PlanRecord(generation=1, timeline=1, workers=(stage,)))
    job.workers[1, 0] = WorkerRecord(
        node="node-1", incarnation="w", address="", pid=worker_pid, state=WorkerState.RUNNING
    )
    return ClusterView(jobs={"job": job})


def state_of(pid: int) -> str:
    """`T` when it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def until_state(pid: int, *, is_stopped: bool) -> None:
    async with asyncio.timeout(30):
        while (state_of(pid) == "T") is not is_stopped:
            await asyncio.sleep(0.005)


async def test_a_paused_node_is_stopped_whole_and_goes_on(pids: Pids) -> None:
    """Daemon and worker are stopped, and go on by themselves; etcd and the cluster's process are left alone."""
    cluster, daemon, worker, etcd = pids
    async with Injector(NO_SESSION, targets=LocalTargets(cluster)) as injector:
        blow = await injector.strike(strike(FaultKind.PAUSE, seconds=0.3), ClusterView())
        assert blow is not None
        await until_state(daemon, is_stopped=True)
        await until_state(worker, is_stopped=True)
        assert blow.until_s is None
        assert state_of(etcd) != "T"
        assert state_of(cluster) != "T"
        await injector.finish()
        await until_state(daemon, is_stopped=False)
        await until_state(worker, is_stopped=False)
        assert blow.until_s is not None
        assert blow.until_s - blow.at_s >= 0.3


async def test_leaving_lets_everything_go_on(pids: Pids) -> None:
    """etcd is stopped for an hour; the injector is closed: etcd goes on."""
    cluster, _, _, etcd = pids
    injector = Injector(NO_SESSION, targets=LocalTargets(cluster))
    await injector.strike(strike(FaultKind.ETCD_STOP, seconds=3600), ClusterView())
    await until_state(etcd, is_stopped=True)
    await injector.close()
    await until_state(etcd, is_stopped=False)


_STRIKER = """
import asyncio, sys
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.local.fault_schedule import Strike
from headway.daemon.local.injector import Injector, LocalTargets
async def main():
    injector = Injector(None, targets=LocalTargets(int(sys.argv[1])))
    strike = Strike(number=1, at_s=0.0, kind="etcd-stop", ordinal=0, seconds=3600, share=0.5)
    await injector.strike(strike, ClusterView())
    await asyncio.sleep(3600)
asyncio.run(main())
"""


async def test_what_was_stopped_goes_on_when_the_injector_is_killed(pids: Pids) -> None:
    """A process stops etcd and is killed: etcd goes on."""
    with subprocess.Popen([sys.executable, "-c", _STRIKER, str(pids[0])]) as striker:
        await until_state(pids[3], is_stopped=True)
        striker.kill()
    await until_state(pids[3], is_stopped=False)


async def test_a_worker_of_the_plan_is_killed_and_no_stranger(pids: Pids) -> None:
    """The worker that etcd names is killed; a pid in etcd that is none of the cluster's processes is left alone."""
    cluster, _, worker, _ = pids
    async with Injector(NO_SESSION, targets=LocalTargets(cluster), job="job") as injector:
        assert await injector.strike(strike(FaultKind.KILL), view_with(os.getpid())) is None
        blow = await injector.strike(strike(FaultKind.KILL), view_with(worker))
        assert blow is not None
        assert blow.takes_worker
        async with asyncio.timeout(5):
            while LocalTargets(cluster).workers("node-1"):
                await asyncio.sleep(0.005)


async def test_one_bit_of_a_finished_file_is_flipped(pids: Pids, store: Path) -> None:
    """Exactly one bit of 1000 zero bytes is set afterwards; the file that is still being written is left alone."""
    async with Injector(NO_SESSION, targets=LocalTargets(pids[0])) as injector:
        blow = await injector.strike(strike(FaultKind.CORRUPT), ClusterView())
    damaged = (store / "job/1/20/embed.safetensors").read_bytes()
    assert sum(byte.bit_count() for byte in damaged) == 1
    assert len(damaged) == 1000
    assert not any((store / "job/1/20/head.partial").read_bytes())
    assert blow is not None
    assert blow.target.endswith("embed.safetensors at byte 500")


async def test_a_file_is_cut_short(pids: Pids, store: Path) -> None:
    async with Injector(NO_SESSION, targets=LocalTargets(pids[0])) as injector:
        await injector.strike(strike(FaultKind.TRUNCATE), ClusterView())
    assert (store / "job/1/20/embed.safetensors").stat().st_size == 500


async def test_a_node_that_is_not_named_is_left_alone(pids: Pids) -> None:
    async with Injector(NO_SESSION, targets=LocalTargets(pids[0]), nodes=("node-9",)) as injector:
        assert await injector.strike(strike(FaultKind.DAEMON_KILL), ClusterView()) is None
    os.kill(pids[1], signal.SIGCONT)  # it is there


async def test_a_distant_cluster_is_struck_by_its_records_only(pids: Pids) -> None:
    """A kill needs this machine's processes: refused in a line that says what is possible."""
    async with Injector(NO_SESSION, targets=None) as injector:
        injector.refuse([FaultKind.LEASE_LOSS, FaultKind.DRAIN])
        with pytest.raises(ConfigError, match="lease-loss"):
            injector.refuse([FaultKind.DRAIN, FaultKind.KILL])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as lonely:
        with pytest.raises(ConfigError, match="no daemon"):
            LocalTargets(lonely.pid)
        lonely.kill()
