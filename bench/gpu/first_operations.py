"""First operations: what a fresh process pays once, and its share of the time that the daemon gives a worker.

Each is done once, in the order in which a worker meets it: the context and the first allocation, the first products in
both dtypes (cuBLAS), forward and backward of a block, its update (Newton–Schulz, first at the job's shapes), and the
same block compiled. On a card the block is one of an 8B model.

share_of_limit: the largest of: all operations but the compilation over the time of a first operation; the compilation
over the time to prepare.
"""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from gpu.cluster_job import stage_job
from gpu.one_stage import OneStage
from gpu.probe import Parts, absent
from gpu.sizes import block_model, first_device, wait_for
from headway.daemon.jobs.job import preparation_s
from headway.daemon.worker.liveness import FIRST_OPERATION_S
from headway.stages.errors import CompilationError
from headway.stages.ids import LayerName
from headway.stages.model.compilation import compile_ahead
from headway.stages.model.determinism import configure
from headway.stages.spec import TrainSpec

BLOCK = LayerName("block.0")
LENGTH = {"cuda": 2048, "cpu": 32}


def seconds(device: str, work: Callable[[], object]) -> float:
    """Return the seconds of one piece of work, until the device has done it."""
    began = perf_counter()
    work()
    wait_for(device)
    return perf_counter() - began


def measure(kind: str) -> Parts:
    """Do everything once."""
    device, side = first_device(kind), 64 if kind == "cpu" else 4096
    configure(TrainSpec(), torch.device(device))

    def products() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            one = torch.zeros((side, side), device=device, dtype=dtype)
            torch.mm(one, one)

    figures = {
        "context_s": seconds(device, lambda: torch.zeros(1 << 20, device=device)),
        "products_s": seconds(device, products),
    }
    job = stage_job(
        "first", kind, 1, model=block_model(kind), microbatch_size=1, microbatches=1, sequence_length=LENGTH[kind]
    )
    stage = OneStage(job, device, (BLOCK,))
    wait_for(device)
    figures["block_s"] = seconds(device, stage.microbatch)
    figures["newton_schulz_s"] = seconds(device, stage.update)
    share = sum(figures.values()) / FIRST_OPERATION_S
    yield {**figures, "newton_schulz_dtype": job.optim.matrices.newton_schulz_dtype, "share_of_limit": share}
    compiled = replace(job.train, compile=True)
    try:
        compile_s = seconds(device, lambda: compile_ahead([BLOCK], job.model, compiled, torch.device(device)))
        yield {"compile_s": compile_s, "share_of_limit": max(share, compile_s / preparation_s(compiled))}
    except CompilationError as error:
        yield absent(str(error), "compile_s")
