"""On a card: a job that leaves its dtypes open computes in bfloat16, and the same bits each time."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.jobs.resolve import resolve_job
from headway.daemon.local.reference_loop import reference
from headway.daemon.node.hardware import find_devices
from headway.stages.data.stdlib_corpus import builtin_corpus
from headway.stages.data.tokens import TokenShards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

JOB = """
[job]
name = "defaults"
[model]
num_hidden_layers = 4
hidden_size = 256
intermediate_size = 688
[train]
batches = 6
microbatches = 4
sequence_length = 256
"""


def resolved(text: str, cache: Path) -> JobSpec:
    """The job as a cluster of this machine's cards records it."""
    named = set[str]()
    spec = parse_job(text, named=named)
    return resolve_job(spec, job_file=Path("job.toml"), devices=find_devices("cuda", 0), cache_dir=cache, named=named)


def run(job: JobSpec, cache: Path) -> tuple[list[float], bytes]:
    """The losses, and all bits of the weights."""
    losses: list[float] = []
    weights = reference(
        job,
        TokenShards.open(builtin_corpus(cache)),
        on_batch=lambda result: losses.append(result.loss),
        device="cuda",
    )
    tensors = [tensor for layer in weights.values() for tensor in layer.values()]
    return losses, b"".join(tensor.numpy(force=True).tobytes() for tensor in tensors)


def test_an_open_job_is_repeatable_in_bfloat16(tmp_path: Path) -> None:
    """Flash attention, Newton–Schulz in bfloat16, the loss in chunks, narrow state: two runs have the same bits."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this card has no products in bfloat16")
    job = resolved(JOB, tmp_path)
    assert (job.train.dtype, job.optim.matrices.newton_schulz_dtype) == ("bfloat16", "bfloat16")
    assert job.train.attention_backend == "flash"
    job = replace(
        job,
        train=replace(job.train, loss_chunk=100),
        optim=replace(
            job.optim,
            matrices=replace(job.optim.matrices, momentum_dtype="bfloat16"),
            error_feedback_dtype="bfloat16",
        ),
    )
    first = run(job, tmp_path)
    assert run(job, tmp_path) == first
    assert first[0][-1] < first[0][0]


def test_tf32_is_a_field_of_the_job(tmp_path: Path) -> None:
    """float32 products with and without TF32 → other losses, each the same in every run."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this card has no TF32")
    plain, fast = (
        resolved(JOB + f'dtype = "float32"\nallow_tf32 = {value}\n', tmp_path) for value in ("false", "true")
    )
    assert run(plain, tmp_path) == run(plain, tmp_path)
    assert run(fast, tmp_path) == run(fast, tmp_path)
    assert run(plain, tmp_path)[0] != run(fast, tmp_path)[0]
