"""One stage through daemon and worker against the plain loop on a card, and two stages on one card.

one_stage_ratio: tokens/s of the job over the plain loop's, in turns.
one_stage_mfu, two_stages_mfu: useful operations a second, over those of a large matrix product in the job's dtype on
the same card in the same run. Six operations a token and parameter, without those of attention, so it is a lower bound.
two_stages_over_one: two workers take turns on the card, so it tells what the second process costs.
"""

import argparse
import asyncio
import json
import sys

import torch
from rigs.measure import Figure
from rigs.overhead_sides import measure_stages

from gpu.cluster_job import stage_job
from gpu.sizes import wait_for
from headway.daemon.jobs.job import JobSpec
from headway.daemon.worker.device import flops_per_s
from headway.stages.model.decoder import parameter_shapes

BATCHES = 15
NUM_PAIRS = 3
PRODUCT_SIDE = {"cuda": 8192, "cpu": 256}
OPERATIONS_PER_PARAMETER = 6
"""Of a token: two in the forward, four in the backward."""


def operations_per_batch(job: JobSpec) -> float:
    """Return the useful operations of a batch. The embedding is looked up, not multiplied."""
    multiplied = sum(
        shape.numel() for name in job.layers if name != "embed" for shape in parameter_shapes(name, job.model).values()
    )
    return float(OPERATIONS_PER_PARAMETER * multiplied * job.train.tokens_per_batch)


def product_rate(device: str, dtype: str) -> float:
    """Return the operations a second of a large matrix product."""
    from time import perf_counter

    def seconds_of(side: int, within_s: float) -> float:
        one, other = (torch.ones((side, side), device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        best, ends_at = float("inf"), perf_counter() + within_s
        torch.mm(one, other)
        while True:
            wait_for(device)
            began = perf_counter()
            torch.mm(one, other)
            wait_for(device)
            best = min(best, perf_counter() - began)
            if perf_counter() >= ends_at:
                return best

    return flops_per_s(seconds_of, PRODUCT_SIDE[device])[0]


def measure(device: str) -> dict[str, object]:
    """All sides in turns."""
    job = stage_job("stages", device, BATCHES)
    found, beside = asyncio.run(measure_stages(job, num_pairs=NUM_PAIRS, device=device))
    rate, operations = product_rate(device, job.train.dtype), operations_per_batch(job)
    ratio: Figure = found["one_stage_ratio"]
    return {
        "one_stage_ratio": round(ratio.median, 4),
        "one_stage_ratio_spread": [round(ratio.low, 4), round(ratio.high, 4)],
        "one_stage_mfu": round(operations / float(str(beside["one_stage_s"])) / rate, 4),
        "two_stages_mfu": round(operations / float(str(beside["two_stages_s"])) / rate, 4),
        "product_tflops": round(rate / 1e12, 2),
        **beside,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(json.dumps(measure(options.device)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
