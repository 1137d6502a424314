"""Predicted over measured bytes of a job's boundaries in its nodes' stores: the most at one moment of a real run.

Each row is a cluster on this machine, whose nodes' folders of layer files are looked at every few milliseconds while a
job trains, takes snapshots, copies them and writes checkpoints. A card's pinned copy is not among them: there is none
beside a CPU.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rigs.measure import machine, progress, versions

from headway.daemon.base.machine_share import folder_in_memory
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Phase
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec, PlacementSpec
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.node.hardware import find_devices
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.planner import make_plan
from headway.stages.spec import ModelSpec, TrainSpec

NAME = "memory"
BAR = 0.1
LOOK_S = 0.004
TIMEOUT_S = 900.0
MODEL = ModelSpec(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=2048,
)
CASES = ((1, 1, 0), (1, 1, 20), (2, 2, 0), (2, 2, 20), (3, 2, 20), (3, 3, 0))
"""Nodes, copies, batches between two checkpoints."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run: bytes of all its nodes together, which share this machine."""

    nodes: int
    copies: int
    checkpoint_every: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def ratio(self) -> float:
        """Return predicted over measured."""
        return self.predicted_bytes / self.measured_bytes


def job_of(num_nodes: int, copies: int, checkpoint_every: int, *, batches: int) -> JobSpec:
    """A pipeline on all nodes, with a snapshot every 10 batches."""
    spec = JobSpec(
        job=JobSection(name=NAME, seed=1),
        model=MODEL,
        train=TrainSpec(batches=batches, microbatches=8, microbatch_size=1, sequence_length=64),
        fault=FaultSpec(snapshot_every=10, copies=copies, checkpoint_every=checkpoint_every),
        placement=PlacementSpec(replicas=(1,) * num_nodes),
    )
    devices = find_devices("cpu", 0)
    return resolve_job(spec, job_file=Path("memory.toml"), devices=devices, cache_dir=default_cache_dir())


def sizes_below(folder: Path) -> Iterator[int]:
    """Yield the size of every file, of those under way too; files come and go meanwhile."""
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(parent) / name).stat().st_size
            except FileNotFoundError:
                continue


def stores(cluster: LocalCluster) -> Path:
    """Return the folder of the nodes' stores, which this process has made."""
    (found,) = (folder_in_memory() or cluster.state_dir).glob(f"headway-{os.getpid()}-store-*[0-9a-f]")
    return found


async def most_below(folder: Path, found: list[int]) -> None:
    """Look, again and again. found: gets the most bytes so far as its only value."""
    while True:
        found[0] = max(found[0], sum(sizes_below(folder)))
        await asyncio.sleep(LOOK_S)


async def measure(num_nodes: int, copies: int, checkpoint_every: int, *, batches: int) -> Row:
    """Train the job, and look at the stores meanwhile."""
    spec, most = job_of(num_nodes, copies, checkpoint_every, batches=batches), [0]
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        settings = {"history_dir": Path(folder) / "history"}
        async with (
            LocalCluster(Path(folder) / "cluster", num_nodes=num_nodes, node_settings=settings) as cluster,
            ClusterSession(cluster.address) as session,
        ):
            plan = make_plan(spec, (await session.view()).nodes.values())
            assert isinstance(plan, ClusterPlan), plan
            await submit(session, spec)
            looking = asyncio.create_task(most_below(stores(cluster), most))
            job = await wait_for_phase(session, NAME, frozenset({Phase.FINISHED, Phase.FAILED}), timeout_s=TIMEOUT_S)
            looking.cancel()
            if job.phase.phase is not Phase.FINISHED:
                raise RuntimeError(f"{job.phase.phase}: {job.phase.reason}")
    return Row(num_nodes, copies, checkpoint_every, plan.estimates[0].host_bytes, most[0])


def main() -> int:
    """Print a row for each case and one JSON line; 1: a prediction is off by more than a tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--only", type=int, default=0, help="cases of so many nodes")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if options.only in (0, case[0]):
            row = asyncio.run(measure(*case, batches=options.batches))
            rows.append(row)
            progress(
                f"{row.nodes} nodes, {row.copies} copies, checkpoints every {row.checkpoint_every}: "
                f"{row.predicted_bytes / 2**20:.1f} MiB predicted, {row.measured_bytes / 2**20:.1f} MiB measured, "
                f"{row.ratio:.2f}"
            )
    ratios = [row.ratio for row in rows]
    body = {
        "worst_low": round(min(ratios), 4),
        "worst_high": round(max(ratios), 4),
        "rows": [[row.nodes, row.copies, row.checkpoint_every, round(row.ratio, 4)] for row in rows],
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(body))
    return 0 if all(1 - BAR <= ratio <= 1 + BAR for ratio in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
