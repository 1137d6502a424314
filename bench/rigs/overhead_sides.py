"""The sides of `overhead.py`, on one kind of device: the plain loop in a process of its own, and a small cluster."""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import remove, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Phase
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.jobs.resolve import data_folder, default_cache_dir
from headway.daemon.local.cluster import LocalCluster
from headway.stages.stage.allocator import with_large_pages
from rigs.measure import Figure, progress
from tests.rigs.paces import paced_layers

NUM_WARMUP_BATCHES = 3
TIMEOUT_S = 600.0
LOOP_TIMEOUT_S = 600.0
NO_SPARES: dict[str, object] = {"num_spares": 0}
"""Nobody kills a worker: no process imports torch for nothing."""

# One process of the plain loop, kept alive, with a worker's habits of memory: a line on its standard input starts a
# run, a line of seconds answers it.
LOOP = """
import statistics, sys
import msgspec
from headway.daemon.jobs.job import JobSpec
from headway.daemon.local.reference_loop import reference
from headway.stages.stage.allocator import keep_freed_memory
from headway.stages.data.tokens import TokenShards

keep_freed_memory()
if float(sys.argv[5]):
    from rigs.paced_loop import pace_loop

    pace_loop(float(sys.argv[5]))
job = msgspec.json.decode(sys.argv[1].encode(), type=JobSpec)
tokens = TokenShards.open(sys.argv[2])
print("ready", flush=True)
for _ in sys.stdin:
    seconds = []
    reference(job, tokens, on_batch=lambda result: seconds.append(result.seconds), device=sys.argv[4])
    print(statistics.median(seconds[int(sys.argv[3]):]), flush=True)
"""


class Loop:
    """The plain loop in a process of its own."""

    def __init__(self, job: JobSpec, *, device: str = "cpu", layer_s: float = 0.0) -> None:
        """layer_s: seconds that a layer's forward takes at least; its backward takes twice as long."""
        folder = data_folder(job.data.source, default_cache_dir())
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LOOP,
                msgspec.json.encode(job).decode(),
                str(folder),
                str(NUM_WARMUP_BATCHES),
                device,
                str(layer_s),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **with_large_pages(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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
        with self._process:  # closes its pipes
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(LOOP_TIMEOUT_S)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass(frozen=True, slots=True)
class Trained:
    """What a job's journal says of its batches."""

    seconds: list[float]
    """Of every batch but the first few, by the last stage's clock."""
    losses: list[float]


class Pipeline:
    """A running cluster of two nodes that trains the same job again and again, on one stage or on two."""

    def __init__(self, session: ClusterSession, job: JobSpec) -> None:
        assert session.identity is not None
        self._session = session
        self._client = NodeClient(session.identity)
        self._job = job
        self._num_runs = 0

    async def seconds(self, num_stages: int) -> float:
        """Train once: the median seconds of a batch, by the last stage's clock."""
        return statistics.median(await self.batches(num_stages, self._job))

    async def batches(self, num_stages: int, job: JobSpec) -> list[float]:
        """Train once: the seconds of every batch but the first few, by the last stage's clock."""
        placement = PlacementSpec(min_nodes=num_stages, max_nodes=num_stages)
        return (await self.trained(replace(job, placement=placement))).seconds

    async def trained(self, job: JobSpec) -> Trained:
        """Train a job once, under a name of its own."""
        self._num_runs += 1
        name = f"overhead-{self._num_runs}"
        await submit(self._session, replace(job, job=replace(job.job, name=name)))
        done = await wait_for_phase(self._session, name, frozenset({Phase.FINISHED}), timeout_s=TIMEOUT_S)
        if done.phase.phase is not Phase.FINISHED:
            raise RuntimeError(f"{done.phase.reason}\n{done.phase.error}")
        node = next(iter((await self._session.view()).nodes.values()))
        columns = [each async for each in self._client.journal(node.endpoint, name)]
        await remove(self._session, name)
        seconds = [value for each in columns for value in each.seconds]
        return Trained(seconds[NUM_WARMUP_BATCHES:], [value for each in columns for value in each.loss])

    async def close(self) -> None:
        await self._client.close()


async def measure_stages(
    job: JobSpec, *, num_pairs: int, device: str = "cpu", layer_s: float = 0.0
) -> tuple[dict[str, Figure], dict[str, object]]:
    """All sides in turns; one pass gives one sample of each figure.

    layer_s: seconds that a layer's forward takes at least; its backward takes twice as long. 0: as long as it computes.
    """
    loops = tuple(Loop(job, device=device, layer_s=layer_s) for _ in range(2))
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        environment = paced_layers(Path(folder), layer_s) if layer_s else {}
        settings = {**NO_SPARES, "devices": device}
        async with (
            LocalCluster(Path(folder), num_nodes=2, node_settings=settings, environment=environment) as cluster,
            ClusterSession(cluster.address) as session,
        ):
            pipeline = Pipeline(session, job)

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
                samples.append({name: await sides[name]() for name in order})
                took = "  ".join(f"{name} {1e3 * time:.1f} ms" for name, time in samples[-1].items())
                progress(f"pass {index + 1} of {num_pairs}: {took}")
            await pipeline.close()
    for loop in loops:
        loop.close()
    return _figures(samples), _beside(samples, job)


def _figures(samples: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    speedups = [2 * took["one stage"] / took["two stages"] * took["two loops"] / took["one loop"] for took in samples]
    return {
        "one_stage_ratio": Figure.of([took["one loop"] / took["one stage"] for took in samples]),
        "two_stage_speedup": Figure.of(speedups),
    }


def _beside(samples: Sequence[Mapping[str, float]], job: JobSpec) -> dict[str, object]:
    seconds = {name: statistics.median(took[name] for took in samples) for name in samples[0]}
    return {
        "two_stages_over_one": round(statistics.median(took["one stage"] / took["two stages"] for took in samples), 4),
        "two_loops_over_one": round(statistics.median(took["one loop"] / took["two loops"] for took in samples), 4),
        "tokens_per_batch": job.train.tokens_per_batch,
        "hidden_size": job.model.hidden_size,
        **{f"{name.replace(' ', '_')}_s": round(median, 5) for name, median in seconds.items()},
    }
