"""One stage through daemon and worker against the plain loop on a card, and two stages on one card.

one_stage_ratio: tokens/s of the job over the plain loop's, in turns.
one_stage_mfu, two_stages_mfu: useful operations a second, over those of a large matrix product in the job's dtype on
the same card in the same run. Six operations a token and parameter, without those of attention, so it is a lower bound.
two_stages_over_one: two workers take turns on the card, so it tells what the second process costs.
"""

import asyncio
import statistics
from time import perf_counter

import torch
from rigs.measure import Figure
from rigs.overhead_sides import measure_stages

from gpu.cluster_job import stage_job
from gpu.probe import Parts
from gpu.sizes import first_device, wait_for
from headway.daemon.jobs.job import JobSpec
from headway.stages.model.decoder import parameter_shapes

BATCHES = 9
NUM_PAIRS = 3
PRODUCT_SIDE = {"cuda": 8192, "cpu": 256}
PRODUCT_S = {"cuda": 2.0, "cpu": 0.1}
"""Seconds of products, after as many that do not count: a card first comes to the clock that it can hold."""
OPERATIONS_PER_PARAMETER = 6
"""Of a token: two in the forward, four in the backward."""


def operations_per_batch(job: JobSpec) -> float:
    """Return the useful operations of a batch. The embedding is looked up, not multiplied."""
    multiplied = sum(
        shape.numel() for name in job.layers if name != "embed" for shape in parameter_shapes(name, job.model).values()
    )
    return float(OPERATIONS_PER_PARAMETER * multiplied * job.train.tokens_per_batch)


def product_rate(kind: str, dtype: str) -> float:
    """Return the operations a second of a large matrix product: the median, of random numbers.

    A card draws less power for constant ones, and its quickest products come before it is warm.
    """
    device, side, within_s = first_device(kind), PRODUCT_SIDE[kind], PRODUCT_S[kind]
    generator = torch.Generator(device).manual_seed(1)
    one, other = (
        torch.randn((side, side), device=device, generator=generator).to(getattr(torch, dtype)) for _ in range(2)
    )
    seconds: list[float] = []
    begins_at = perf_counter() + within_s
    while not seconds or perf_counter() < begins_at + within_s:
        wait_for(device)
        began = perf_counter()
        torch.mm(one, other)
        wait_for(device)
        if perf_counter() >= begins_at:
            seconds.append(perf_counter() - began)
    return 2.0 * side**3 / statistics.median(seconds)


def measure(device: str) -> Parts:
    """All sides in turns."""
    job = stage_job("stages", device, BATCHES)
    found, beside = asyncio.run(measure_stages(job, num_pairs=NUM_PAIRS, device=device))
    rate, operations = product_rate(device, job.train.dtype), operations_per_batch(job)
    ratio: Figure = found["one_stage_ratio"]
    yield {
        "one_stage_ratio": round(ratio.median, 4),
        "one_stage_ratio_spread": [round(ratio.low, 4), round(ratio.high, 4)],
        "one_stage_mfu": round(operations / float(str(beside["one_stage_s"])) / rate, 4),
        "two_stages_mfu": round(operations / float(str(beside["two_stages_s"])) / rate, 4),
        "product_tflops": round(rate / 1e12, 2),
        **beside,
    }
