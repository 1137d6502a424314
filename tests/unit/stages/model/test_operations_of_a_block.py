"""What a block of a card's size launches, moves and keeps, counted on meta tensors with the fused kernels of a card."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headway.daemon.plan.layer_costs import FORWARD_PASSES, layer_costs
from headway.stages.model.decoder import Block, build_layer
from headway.stages.spec import ModelSpec, Recompute, TrainSpec
from tests.rigs.middle_stage import LiveBytes
from tests.rigs.operations import Operations, launched
from tests.rigs.pipeline import make_job

MODEL = ModelSpec(
    num_hidden_layers=6, hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=8
)
TRAIN = TrainSpec(microbatch_size=8, sequence_length=1024, dtype="bfloat16", attention_backend="flash")


class FusedNorm(torch.autograd.Function):
    """Keeps its input and a float32 number a row, which is too little to count."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        made = torch.empty_like(hidden)
        launched(hidden, made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        made = torch.empty_like(hidden)
        launched(hidden, gradients[0], made)
        return made, torch.empty_like(weight)


class Flash(torch.autograd.Function):
    """Keeps its inputs, its output, and a float32 number a token and head. It is no elementwise part."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], device="meta", dtype=torch.float32)
        ctx.save_for_backward(query, key, value, made, sums)
        launched()
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        assert len(gradients) == 1
        launched()
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        norm: Callable[..., Tensor] = FusedNorm.apply
        attention: Callable[..., Tensor] = Flash.apply
        patched.setattr(functional, "rms_norm", lambda hidden, _shape, weight, _eps: norm(hidden, weight))
        patched.setattr(functional, "scaled_dot_product_attention", lambda q, k, v, **_: attention(q, k, v))
        patched.setattr(Operations, "now", None)
        yield


def block(recompute: Recompute) -> tuple[Block, Tensor]:
    """A block that has run once, and an input."""
    made = build_layer("block.0", MODEL, attention_backend="flash").to(torch.bfloat16)
    assert isinstance(made, Block)
    made.compute_again(recompute)
    shape = (TRAIN.microbatch_size, TRAIN.sequence_length, MODEL.hidden_size)
    hidden = torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
    made(hidden)  # the rotary table is made once
    return made, hidden


def counted(recompute: Recompute) -> tuple[Operations, Operations]:
    """Those of a forward, and of its backward."""
    made, hidden = block(recompute)
    with Operations() as forward:
        output = made(hidden)
    gradient = torch.empty_like(output)
    with Operations() as backward:
        torch.autograd.grad(output, [*made.parameters(), hidden], gradient)
    return forward, backward


@pytest.mark.parametrize(
    ("recompute", "most_backward", "most_bytes"), [("none", 35, 3.2e9), ("elementwise", 39, 3.8e9)]
)
def test_a_block_launches_and_moves_no_more(recompute: Recompute, most_backward: int, most_bytes: float) -> None:
    """20 launches forward and 35 backward, 3.2 GB beside the products; with two norms, a silu and a product again 39
    and 3.8 GB.
    """
    forward, backward = counted(recompute)
    assert (forward.num_products, backward.num_products) == (7, 14)
    assert forward.num_launches <= 20
    assert backward.num_launches <= most_backward
    assert forward.num_bytes + backward.num_bytes <= most_bytes


def test_what_is_made_again_moves_as_many_bytes_as_the_planner_says() -> None:
    """Twice those that are not kept, to a fifth."""
    plain, again = (sum(each.num_bytes for each in counted(recompute)) for recompute in ("none", "elementwise"))
    job = replace(make_job(TRAIN), model=MODEL)
    none, elementwise = (layer_costs(job, recompute)[1] for recompute in ("none", "elementwise"))
    predicted = elementwise.moved_bytes - none.moved_bytes
    assert predicted == FORWARD_PASSES * (none.activation_bytes - elementwise.activation_bytes)
    assert again - plain == pytest.approx(predicted, rel=0.2)


@pytest.mark.parametrize(("recompute", "most_mib"), [("none", 577), ("elementwise", 337)])
def test_a_block_keeps_what_the_planner_counts(recompute: Recompute, most_mib: int) -> None:
    """8,192 tokens in bfloat16: at most so many MiB until the backward, and the planner's number to a fiftieth."""
    made, hidden = block(recompute)
    with LiveBytes([*made.parameters(), hidden]) as live:
        output = made(hidden)
        kept = live.now  # the output instead of the input
    predicted = layer_costs(replace(make_job(TRAIN), model=MODEL), recompute)[1].activation_bytes
    assert kept == pytest.approx(predicted, rel=0.02)
    assert kept <= most_mib * 2**20
    del output
