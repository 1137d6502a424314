"""Little overhead: what daemon, worker and links cost beside the plain loop, and what a second stage brings.

one_stage_ratio: tokens/s of a one-stage job through daemon and worker, over the plain loop's.
two_stage_speedup: tokens/s of a two-stage job with one thread per worker, over the one-stage job's, corrected by what
the machine gives two processes at once: 2 × (two stages / one stage) / (two independent loops / one loop).

paced_speedup_MS: the same with layers that take a set time, so that a stage of two takes 5, 10 or 20 ms a microbatch,
as on a card. All they compute is real, and takes less.

snapshot_ratio: tokens/s of the two-stage job with a snapshot every 10 batches and two copies of it, over the same job
without any. One job runs: every 20 batches it writes a snapshot, so that ten batches with one and ten without take
turns. Each ten with one, all of their seconds, are compared with the mean of the tens before and after. A snapshot
belongs to its ten: the bench fails if one was not on both nodes in time.

The other sides run in turns too; each measures the median batch of a short job, its first batches left out.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rigs.measure import Figure, report
from rigs.overhead_sides import measure_stages
from rigs.snapshot_cost import measure_snapshots

from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.spec import ModelSpec, TrainSpec

SNAPSHOTS_S = 135.0
"""Time for the whole job that writes snapshots; its cluster and a trial come before."""
WITHOUT_SNAPSHOTS = FaultSpec(snapshot_every=0, copies=1, checkpoint_every=0)

SMALL = ModelSpec(
    hidden_size=128, intermediate_size=344, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2
)
PACED = ModelSpec(
    hidden_size=128, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
)
"""Two layers a stage. Like a card's host, they need the processor for a fraction of the shortest pace."""
PACED_OPTIM = OptimSpec(matrices=GroupSpec(name="adamw"), rest=GroupSpec(name="adamw"), error_feedback=0.0)
PACED_TOKENS = (1, 64)
PACED_BARS = {5: 1.7, 10: 1.8, 20: 1.9}
"""By ms of a stage's microbatch."""
FORWARD_SHARE = 1 / 3
"""A backward takes twice as long as a forward."""


def overhead_job(
    model: ModelSpec, batches: int, *, tokens: tuple[int, int] = (2, 128), optim: OptimSpec | None = None
) -> JobSpec:
    """Eight microbatches. tokens: of each, as rows and their length."""
    size, length = tokens
    spec = JobSpec(
        job=JobSection(name="overhead", seed=1),
        model=model,
        train=TrainSpec(batches=batches, microbatches=8, microbatch_size=size, sequence_length=length),
        optim=optim or OptimSpec(),
        fault=WITHOUT_SNAPSHOTS,
    )
    return resolve_job(
        spec, job_file=Path("overhead.toml"), devices=(Device(kind="cpu"),), cache_dir=default_cache_dir()
    )


def measure_paced(paces_ms: Sequence[int], *, num_pairs: int) -> tuple[dict[str, Figure], dict[str, object]]:
    """The speed-up at each pace."""
    figures: dict[str, Figure] = {}
    beside: dict[str, object] = {}
    layers_of_stage = (PACED.num_hidden_layers + 2) / 2
    for ms in paces_ms:
        job = overhead_job(PACED, 43 if ms < 20 else 23, tokens=PACED_TOKENS, optim=PACED_OPTIM)
        layer_s = ms / 1e3 / layers_of_stage * FORWARD_SHARE
        found, more = asyncio.run(measure_stages(job, num_pairs=num_pairs, layer_s=layer_s))
        figures[f"paced_speedup_{ms}"] = found["two_stage_speedup"]
        figures[f"paced_one_stage_ratio_{ms}"] = found["one_stage_ratio"]
        beside |= {f"{name}_{ms}": value for name, value in more.items() if name.endswith(("_s", "_over_one"))}
    return figures, beside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute on a small model, for a first look")
    parser.add_argument(
        "--small", action="store_true", help="all pairs on a model of 1.6 million parameters instead of 6 million"
    )
    parser.add_argument(
        "--only",
        choices=("stages", "paced", "snapshots"),
        help="what stages bring, the same at set paces (4 minutes), or what snapshots cost (3 minutes)",
    )
    parser.add_argument("--paces", type=int, nargs="+", default=list(PACED_BARS), help="ms of a stage's microbatch")
    options = parser.parse_args()
    quick = options.quick
    is_small = quick or options.small
    model = SMALL if is_small else ModelSpec()
    batches = 8 if quick else 24 if is_small else 7
    figures, beside = dict[str, Figure](), dict[str, object]()
    if options.only in (None, "stages"):
        job = overhead_job(model, batches)
        figures, beside = asyncio.run(measure_stages(job, num_pairs=2 if quick else 11))
    if options.only in (None, "paced"):
        more, and_beside = measure_paced(options.paces, num_pairs=2 if quick else 5)
        figures, beside = figures | more, beside | and_beside
    if options.only in (None, "snapshots"):
        seconds_in_all = 0 if quick else SNAPSHOTS_S
        more, and_beside = asyncio.run(
            measure_snapshots(lambda number: overhead_job(model, number), seconds_in_all=seconds_in_all)
        )
        figures, beside = figures | more, beside | and_beside
    bars = {} if quick else {"one_stage_ratio": 0.97, "two_stage_speedup": 1.8, "snapshot_ratio": 0.97}
    if not quick:
        bars |= {f"paced_speedup_{ms}": bar for ms, bar in PACED_BARS.items()}
    return report(
        "Overhead of daemon, worker and links",
        figures,
        bars={name: bar for name, bar in bars.items() if name in figures},
        extra=beside,
    )


if __name__ == "__main__":
    sys.exit(main())
