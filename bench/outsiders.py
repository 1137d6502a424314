"""Outsiders beside a training job: 5,000 idle connections, 1,000 slow streams, 10,000 handshakes a minute.

A cluster of two nodes on this machine trains one job. Windows with strangers at the ports of daemons and workers and
windows without take turns. Layers take a set time, as on a GPU: a machine of two cores has little else to do for them.

throughput_ratio: batches a second with strangers over those of the window without beside it. Beside it: whether a node
lost its lease or the job went back, the most memory of a daemon and a worker, and how many cores daemons, workers and
the strangers themselves kept busy: with the strangers on the same machine, theirs is part of what the job does without.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from rigs.measure import Figure, progress, report

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Device, Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec, PlacementSpec
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.reports.job_report import report_job
from headway.stages.spec import ModelSpec, TrainSpec
from tests.rigs.paces import paced_layers

ATTACK = Path(__file__).parent / "rigs" / "outsiders_attack.py"
KINDS = ("idle", "slow", "handshakes")
"""Kinds of strangers: a process each, so that none waits for another."""
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
JOB = "beside-outsiders"
MODEL = ModelSpec(
    hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)
RAMP_S = 5.0
"""Seconds between the strangers' first steps and the window."""
START_LIMIT_S = 120.0
END_LIMIT_S = 30.0


@dataclass
class Seen:
    """The state of the cluster after the attack."""

    memory_mb: dict[str, float] = field(default_factory=dict)
    incarnations: set[str] = field(default_factory=set)
    num_nodes: list[int] = field(default_factory=list)
    num_rollbacks: int = 0
    generations: set[int] = field(default_factory=set)
    reached: Counter[str] = field(default_factory=Counter)
    """Number of times that strangers reached each state, in all windows."""
    attacked_s: float = 0.0
    """Seconds of windows and the time before them."""
    cores: dict[str, list[float]] = field(default_factory=dict)
    """Kept busy in each window, by `daemons with strangers` and the like."""


def job_spec() -> JobSpec:
    """Endless for a bench: two stages, snapshots as usual."""
    spec = JobSpec(
        job=JobSection(name=JOB, seed=1),
        model=MODEL,
        train=TrainSpec(batches=1_000_000, microbatches=4, microbatch_size=2, sequence_length=64),
        fault=FaultSpec(snapshot_every=50, copies=2, checkpoint_every=0),
        placement=PlacementSpec(min_nodes=2, max_nodes=2, recut=False),
    )
    return resolve_job(
        spec, job_file=Path("outsiders.toml"), devices=(Device(kind="cpu"),), cache_dir=default_cache_dir()
    )


class Beside:
    """The job, and strangers beside it in every other window."""

    def __init__(self, cluster: LocalCluster, session: ClusterSession, options: argparse.Namespace) -> None:
        self._cluster = cluster
        self._session = session
        self._options = options
        self.seen = Seen()

    async def window(self, *, is_attacked: bool) -> float:
        """Batches a second."""
        attacks = await self._begin_attacks() if is_attacked else []
        began_at = time.monotonic()
        await asyncio.sleep(RAMP_S)
        busy_before, moments = self._busy_s(), list[tuple[float, int]]()
        until = time.monotonic() + self._options.window_s
        while time.monotonic() < until:
            view = await self._session.view()
            self._look(view)
            progress_now = view.jobs[JOB].progress
            batch = progress_now.batch if progress_now is not None else 0
            if not moments or moments[-1][1] != batch:
                moments.append((time.monotonic(), batch))
            await asyncio.sleep(0.2)
        which = "with" if is_attacked else "without"
        for who, busy_s in self._busy_s().items():
            cores = (busy_s - busy_before.get(who, 0.0)) / self._options.window_s
            self.seen.cores.setdefault(f"{who} {which} strangers", []).append(cores)
        self.seen.attacked_s += time.monotonic() - began_at if is_attacked else 0.0
        for attack in attacks:
            async with asyncio.timeout(END_LIMIT_S):
                out, _ = await attack.communicate(b"")
            self.seen.reached.update(json.loads(out))
        (began, first), (ended, last) = moments[0], moments[-1]
        progress(f"{which} strangers: batches {first} to {last}, {len(moments)} looks")
        return (last - first) / (ended - began) if ended > began else 0.0

    async def _begin_attacks(self) -> list[asyncio.subprocess.Process]:
        """Returns when each has begun."""
        view = await self._session.view()
        daemons = {node.name: node.address for node in view.nodes.values()}
        plan = view.jobs[JOB].plan
        assert plan is not None
        workers = [record.address for record in view.jobs[JOB].workers_of(plan).values()]
        where = [
            *("--targets", *daemons.values(), *workers),
            *("--daemons", *daemons.values()),
            *("--nodes", *daemons),
            *("--certificates", str(self._cluster.address.certificates)),
        ]
        attacks = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                str(ATTACK),
                *where,
                *(f"--{kind}={getattr(self._options, kind) if kind == own else 0}" for kind in KINDS),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for own in KINDS
        ]
        for attack in attacks:
            assert attack.stdout is not None
            async with asyncio.timeout(START_LIMIT_S):
                await attack.stdout.readline()
        return attacks

    def _busy_s(self) -> dict[str, float]:
        """Processor time of the daemons and of the workers so far."""
        pids = list(self._cluster.node_pids.values())
        workers = [child for pid in pids for child in children_of(pid)]
        return {"daemons": sum(map(processor_s, pids)), "workers": sum(map(processor_s, workers))}

    def _look(self, view: ClusterView) -> None:
        seen, job = self.seen, view.jobs[JOB]
        seen.incarnations |= {node.incarnation for node in view.nodes.values()}
        seen.num_nodes.append(len(view.nodes))
        seen.num_rollbacks = report_job(job, view.nodes).safety.num_rollbacks
        seen.generations |= {job.plan.generation} if job.plan is not None else set()
        for name, pid in self._cluster.node_pids.items():
            family = [(f"daemon {name}", pid), *((f"a worker of {name}", child) for child in children_of(pid))]
            for what, one in family:
                seen.memory_mb[what] = max(seen.memory_mb.get(what, 0.0), resident_mb(one))


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def resident_mb(pid: int) -> float:
    """Return a process's memory; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
    except (OSError, IndexError):
        return 0.0


def processor_s(pid: int) -> float:
    """Return a process's CPU seconds; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S
    except (OSError, IndexError):
        return 0.0


async def measure(options: argparse.Namespace) -> tuple[list[float], Seen, float]:
    """The ratios of all pairs of windows, what was seen, and the memory of a daemon before the first stranger."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        async with (
            LocalCluster(Path(folder), num_nodes=2, environment=paced_layers(Path(folder), options.layer_s)) as cluster,
            ClusterSession(cluster.address) as session,
        ):
            await submit(session, replace(job_spec()))
            await wait_for_phase(session, JOB, frozenset({Phase.RUNNING}), timeout_s=START_LIMIT_S)
            beside = Beside(cluster, session, options)
            await beside.window(is_attacked=False)  # the first batches are slower
            calm_mb = max(mb for what, mb in beside.seen.memory_mb.items() if what.startswith("daemon"))
            ratios = []
            for number in range(options.pairs):
                found = {}
                for is_attacked in (True, False) if number % 2 else (False, True):
                    found[is_attacked] = await beside.window(is_attacked=is_attacked)
                ratios.append(found[True] / found[False])
                progress(f"{found[True]:.2f} batches/s with strangers, {found[False]:.2f} without: {ratios[-1]:.3f}")
            cluster.force.set()
    return ratios, beside.seen, calm_mb


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="windows with strangers, each beside one without")
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--slow", type=int, default=1000)
    parser.add_argument("--handshakes", type=float, default=10_000, help="a minute")
    parser.add_argument("--layer-s", type=float, default=0.005, help="of a layer's forward; twice that back")
    options = parser.parse_args()
    ratios, seen, calm_mb = asyncio.run(measure(options))
    daemon_mb = max(mb for what, mb in seen.memory_mb.items() if what.startswith("daemon"))
    worker_mb = max(mb for what, mb in seen.memory_mb.items() if what.startswith("a worker"))
    is_whole = len(seen.incarnations) == 2 and min(seen.num_nodes) == 2 and not seen.num_rollbacks
    extra: dict[str, object] = {
        "lost_leases_or_rollbacks": not is_whole,
        "rollbacks": seen.num_rollbacks,
        "plans": len(seen.generations),
        "daemon_mb_before": round(calm_mb),
        "daemon_mb_most": round(daemon_mb),
        "worker_mb_most": round(worker_mb),
        "handshakes_a_minute": round(60_000 * seen.reached["handshakes"] / max(seen.reached["ms of handshakes"], 1)),
        "cores": {who: round(sum(cores) / len(cores), 2) for who, cores in sorted(seen.cores.items())},
        "cores of strangers": round(seen.reached["cpu ms"] / 1000 / max(seen.attacked_s, 1), 2),
        "idle_at_once": seen.reached["most idle at once"] // options.pairs,
        "reached": dict(seen.reached),
    }
    for name, value in extra.items():
        progress(f"{name}: {value}")
    status = report(
        "Outsiders beside a job", {"throughput_ratio": Figure.of(ratios)}, bars={"throughput_ratio": 0.95}, extra=extra
    )
    return status or (0 if is_whole else 1)


if __name__ == "__main__":
    sys.exit(main())
