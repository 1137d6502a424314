"""A job whose loss has a mask: every cut, schedule and replica gives the bits of the plain loop."""

from dataclasses import replace

import pytest

from headway.daemon.local.reference_loop import reference
from headway.stages.links.codec import Codec
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    CountingTokens,
    Pipeline,
    initial_layers,
    make_job,
    oracle,
    with_train,
)

MASKED = with_train(loss_mask="data")
SEPARATE = replace(MASKED, documents="separate")


@pytest.mark.parametrize("late_seed", [None, 2])
def test_a_codec_touches_hidden_states_alone(late_seed: int | None) -> None:
    """int8 between all stages → the reference with coded cuts: targets and divisor arrive as they left."""
    job = make_job(replace(SEPARATE, wire="int8", batches=3), EF)
    layers, journal = initial_layers(job), Journal()
    Pipeline(job, layers, journal, num_stages=3, codecs=[Codec.INT8] * 2, late_seed=late_seed).run()
    losses: list[float] = []
    reference(
        job,
        CountingTokens(),  # type: ignore[arg-type]
        on_batch=lambda row: losses.append(row.loss),
        coded_cuts=("block.0", "block.2"),
    )
    assert [row.loss for row in journal.rows] == losses


def test_a_batch_without_a_target_has_loss_and_gradient_zero() -> None:
    """Batch 1 has none → its loss is 0, and without decay and momentum its update changes nothing."""
    losses, _ = oracle(make_job(replace(MASKED, schedule="1f1b", recompute="attention"), ADAMW))
    assert losses[1] == 0.0
    assert all(loss > 1 for k, loss in enumerate(losses) if k != 1)
