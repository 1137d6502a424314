"""What snapshots cost a job: ten batches with one against ten without, in turns, in one job on two nodes."""

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.boundaries import restorable
from headway.daemon.jobs.job import FaultSpec, JobSpec
from headway.daemon.local.cluster import LocalCluster
from rigs.measure import Figure, progress
from rigs.overhead_sides import NUM_WARMUP_BATCHES, Pipeline

WINDOW = 10
"""Batches that share one snapshot."""
REPORT_DELAY = 2
"""Batches by which the progress that etcd has may lie behind."""
WITH_SNAPSHOTS = FaultSpec(snapshot_every=2 * WINDOW, copies=2, checkpoint_every=0)


async def measure_snapshots(
    job_of: Callable[[int], JobSpec], *, seconds_in_all: float, device: str = "cpu"
) -> tuple[dict[str, Figure], dict[str, object]]:
    """As many windows with a snapshot as there is time for, in one job, each between two without.

    job_of: makes the job of a number of batches.
    """
    settings = {"devices": device}
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        async with (
            LocalCluster(Path(folder), num_nodes=2, node_settings=settings) as cluster,
            ClusterSession(cluster.address) as session,
        ):
            trial = job_of(2 * NUM_WARMUP_BATCHES)
            pipeline = Pipeline(session, trial)
            num_windows = max(2, int(seconds_in_all / (2 * WINDOW * await pipeline.seconds(2))) - 1)
            progress(f"{num_windows} windows with a snapshot")
            job = replace(job_of(2 * WINDOW * (num_windows + 1)), fault=WITH_SNAPSHOTS)
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
        "snapshot_stall": round(longest_with_snapshot(seconds) / statistics.median(seconds), 4),
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


def longest_with_snapshot(seconds: Sequence[float]) -> float:
    """Return the longest batch of the windows with a snapshot, as the median of these windows.

    seconds: of every batch but the first NUM_WARMUP_BATCHES. A single hiccup of the machine is no figure.
    """
    every = [0.0] * NUM_WARMUP_BATCHES + list(seconds)
    starts = range(2 * WINDOW, len(every) - WINDOW, 2 * WINDOW)
    return statistics.median(max(every[start : start + WINDOW]) for start in starts)
