"""Runs of one job file by the pipeline, by the plain loop and by the second oracle, and their bits."""

import json
from collections.abc import Sequence
from pathlib import Path

from headway.daemon.jobs.job_file import parse_job
from headway.daemon.local.reference_loop import BatchResult, Weights, reference
from headway.stages.data.token_mixture import open_tokens
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import Pipeline, initial_layers
from tests.second_oracle.job import read_job
from tests.second_oracle.loop import train
from tests.second_oracle.token_windows import read_stream

Row = tuple[float, float | None, float | None, float | None]
"""Loss of a batch, and of the evaluation that comes with it; the norm of its gradient; the held-out loss after it."""
Losses = list[Row]
Bits = tuple[tuple[Row, ...], tuple[tuple[str, bytes], ...]]
"""The losses of all batches, and each parameter of W_B by name."""


def bits(losses: Losses, weights: Weights) -> Bits:
    """What two runs must have in common, to the last bit."""
    named = {
        f"{layer}.{name}": tensor.numpy(force=True).tobytes()
        for layer, parameters in weights.items()
        for name, tensor in parameters.items()
    }
    return tuple(losses), tuple(sorted(named.items()))


def by_second_oracle(text: str, *data: Path, coded_cuts: Sequence[str] = ()) -> Bits:
    """The page, written as code a second time. data: the folder of each source."""
    has_held_out = all("validation" in json.loads((each / "shards.json").read_text()) for each in data)
    held_out = [read_stream(each, "validation") for each in data] if has_held_out else []
    streams = [read_stream(each) for each in data]
    done = train(read_job(text), streams, coded_cuts=coded_cuts, held_out=held_out)
    finals = [None] * (len(done.losses) - 1) + [done.final_evaluation]
    numbered = enumerate(zip(done.losses, done.norms, finals, strict=True))
    return bits([(loss, done.evaluations.get(b), norm, final) for b, (loss, norm, final) in numbered], done.weights)


def by_reference(text: str, *data: Path, coded_cuts: Sequence[str] = ()) -> Bits:
    """`headway reference`."""
    losses: Losses = []

    def told(result: BatchResult) -> None:
        losses.append((result.loss, result.eval_loss, result.gradient_norm, result.final_eval_loss))

    job = parse_job(text)
    tokens = open_tokens(data, [""] * len(data), job.data.weights)
    weights = reference(job, tokens, on_batch=told, coded_cuts=coded_cuts)
    return bits(losses, weights)


def by_pipeline(text: str, *data: Path, num_stages: int) -> Bits:
    """A pipeline of so many stages, each with its own thread and the product's executor."""
    job, journal = parse_job(text), Journal()
    layers = initial_layers(job)
    tokens = open_tokens(data, [""] * len(data), job.data.weights)
    pipeline = Pipeline(job, layers, journal, num_stages=num_stages, tokens=tokens)
    assert set(pipeline.run()) == {job.train.batches}
    weights = {name: dict(layer.weights()) for name, layer in layers.items()}
    rows = [(row.loss, row.eval_loss, row.gradient_norm, row.final_eval_loss) for row in journal.rows]
    return bits(rows, weights)


def first_difference(found: Bits, expected: Bits) -> str:
    """Where two runs part, for people; empty if they have the same bits."""
    for b, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        if one != other:
            return f"loss or norm of batch {b}: {one!r}, not {other!r}"
    return ", ".join(name for (name, one), (_, other) in zip(found[1], expected[1], strict=True) if one != other)
