"""Replicas that orthogonalise a share of their stage's matrices each have the bits of the plain loop."""

from dataclasses import replace

import pytest

from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    EF,
    Pipeline,
    assert_exact,
    assert_replicas_agree,
    initial_layers,
    make_job,
    with_train,
)

NARROW = replace(EF, matrices=replace(EF.matrices, newton_schulz_dtype="bfloat16", momentum_dtype="bfloat16"))
JOBS = {
    "2bw, clip": make_job(with_train(microbatches=8, reduction_groups=4, clip_norm=0.05), EF),
    "2bw, bfloat16": make_job(with_train(microbatches=7, reduction_groups=3, dtype="bfloat16"), NARROW),
    "1f1b, no clip": make_job(with_train(schedule="1f1b", microbatches=8, reduction_groups=4, clip_norm=0.0), EF),
    "gpipe, clip": make_job(with_train(schedule="gpipe", microbatches=8, reduction_groups=3, clip_norm=0.05), EF),
}


SHORT = [(name, (3, 2), None) for name in JOBS] + [("2bw, clip", (3, 2), 1)]
LONG = [
    pytest.param(name, replicas, late_seed, marks=pytest.mark.slow)
    for name in JOBS
    for replicas in ((2,), (3, 2), (1, 3))
    for late_seed in (None, *range(1, 6))
    if (name, replicas, late_seed) not in SHORT
]


@pytest.mark.parametrize(("name", "replicas", "late_seed"), [*SHORT, *LONG])
def test_shared_updates_give_the_bits_of_the_plain_loop(
    name: str, replicas: tuple[int, ...], late_seed: int | None
) -> None:
    """One, two and three workers a stage, on the CPU and on late devices → the reference's losses and weights."""
    job = JOBS[name]
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(
        job,
        layers,
        journal,
        num_stages=len(replicas),
        replicas=replicas,
        late_seed=late_seed,
        shares_updates=True,
    )
    assert pipeline.run() == [job.train.batches] * sum(replicas)
    assert_exact(job, layers, journal)
    assert_replicas_agree(pipeline, layers)
