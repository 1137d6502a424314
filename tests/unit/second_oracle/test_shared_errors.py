"""Errors in what the pipeline and the plain loop share: both agree on the wrong bits, the second oracle does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.optim import muon, spec
from headway.optim.layer_optimizer import ErrorFeedback
from headway.optim.muon import Muon
from headway.optim.spec import LrSchedule, lr_schedule
from headway.stages.data.microbatch import Microbatch
from headway.stages.data.tokens import TokenShards
from headway.stages.model import decoder as model
from headway.stages.spec import TrainSpec
from tests.unit.second_oracle.comparison import Bits, by_pipeline, by_reference, by_second_oracle
from tests.unit.second_oracle.jobs import job_file

JOB = job_file("clip_norm = 0.0\nmicrobatches = 2", batches=4)
Planting = Callable[[pytest.MonkeyPatch], None]


def another_coefficient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(muon, "B", -4.7751)


def weight_decay_without_the_rate(patch: pytest.MonkeyPatch) -> None:
    apply = Muon._apply

    def wrong(self: Muon, weight: Tensor, update: Tensor, group: dict[str, object]) -> None:
        apply(self, weight, update, group | {"weight_decay": 0.001 / group["lr"]})  # type: ignore[operator]

    patch.setattr(Muon, "_apply", wrong)


def feedback_of_the_other_sign(patch: pytest.MonkeyPatch) -> None:
    init = ErrorFeedback.__init__
    patch.setattr(ErrorFeedback, "__init__", lambda self, alpha, **settings: init(self, -alpha, **settings))


def feedback_for_a_delay_of_two(patch: pytest.MonkeyPatch) -> None:
    init = ErrorFeedback.__init__
    patch.setattr(
        ErrorFeedback,
        "__init__",
        lambda self, alpha, *, delay, **settings: init(self, alpha, delay=2 * delay, **settings),
    )


def rate_of_the_batch_before(patch: pytest.MonkeyPatch) -> None:
    def wrong(kind: str, **settings: Any) -> LrSchedule:
        right = lr_schedule(kind, **settings)  # type: ignore[arg-type]
        return lambda update_index: right(max(0, update_index - 1))

    patch.setattr(spec, "lr_schedule", wrong)


def no_delay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrainSpec, "delay", property(lambda _: 0))


def positions_from_one(patch: pytest.MonkeyPatch) -> None:
    right = model.kept_rotary_table

    def wrong(length: int, head_dim: int, **settings: Any) -> tuple[Tensor, Tensor]:
        cosine, sine = right(2 * length, head_dim, **settings)
        return cosine[::2], sine[::2]

    patch.setattr(model, "kept_rotary_table", wrong)


def rows_in_reverse(patch: pytest.MonkeyPatch) -> None:
    right = TokenShards.microbatch

    def wrong(self: TokenShards, train: TrainSpec, **which: int) -> Microbatch:
        rows = right(self, train, **which)
        return Microbatch(torch.flip(rows.inputs, [0]), torch.flip(rows.targets, [0]))

    patch.setattr(TokenShards, "microbatch", wrong)


PLANTED: tuple[Planting, ...] = (
    another_coefficient,
    weight_decay_without_the_rate,
    feedback_of_the_other_sign,
    feedback_for_a_delay_of_two,
    rate_of_the_batch_before,
    no_delay,
    positions_from_one,
    rows_in_reverse,
)


@pytest.fixture(scope="module")
def expected(data: Path) -> Bits:
    """The bits of the page."""
    return by_second_oracle(JOB, data)


def test_without_an_error_all_three_agree(data: Path, expected: Bits) -> None:
    """Pipeline, plain loop and second oracle."""
    assert by_pipeline(JOB, data, num_stages=3) == expected
    assert by_reference(JOB, data) == expected


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_second_oracle_catches_what_both_others_share(
    plant: Planting, data: Path, expected: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in shared code → the pipeline still has the bits of the plain loop, and neither has the page's."""
    plant(monkeypatch)
    found = by_reference(JOB, data)
    assert by_pipeline(JOB, data, num_stages=3) == found
    assert found != expected
