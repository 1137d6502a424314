"""A tied embedding: the first and the last stage train two copies of one matrix, which stay equal to the last bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from headway.stages.spec import TIED
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    MODEL,
    NARROW,
    Pipeline,
    assert_exact,
    assert_replicas_agree,
    initial_layers,
    load_all,
    make_job,
    save_all,
    with_train,
)

TIED_MODEL = replace(MODEL, tie_word_embeddings=True)
JOBS = {
    "2bw, clip": make_job(with_train(microbatches=6, reduction_groups=3, clip_norm=0.05), EF, model=TIED_MODEL),
    "2bw, bfloat16": make_job(
        with_train(microbatches=5, reduction_groups=2, dtype="bfloat16", loss_chunk=5), NARROW, model=TIED_MODEL
    ),
    "1f1b, no clip": make_job(with_train(schedule="1f1b", clip_norm=0.0), ADAMW, model=TIED_MODEL),
    "gpipe, clip": make_job(
        with_train(schedule="gpipe", microbatches=4, reduction_groups=2, clip_norm=0.05), EF, model=TIED_MODEL
    ),
    "2bw, recomputed": make_job(
        with_train(microbatches=4, reduction_groups=4, recompute="block"), EF, model=TIED_MODEL
    ),
}
SHAPES = ((1,), (1, 1), (1, 1, 1), (1,) * 5, (2,), (2, 1), (1, 1, 2), (2, 1, 2))


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """Return the shapes for which a job has enough reduction groups."""
    return [shape for shape in SHAPES if max(shape) <= JOBS[name].train.reduction_groups]


def case(name: str, shape: tuple[int, ...], late_seed: int | None, *, is_slow: bool = True) -> ParameterSet:
    """Return one case, by a name without spaces."""
    words = [*name.replace(",", "").split(), *map(str, shape), *([] if late_seed is None else ["late", str(late_seed)])]
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(name, shape, late_seed, id="-".join(words), marks=marks)


SHORT = [("2bw, clip", (1,), None), ("2bw, clip", (1, 1, 1), 1), ("2bw, clip", (2, 1, 2), 2)]
SHORT += [("2bw, bfloat16", (1, 1), None), ("2bw, bfloat16", (1, 1, 2), 1), ("1f1b, no clip", (1, 1, 1), None)]
SHORT += [("gpipe, clip", (2, 1), 1), ("2bw, recomputed", (1,) * 5, 3)]
LONG = [
    (name, shape, late_seed)
    for name in JOBS
    for shape in shapes_of(name)
    for late_seed in (None, *range(1, 5))
    if (name, shape, late_seed) not in SHORT
]
CASES = [*(case(*each, is_slow=False) for each in SHORT), *(case(*each) for each in LONG)]


@pytest.mark.parametrize(("name", "replicas", "late_seed"), CASES)
def test_two_copies_have_the_bits_of_the_plain_loop(
    name: str, replicas: tuple[int, ...], late_seed: int | None
) -> None:
    """Any cut, with replicas, on the CPU and on late devices → the reference's losses and weights, copies equal."""
    job = JOBS[name]
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(job, layers, journal, num_stages=len(replicas), replicas=replicas, late_seed=late_seed)
    assert pipeline.run() == [job.train.batches] * sum(replicas)
    assert_exact(job, layers, journal)
    assert_replicas_agree(pipeline, layers)
    embed, head = (layers[layer].weights()[name] for layer, name in TIED.items())
    assert torch.equal(embed, head)
    assert not torch.equal(embed, initial_layers(job)["embed"].weights()["weight"])


def test_the_state_of_both_copies_is_equal() -> None:
    """Momentum, variance and Error Feedback too: what is moved with either end goes on alike."""
    job = JOBS["2bw, clip"]
    layers = initial_layers(job)
    Pipeline(job, layers, Journal(), num_stages=3).run()
    of_embed, of_head = layers["embed"].tensors(), layers["head"].tensors()
    tied = {key for key in of_embed if key.endswith("/weight")}
    assert len(tied) >= 5
    for key in tied:
        assert torch.equal(of_embed[key], of_head[key.removesuffix("weight") + TIED["head"]]), key


def test_a_stop_and_another_cut_change_no_bit(tmp_path: Path) -> None:
    """Three stages up to a stop, then two stages from the files → the bits of the plain loop."""
    job = JOBS["2bw, clip"]
    layers, journal = initial_layers(job), Journal()
    first = Pipeline(job, layers, journal, num_stages=3, stop_after_batch=0)
    stopped = first.run()
    assert len(set(stopped)) == 1
    assert 0 < stopped[0] < job.train.batches
    save_all(tmp_path, job, layers, journal)
    layers, journal = load_all(tmp_path, job, stopped[0])
    assert Pipeline(job, layers, journal, num_stages=2, generation=2).run() == [job.train.batches] * 2
    assert_exact(job, layers, journal)
