"""`headway reference`: the plain loop, from the job file to the same files that a run leaves."""

from pathlib import Path
from typing import IO, Literal

import torch

from headway.daemon.data.byte_tokenizer import tokenizer_json
from headway.daemon.errors import ConfigError, JobFailedError
from headway.daemon.jobs.job_file import read_job
from headway.daemon.jobs.resolve import data_folder, default_cache_dir, resolve_job
from headway.daemon.reference import BatchResult, reference
from headway.daemon.results.metrics_file import MetricsFile
from headway.daemon.results.model_folder import write_model
from headway.stages.errors import NonFiniteLossError
from headway.stages.tokens import TokenShards


def run_reference(
    job_file: Path, out: Path, *, device: Literal["auto", "cpu", "cuda"] = "auto", progress: IO[str] | None = None
) -> None:
    """Write DIR/metrics.jsonl and DIR/model/. progress: where a line that overwrites itself goes.

    Raises ConfigError, DataError and JobFailedError.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("this machine has no CUDA device that torch can use", "--device cuda")
    chosen = "cuda" if device != "cpu" and has_cuda else "cpu"
    cache_dir = default_cache_dir()
    spec = resolve_job(read_job(job_file), job_file=job_file, device_kinds=(chosen,), cache_dir=cache_dir)
    tokens = TokenShards.open(data_folder(spec.data.source, cache_dir), expected_sha256=spec.data.sha256)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot be written to: {error.strerror}; name another folder with --out", str(out)
        ) from error
    with MetricsFile(out / "metrics.jsonl") as metrics:

        def on_batch(result: BatchResult) -> None:
            metrics.append(
                batch=result.batch, loss=result.loss, tokens=result.tokens, seconds=result.seconds, generation=0
            )
            if progress is not None:
                progress.write(f"\rbatch {result.batch + 1}/{spec.train.batches}  loss {result.loss:.4f} ")
                progress.flush()

        try:
            weights = reference(spec, tokens, on_batch=on_batch, device=chosen)
        except NonFiniteLossError as error:
            raise JobFailedError(job=spec.job.name, phase="failed", reason=str(error)) from error
    if progress is not None:
        progress.write("\n")
    write_model(
        out / "model",
        spec.model,
        weights=weights,
        sequence_length=spec.train.sequence_length,
        tokenizer_json=tokenizer_json() if tokens.index.tokenizer == "bytes" else None,
    )
