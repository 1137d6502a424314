"""A job whose loss has a mask: every cut, schedule and replica gives the bits of the plain loop."""

from dataclasses import replace

import pytest
import torch

from headway.daemon.local.reference_loop import reference
from headway.stages.links.codec import Codec
from headway.stages.spec import TrainSpec
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    MODEL,
    CountingTokens,
    Pipeline,
    assert_exact,
    initial_layers,
    make_job,
    oracle,
    with_train,
)

MASKED = with_train(loss_mask="data")
SEPARATE = replace(MASKED, documents="separate")
JOBS = {
    "2bw, 3 groups": make_job(replace(MASKED, microbatches=8, reduction_groups=3, batches=3), EF),
    "2bw, bfloat16, chunks, block again": make_job(
        replace(MASKED, dtype="bfloat16", loss_chunk=5, recompute="block"), EF
    ),
    "1f1b, AdamW, attention again": make_job(replace(MASKED, schedule="1f1b", recompute="attention"), ADAMW),
    "documents, 2bw, attention again": make_job(replace(SEPARATE, recompute="attention"), EF),
    "documents, 1f1b, bfloat16, block again": make_job(
        replace(SEPARATE, schedule="1f1b", dtype="bfloat16", recompute="block"), EF
    ),
    "documents, windows, 3 groups": replace(
        make_job(replace(SEPARATE, microbatches=5, reduction_groups=3), EF),
        model=replace(MODEL, sliding_window=3, first_window_layer=1),
    ),
    "gpipe, without clipping": make_job(replace(MASKED, schedule="gpipe", clip_norm=0.0), ADAMW),
}


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", JOBS)
def test_any_cut_gives_the_bits_of_the_plain_loop(name: str, num_stages: int) -> None:
    """1, 2, 3 and 5 stages, one batch without any target → the losses and weights of the reference."""
    job = JOBS[name]
    layers, journal = initial_layers(job), Journal()
    Pipeline(job, layers, journal, num_stages=num_stages).run()
    assert_exact(job, layers, journal)


@pytest.mark.parametrize("late_seed", [None, 3])
@pytest.mark.parametrize(("train", "replicas"), [(MASKED, (2, 1, 2)), (SEPARATE, (2, 1, 2)), (SEPARATE, (1, 2, 1))])
def test_replicas_and_late_devices_change_no_bit(
    train: TrainSpec, replicas: tuple[int, ...], late_seed: int | None
) -> None:
    """Two workers of the first stage each know the targets of the whole batch → the losses of the reference."""
    job = make_job(replace(train, microbatches=5, reduction_groups=2, batches=3), EF)
    layers, journal = initial_layers(job), Journal()
    Pipeline(job, layers, journal, num_stages=3, replicas=replicas, late_seed=late_seed).run()
    assert_exact(job, layers, journal)


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
    losses, _ = oracle(JOBS["1f1b, AdamW, attention again"])
    assert losses[1] == 0.0
    assert all(loss > 1 for k, loss in enumerate(losses) if k != 1)


def test_a_mask_that_names_every_target_is_the_plain_mean_but_for_rounding() -> None:
    """All targets count → the losses of the job without a mask, within rounding."""

    class AllTargets(CountingTokens):
        def flags(self, train: TrainSpec, batch: int, microbatch: int) -> "torch.Tensor":  # type: ignore[override]
            return super().flags(train, batch, microbatch) | 1  # type: ignore[return-value]

    found: list[float] = []
    job = make_job(replace(MASKED, schedule="1f1b"), ADAMW)
    reference(job, AllTargets(), on_batch=lambda row: found.append(row.loss))  # type: ignore[arg-type]
    assert found == pytest.approx(oracle(make_job(with_train(schedule="1f1b"), ADAMW))[0], rel=1e-5)
