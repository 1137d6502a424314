"""`headway reference`: the plain loop, from the job file to the files that a run leaves."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Literal

import torch

from headway.daemon.base.errors import ConfigError, JobFailedError
from headway.daemon.base.machine_share import memory_bytes
from headway.daemon.base.places import is_url
from headway.daemon.base.terminal import bar
from headway.daemon.blobs.data_source import check_tokenizer, tokenizer_at
from headway.daemon.blobs.download import Download, url_giver
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.blobs.verified_shards import VerifiedShards
from headway.daemon.client.submission import read_draft
from headway.daemon.jobs.job import DataSpec, JobSpec
from headway.daemon.jobs.plugins import import_plugins
from headway.daemon.jobs.resolve import data_folder, default_cache_dir
from headway.daemon.local.reference_loop import BatchResult, reference
from headway.daemon.models.adapter_folder import AdapterFolderWriter, add_last_batch
from headway.daemon.models.model_folder import write_model
from headway.daemon.models.model_place import make_out
from headway.daemon.models.origin_config import as_config_error
from headway.daemon.models.origin_model import initial_adapters_of, initial_weights_of
from headway.daemon.models.origin_parts import Carried, carried_of
from headway.daemon.node.hardware import find_devices
from headway.daemon.plan.cluster_plan import size
from headway.daemon.plan.devices import cuda_reserve
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.plan.schedule_choice import check_named
from headway.daemon.reports.metrics_file import HistoryRow, MetricsFile, rates
from headway.daemon.text.data_tokenizer import DataTokenizer
from headway.stages.data.token_mixture import open_tokens
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import NonFiniteLossError
from headway.stages.links.codec import is_rounding
from headway.stages.plugin_names import PluginError


def folder_here(data: DataSpec, cache_dir: Path, *, progress: IO[str] | None = None) -> Path:
    """Return a folder with a job's data on this machine: what lies at a URL is brought into the cache, verified.

    progress: stream for a line that overwrites itself. Raises ConfigError, DataError.
    """
    if not is_url(data.source):
        return data_folder(data.source, cache_dir)

    def tell(num_bytes: int, total_bytes: int) -> None:
        if progress is not None:
            progress.write(f"\r{data.source}: {num_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB ")
            progress.flush()

    async def bring() -> None:
        giver = url_giver(data.source, FileThreads("data at URLs"))
        await Download(
            cache_dir / data.sha256,
            data.sha256,
            givers=lambda: [giver],
            verified=VerifiedShards(),
            threads=FileThreads("downloads of data"),
            tell=tell,
        ).run()

    with as_config_error():
        asyncio.run(bring())
    if progress is not None:
        progress.write("\n")
    return cache_dir / data.sha256


def tokens_here(spec: JobSpec, *, progress: IO[str] | None = None) -> TokenShards:
    """Return a job's data on this machine. progress: as for `folder_here`. Raises as that."""
    folders = [folder_here(part, default_cache_dir(), progress=progress) for part in spec.data.parts]
    return open_tokens(folders, [part.sha256 for part in spec.data.parts], spec.data.weights)


def run_reference(
    job_file: Path,
    out: Path,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    coded_cuts: Sequence[str] = (),
    progress: IO[str] | None = None,
) -> list[str]:
    """Write DIR/metrics.jsonl and DIR/model/; return lines: the last losses, the files, which runs have these bits.

    coded_cuts: as for `reference`. progress: stream for a line that overwrites itself.

    Raises ConfigError, DataError and JobFailedError.
    """
    chosen = _chosen(device)
    devices = find_devices(chosen, 0)
    spec = read_draft(job_file).resolved(devices)
    check_named([spec], str(job_file))
    check_tokenizer(spec, job_file)
    _check_cuts(spec, coded_cuts)
    check_memory(spec, str(job_file), chosen)
    import_plugins(spec, Path(spec.plugins.data.source))
    tokens = tokens_here(spec, progress=progress)
    make_out(out, out / "model")
    carried, rate = carried_of(spec), rates(spec)
    newest: HistoryRow | None = None

    def on_batch(result: BatchResult) -> None:
        nonlocal newest
        newest = HistoryRow(**asdict(result), learning_rate=rate(result.batch), generation=0)
        metrics.append(newest)
        if progress is not None:
            done = bar(newest.batch + 1, spec.train.batches)
            print(f"\r{done}  {_told(spec, newest)} ", end="", file=progress, flush=True)

    with MetricsFile(out / "metrics.jsonl") as metrics, errors_told(spec.job.name, str(job_file)):
        weights = reference(
            spec,
            tokens,
            on_batch=on_batch,
            coded_cuts=coded_cuts,
            device=chosen,
            initial=initial_weights_of(spec),
            adapters=initial_adapters_of(spec),
        )
    if progress is not None:
        progress.write("\r\x1b[K")
    tokenizer = tokenizer_at(spec.data.parts[0].source, default_cache_dir())
    if spec.model.has_adapter:
        _write_adapters(out, spec, weights, tokenizer, carried, newest)
    else:
        length = spec.train.sequence_length
        write_model(
            out / "model", spec.model, weights=weights, sequence_length=length, tokenizer=tokenizer, carried=carried
        )
    return [*_end_lines(spec, newest), f"{out / 'metrics.jsonl'}, {out / 'model'}", _comparable(spec, coded_cuts)]


def _told(spec: JobSpec, row: HistoryRow) -> str:
    return f"batch {row.batch + 1}/{spec.train.batches}  loss {row.loss:.4f}"


def _end_lines(spec: JobSpec, last: HistoryRow | None) -> list[str]:
    """Return the loss of the last batch, and that on held-out text after it."""
    if last is None:
        return ["no batch"]
    early = "; evaluations ended the job" if last.batch + 1 < spec.train.batches else ""
    return [_told(spec, last) + early, *([last.end_text] if last.end_text else [])]


def _write_adapters(
    out: Path,
    spec: JobSpec,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    tokenizer: DataTokenizer | None,
    carried: Carried | None,
    last: HistoryRow | None,
) -> None:
    with AdapterFolderWriter(
        out / "model", spec.model, base=spec.origin.url, tokenizer=tokenizer, carried=carried
    ) as writer:
        for layer, parameters in weights.items():
            writer.add(layer, parameters)
    if last is not None:
        add_last_batch(out / "model", last.as_json())


def _chosen(device: str) -> Literal["cpu", "cuda"]:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("this machine has no CUDA device that torch can use", "--device cuda")
    return "cuda" if device != "cpu" and has_cuda else "cpu"


@contextmanager
def errors_told(job: str, source: str) -> Iterator[None]:
    """Tell the training's errors as JobFailedError, and as ConfigError at `source` where memory ran out."""
    try:
        yield
    except (NonFiniteLossError, PluginError) as error:
        raise JobFailedError(job=job, phase="failed", reason=str(error)) from error
    except (MemoryError, RuntimeError) as error:
        # torch has a class of its own for CUDA alone.
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(error):
            raise
        raise ConfigError("does not fit the memory that is free here; make it smaller", source) from error


def check_memory(spec: JobSpec, source: str, device: str = "cpu") -> None:
    """Raise ConfigError for a model that this process cannot hold: the plain loop has all of it in memory."""
    groups = spec.train.reduction_groups
    costs = layer_costs(spec)
    needed = sum(cost.resident_bytes + groups * cost.group_bytes + cost.activation_bytes for cost in costs)
    needed += max(cost.passing_bytes for cost in costs)
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        memory -= cuda_reserve(memory)
    else:
        memory = memory_bytes()
    if needed > memory:
        what = f"weights, optimizers and one microbatch take {size(needed)}, and this machine has {size(memory)}"
        raise ConfigError(f"{what}; one process needs them all at once, so make the job smaller", f"{source}:model")


def _check_cuts(spec: JobSpec, cuts: Sequence[str]) -> None:
    """Raise ConfigError for cuts that no coded link of this job can have."""
    if cuts and not is_rounding(spec.train):
        raise ConfigError("this job's links round nothing, so cuts change no bit: leave the option out", "--coded-cuts")
    for cut in cuts:
        if cut not in spec.layers[1:]:
            raise ConfigError(
                f"no stage after the first can begin with {cut!r}; name layers from {spec.layers[1]} to "
                f"{spec.layers[-1]}",
                "--coded-cuts",
            )


def _comparable(spec: JobSpec, cuts: Sequence[str]) -> str:
    train = spec.train
    if not is_rounding(train):
        return "every run of this job on one arithmetic class has these bits"
    if cuts:
        return f"runs under one plan whose coded links end at {', '.join(cuts)} have these bits, others do not"
    return (
        f'wire = "{train.wire}" rounds frames on coded links: only runs without such links have these bits; '
        "--coded-cuts names the layers where they end (`headway status --json`: coded_cuts)"
    )
