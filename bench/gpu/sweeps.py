"""Seconds of a microbatch by dtype, kernel of attention, compilation and chunks of the loss, over those of the job.

dtype_NAME, attention_NAME, compile: tokens/s over those of the job as it is submitted, which says nothing of them.
loss_chunk_ROWS: the head alone with a large vocabulary, over all logits at once.
num_unrepeatable: variants whose gradients had other bits the second time. compile_other_bits: 1 if a second process,
which compiled by itself, had other bits than the first.
"""

import hashlib
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, Final

import torch

from gpu.cluster_job import stage_job
from gpu.kernels import seconds_of
from gpu.one_stage import OneStage
from gpu.probe import Parts, absent
from gpu.sizes import first_device, stage_model
from headway.daemon.jobs.job import JobSpec
from headway.daemon.node.hardware import find_devices
from headway.stages.attention_kernels import FASTEST_FIRST, why_not
from headway.stages.errors import CompilationError

CHUNKS: Final = {"cuda": (512, 2048), "cpu": (8, 32)}
VOCABULARY: Final = {"cuda": 1 << 17, "cpu": 1 << 10}
NUM_RUNS: Final = 6


def timed(job: JobSpec, device: str, names: tuple[str, ...] = ()) -> tuple[float, str, bool]:
    """Return the seconds of a microbatch, the bits of its gradients, and whether they are the same a second time."""
    stage = OneStage(job, device, names)
    seconds = seconds_of(stage.microbatch, device, NUM_RUNS)
    first, second = (bits_of(stage.microbatch()) for _ in range(2))
    return seconds, first, first == second


def bits_of(gradients: list[torch.Tensor]) -> str:
    """Return a hash over all gradients."""
    found = hashlib.sha256()
    for gradient in gradients:
        found.update(gradient.contiguous().view(torch.uint8).numpy(force=True).tobytes())
    return found.hexdigest()


def in_a_process(job: JobSpec, device: str, names: tuple[str, ...]) -> tuple[float, str, bool]:
    """Do `timed` in a process that compiles for itself."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _set_variable, ("TORCHINDUCTOR_CACHE_DIR", folder)
        ) as pool,
    ):
        return pool.submit(timed, job, device, names).result()


def _set_variable(name: str, value: str) -> None:
    os.environ[name] = value


def measure(kind: str) -> Parts:
    """All variants, each against the job as it is submitted."""
    device, num_unrepeatable = first_device(kind), 0

    def job_with(**train: Any) -> JobSpec:
        return stage_job("sweep", kind, 1, **train)

    base_s, _, _ = timed(job_with(), device)
    variants: dict[str, dict[str, Any]] = {f"dtype_{name}": {"dtype": name} for name in ("float32", "bfloat16")}
    variants |= {f"attention_{name}": {"attention_backend": name} for name in FASTEST_FIRST}
    (card, *_) = find_devices("cpu" if kind == "cpu" else "cuda", 0)
    for key, named in variants.items():
        job = job_with(**named | {"attention_backend": "auto"})
        if kernel := named.get("attention_backend"):
            if why := why_not(kernel, job.model, job.train, device_kind=card.kind, capability=card.capability):
                yield absent(why, key)
                continue
            job = replace(job, train=replace(job.train, attention_backend=kernel))
        seconds, _, is_repeatable = timed(job, device)
        num_unrepeatable += not is_repeatable
        yield {key: round(base_s / seconds, 4)}
    large = replace(stage_model(kind), vocab_size=VOCABULARY[kind])
    whole_s, _, _ = timed(stage_job("sweep", kind, 1, model=large, loss_chunk=0), device, ("head",))
    for index, rows in enumerate(CHUNKS[kind]):
        job = stage_job("sweep", kind, 1, model=large, loss_chunk=rows)
        seconds, _, is_repeatable = timed(job, device, ("head",))
        num_unrepeatable += not is_repeatable
        yield {f"loss_chunk_{('small', 'large')[index]}": round(whole_s / seconds, 4)}
    yield {"num_unrepeatable": num_unrepeatable}
    names = ("block.0", "block.1")
    plain_s, _, _ = timed(job_with(), device, names)
    try:
        one, other = (in_a_process(job_with(compile=True), device, names) for _ in range(2))
    except CompilationError as error:
        yield absent(str(error), "compile", "compile_other_bits")
        return
    yield {
        "compile": round(plain_s / one[0], 4),
        "compile_other_bits": int(one[1] != other[1]),
        "num_unrepeatable": num_unrepeatable + (not one[2]),
    }
