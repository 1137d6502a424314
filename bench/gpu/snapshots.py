"""Snapshots of a two-stage job on a card: what they cost in tokens/s, and how long the longest batch with one takes."""

import asyncio

from rigs.snapshot_cost import measure_snapshots

from gpu.cluster_job import stage_job
from gpu.probe import Parts

SECONDS = {"cuda": 60.0, "cpu": 10.0}


def measure(device: str) -> Parts:
    """As many windows as there is time for."""
    found, beside = asyncio.run(
        measure_snapshots(
            lambda batches: stage_job("snapshots", device, batches), seconds_in_all=SECONDS[device], device=device
        )
    )
    yield {"snapshot_ratio": round(found["snapshot_ratio"].median, 4), **beside}
