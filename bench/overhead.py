"""Little overhead: what daemon, worker and links cost beside the plain loop, and what a second stage brings.

one_stage_ratio: tokens/s of a one-stage job through daemon and worker, over the plain loop's.
two_stage_speedup: tokens/s of a two-stage job with one thread per worker, over the one-stage job's, corrected by what
the machine gives two processes at once: 2 × (two stages / one stage) / (two independent loops / one loop).

snapshot_ratio: tokens/s of the two-stage job with a snapshot every 10 batches and two copies of it, over the same job
without any. One job runs: every 20 batches it writes a snapshot, so that ten batches with one and ten without take
turns. Each ten with one, all of their seconds, are compared with the mean of the tens before and after. A snapshot
belongs to its ten: the bench fails if one was not on both nodes in time.

The other sides run in turns too; each measures the median batch of a short job, its first batches left out.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rigs.measure import Figure, progress, report

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import remove, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec, PlacementSpec
from headway.daemon.jobs.resolve import data_folder, default_cache_dir, resolve_job
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.records.records import Device, Phase
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.situation.boundaries import restorable
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.stage.allocator import with_large_pages

NUM_WARMUP_BATCHES = 3
TIMEOUT_S = 600.0
LOOP_TIMEOUT_S = 600.0

# One process of the plain loop, kept alive, with a worker's habits of memory: a line on its standard input starts a
# run, a line of seconds answers it.
LOOP = """
import statistics, sys
import msgspec
from headway.daemon.jobs.job import JobSpec
from headway.daemon.reference.loop import reference
from headway.stages.stage.allocator import keep_freed_memory
from headway.stages.data.tokens import TokenShards

keep_freed_memory()
job = msgspec.json.decode(sys.argv[1].encode(), type=JobSpec)
tokens = TokenShards.open(sys.argv[2])
print("ready", flush=True)
for _ in sys.stdin:
    seconds = []
    reference(job, tokens, on_batch=lambda result: seconds.append(result.seconds))
    print(statistics.median(seconds[int(sys.argv[3]):]), flush=True)
"""


class Loop:
    """The plain loop in a process of its own."""

    def __init__(self, job: JobSpec) -> None:
        import msgspec

        folder = data_folder(job.data.source, default_cache_dir())
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP, msgspec.json.encode(job).decode(), str(folder), str(NUM_WARMUP_BATCHES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **with_large_pages(os.environ)},
        )
        if self._answer() != "ready":
            raise RuntimeError("the plain loop did not start")

    def start(self) -> None:
        """Begin a run."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def seconds(self) -> float:
        """Wait for the run's end: the median seconds of a batch."""
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LOOP_TIMEOUT_S)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Pipeline:
    """A running cluster of two nodes that trains the same job again and again, on one stage or on two."""

    def __init__(self, cluster: LocalCluster, session: ClusterSession, job: JobSpec) -> None:
        assert session.identity is not None
        self._session = session
        self._cluster = cluster
        self._client = NodeClient(session.identity)
        self._job = job
        self._num_runs = 0

    async def seconds(self, num_stages: int) -> float:
        """Train once: the median seconds of a batch, by the last stage's clock."""
        return statistics.median(await self.batches(num_stages, self._job))

    async def batches(self, num_stages: int, job: JobSpec) -> list[float]:
        """Train once: the seconds of every batch but the first few, by the last stage's clock."""
        self._num_runs += 1
        name = f"overhead-{self._num_runs}"
        job = replace(
            job,
            job=replace(job.job, name=name),
            placement=PlacementSpec(min_nodes=num_stages, max_nodes=num_stages),
        )
        await submit(self._session, job)
        done = await wait_for_phase(self._session, name, frozenset({Phase.FINISHED}), timeout_s=TIMEOUT_S)
        if done.phase.phase is not Phase.FINISHED:
            raise RuntimeError(f"{done.phase.reason}\n{done.phase.error}")
        node = next(iter((await self._session.view()).nodes.values()))
        entries = [entry.seconds async for entry in self._client.journal(node.endpoint, name, from_batch=0)]
        await remove(self._session, name)
        return entries[NUM_WARMUP_BATCHES:]

    async def close(self) -> None:
        await self._client.close()


WINDOW = 10
"""Batches that share one snapshot."""
REPORT_DELAY = 2
"""Batches by which the progress that etcd has may lie behind."""
SNAPSHOTS_S = 135.0
"""Time for the whole job that writes snapshots; its cluster and a trial come before."""
WITHOUT_SNAPSHOTS = FaultSpec(snapshot_every=0, copies=1, checkpoint_every=0)
WITH_SNAPSHOTS = FaultSpec(snapshot_every=2 * WINDOW, copies=2, checkpoint_every=0)

SMALL = ModelSpec(
    hidden_size=128, intermediate_size=344, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2
)


def overhead_job(model: ModelSpec, batches: int) -> JobSpec:
    """Eight microbatches of 256 tokens."""
    spec = JobSpec(
        job=JobSection(name="overhead", seed=1),
        model=model,
        train=TrainSpec(batches=batches, microbatches=8, microbatch_size=2, sequence_length=128),
        fault=WITHOUT_SNAPSHOTS,
    )
    return resolve_job(
        spec, job_file=Path("overhead.toml"), devices=(Device(kind="cpu"),), cache_dir=default_cache_dir()
    )


async def measure(model: ModelSpec, *, num_pairs: int, batches: int) -> tuple[dict[str, Figure], dict[str, object]]:
    """All sides in turns; one pass gives one sample of each figure."""
    job = overhead_job(model, batches)
    loops = (Loop(job), Loop(job))
    ratios, speedups, raw, machine = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        async with (
            LocalCluster(Path(folder), num_nodes=2) as cluster,
            ClusterSession(cluster.address) as session,
        ):
            pipeline = Pipeline(cluster, session, job)

            async def one_loop() -> float:
                loops[0].start()
                return await asyncio.to_thread(loops[0].seconds)

            async def two_loops() -> float:
                for loop in loops:
                    loop.start()
                times = [await asyncio.to_thread(loop.seconds) for loop in loops]
                return 1 / sum(1 / time for time in times)  # seconds of a batch of the two together

            sides = {
                "one stage": lambda: pipeline.seconds(1),
                "one loop": one_loop,
                "two stages": lambda: pipeline.seconds(2),
                "two loops": two_loops,
            }
            for index in range(num_pairs):
                order = list(sides) if index % 2 == 0 else list(reversed(sides))
                took = {name: await sides[name]() for name in order}
                gain = took["one loop"] / took["two loops"]
                ratios.append(took["one loop"] / took["one stage"])
                raw.append(took["one stage"] / took["two stages"])
                machine.append(gain)
                speedups.append(2 * raw[-1] / gain)
                progress(
                    f"pass {index + 1} of {num_pairs}: "
                    + "  ".join(f"{name} {1e3 * time:.0f} ms" for name, time in took.items())
                    + f"  ratio {ratios[-1]:.3f}  speed-up {speedups[-1]:.3f}"
                )
            await pipeline.close()
    for loop in loops:
        loop.close()
    figures = {
        "one_stage_ratio": Figure.of(ratios),
        "two_stage_speedup": Figure.of(speedups),
    }
    beside: dict[str, object] = {
        "two_stages_over_one": round(statistics.median(raw), 4),
        "two_loops_over_one": round(statistics.median(machine), 4),
        "tokens_per_batch": job.train.tokens_per_batch,
        "hidden_size": model.hidden_size,
    }
    return figures, beside


async def measure_snapshots(model: ModelSpec, *, seconds_in_all: float) -> tuple[dict[str, Figure], dict[str, object]]:
    """As many windows with a snapshot as there is time for, in one job, each between two without."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        async with (
            LocalCluster(Path(folder), num_nodes=2) as cluster,
            ClusterSession(cluster.address) as session,
        ):
            trial = overhead_job(model, 2 * NUM_WARMUP_BATCHES)
            pipeline = Pipeline(cluster, session, trial)
            num_windows = max(2, int(seconds_in_all / (2 * WINDOW * await pipeline.seconds(2))) - 1)
            progress(f"{num_windows} windows with a snapshot")
            job = replace(overhead_job(model, 2 * WINDOW * (num_windows + 1)), fault=WITH_SNAPSHOTS)
            lags: dict[int, int] = {}
            watching = asyncio.create_task(_watch_lags(session, lags))
            seconds = await pipeline.batches(2, job)
            watching.cancel()
            await pipeline.close()
    first = [0.0] * NUM_WARMUP_BATCHES  # of a window that is not used
    windows = [sum([*first, *seconds][start : start + WINDOW]) for start in range(0, job.train.batches, WINDOW)]
    ratios = []
    for index in range(2, len(windows) - 1, 2):
        ratios.append((windows[index - 1] + windows[index + 1]) / 2 / windows[index])
        progress(f"batches from {index * WINDOW}: {windows[index]:.2f} s, ratio {ratios[-1]:.3f}")
    late = {boundary: lag for boundary, lag in lags.items() if lag >= WINDOW - REPORT_DELAY}
    if late or len(lags) < num_windows:
        raise RuntimeError(f"of {num_windows} snapshots {len(lags)} were copied, and these late, in batches: {late}")
    beside: dict[str, object] = {
        "batch_s": round(statistics.median(seconds), 4),
        "snapshot_lag_batches": max(lags.values()),
    }
    return {"snapshot_ratio": Figure.of(ratios)}, beside


async def _watch_lags(session: ClusterSession, lags: dict[int, int]) -> None:
    """Record, until cancelled, boundary to the number of batches after which two nodes held all of it."""
    async for view in session.follow():
        for job in view.jobs.values():
            for _, boundary in restorable(job, view.nodes) if job.spec is not None else ():
                if boundary not in lags and job.progress is not None and job.phase.phase is Phase.RUNNING:
                    lags[boundary] = job.progress.batch + 1 - boundary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute on a small model, for a first look")
    parser.add_argument(
        "--small", action="store_true", help="all pairs on a model of 1.6 million parameters instead of 6 million"
    )
    parser.add_argument(
        "--only",
        choices=("stages", "snapshots"),
        help="what stages bring, or what snapshots cost (3 minutes)",
    )
    options = parser.parse_args()
    quick = options.quick
    is_small = quick or options.small
    model = SMALL if is_small else ModelSpec()
    batches = 8 if quick else 24 if is_small else 7
    figures, beside = dict[str, Figure](), dict[str, object]()
    if options.only != "snapshots":
        figures, beside = asyncio.run(measure(model, num_pairs=2 if quick else 11, batches=batches))
    if options.only != "stages":
        more, and_beside = asyncio.run(measure_snapshots(model, seconds_in_all=0 if quick else SNAPSHOTS_S))
        figures, beside = figures | more, beside | and_beside
    bars = {} if quick else {"one_stage_ratio": 0.97, "two_stage_speedup": 1.8, "snapshot_ratio": 0.97}
    return report(
        "Overhead of daemon, worker and links",
        figures,
        bars={name: bar for name, bar in bars.items() if name in figures},
        extra=beside,
    )


if __name__ == "__main__":
    sys.exit(main())
