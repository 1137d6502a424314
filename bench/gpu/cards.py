"""One job on 1, 2, 4 and 8 cards, as that many stages and as that many replicas of one stage.

stages_N, replicas_N: tokens/s of N cards over N times those of one. num_other_losses: runs whose losses are not to the
bit those of one card.
"""

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from rigs.measure import progress
from rigs.overhead_sides import NO_SPARES, Pipeline, Trained

from gpu.cluster_job import stage_job
from gpu.probe import Figures, Parts, absent
from gpu.sizes import num_cards, stage_model
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster

NUMBERS: Final = (2, 4, 8)
NUM_BLOCKS: Final = {"cuda": 23, "cpu": 7}
"""With the head they make 2, 4 and 8 almost equal shares."""
BATCHES: Final = 12
MOST_ON_A_CPU: Final = 2


def measure(kind: str) -> Parts:
    """One card, then more of them."""
    most = num_cards(kind) or MOST_ON_A_CPU
    here = f"here: {most}" if kind == "cuda" else f"a CPU shows with {most} workers that the code runs"
    numbers = [number for number in NUMBERS if number <= most]
    for number in sorted({*NUMBERS} - {*numbers}):
        yield absent(f"needs {number} cards; {here}", f"stages_{number}", f"replicas_{number}")
    if not numbers:
        yield absent("needs 2 cards; here: 1", "num_other_losses")
        return
    model = replace(stage_model(kind), num_hidden_layers=NUM_BLOCKS[kind])
    job = stage_job("cards", kind, BATCHES, model=model, reduction_groups=8, microbatches=16)
    with asyncio.Runner() as runner:
        parts = by_number(job, kind, numbers)
        while (part := runner.run(anext(parts, None))) is not None:
            yield part


async def by_number(job: JobSpec, kind: str, numbers: list[int]) -> AsyncIterator[Figures]:
    """Train the job on one card, then as so many stages and replicas."""
    num_other = 0
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        settings = {**NO_SPARES, "devices": kind}
        async with (
            LocalCluster(Path(folder), num_nodes=max(numbers), node_settings=settings) as cluster,
            ClusterSession(cluster.address) as session,
        ):
            pipeline = Pipeline(session, job)

            async def trained(replicas: tuple[int, ...]) -> Trained:
                number = sum(replicas)
                placement = PlacementSpec(min_nodes=number, max_nodes=number, replicas=replicas, recut=False)
                done = await pipeline.trained(replace(job, placement=placement))
                progress(f"replicas {replicas}: {statistics.median(done.seconds):.4f} s a batch")
                return done

            alone = await trained((1,))
            for number in numbers:
                for name, replicas in (("stages", (1,) * number), ("replicas", (number,))):
                    found = await trained(replicas)
                    ratio = statistics.median(alone.seconds) / statistics.median(found.seconds) / number
                    num_other += found.losses != alone.losses
                    yield {f"{name}_{number}": round(ratio, 4), "num_other_losses": num_other}
            await pipeline.close()
