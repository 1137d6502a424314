"""Mixtures of experts in a pipeline: the plain loop's bits at any cut, with replicas and what is computed again."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.stages.model.decoder import build_layer
from headway.stages.model.experts import RouterLosses
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import ROUTER_BIAS, ModelSpec
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    EF,
    MODEL,
    Pipeline,
    initial_layers,
    make_job,
    with_train,
)

MIXTRAL = replace(MODEL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
DOTS = replace(
    MIXTRAL, qk_norm=True, router_scoring="sigmoid", router_bias=True, num_shared_experts=1, routed_scaling_factor=1.5
)
BIASED = replace(EF, router_bias_lr=0.05)


def test_the_biases_move_against_the_load() -> None:
    """One update: each bias falls by the rate where its expert had too many tokens, and rises where too few."""
    job = make_job(with_train(batches=1, schedule="1f1b"), replace(BIASED, warmup_batches=0), model=DOTS)
    layers = initial_layers(job)
    Pipeline(job, layers, Journal(), num_stages=1).run()
    biases = layers["block.1"].weights()[f"mlp.gate.{ROUTER_BIAS}"]
    assert {-1.0, 1.0} <= set(biases.sign().tolist())
    assert all(size in (0.0, pytest.approx(0.05)) for size in biases.abs().tolist())


def block_of(spec: ModelSpec, losses: RouterLosses) -> Any:
    block: Any = build_layer("block.0", spec)
    block.load_state_dict(initial_parameters("block.0", spec, seed=1), assign=True)
    for parameter in block.parameters():
        parameter.requires_grad_()
    block.mlp.losses = losses
    return block


@pytest.mark.parametrize("spec", [MIXTRAL, DOTS], ids=["softmax", "sigmoid"])
def test_the_losses_are_those_of_transformers(spec: ModelSpec) -> None:
    """One block: the gradient with the balance loss is the one without, and that of transformers' own function."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    hidden = torch.randn(2, 8, spec.hidden_size, generator=torch.Generator().manual_seed(3))
    gradients = []
    for factor in (0.0, 0.3):
        block = block_of(spec, RouterLosses(balance=factor))
        block(hidden).square().mean().backward()
        gradients.append(block.mlp.gate.weight.grad)
    router = block_of(spec, RouterLosses()).mlp.gate
    block = block_of(spec, RouterLosses())
    with torch.no_grad():
        mixed = hidden + block._attention(hidden, None)
        rows = block.post_attention_layernorm(mixed).flatten(0, -2)
    logits, *_ = router(rows)
    if spec.router_scoring == "softmax":
        loss = modeling.load_balancing_loss_func((logits,), spec.num_experts, spec.num_experts_per_tok)
        (wanted,) = torch.autograd.grad(loss * 0.3, router.weight)
        torch.testing.assert_close(gradients[1] - gradients[0], wanted, rtol=1e-4, atol=1e-6)
    assert not torch.equal(*gradients)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    """The router never chooses the last expert: autograd still returns a gradient for it."""
    spec = replace(MIXTRAL, router_bias=True)
    block = block_of(spec, RouterLosses())
    with torch.no_grad():
        block.mlp.gate.e_score_correction_bias[-1] = -10.0
    block(torch.randn(1, 8, spec.hidden_size)).sum().backward()
    for matrix in (block.mlp.experts[3].gate_proj, block.mlp.experts[3].down_proj):
        assert not matrix.weight.grad.any()
    assert block.mlp.experts[0].down_proj.weight.grad.any()
    assert block.mlp.gate.e_score_correction_bias.grad[-1] == -1.0


def test_experts_return_to_their_tokens() -> None:
    """Each row alone gives what it gives among others: sorting by expert and back is no part of the result."""
    mixture = block_of(MIXTRAL, RouterLosses()).mlp
    rows = torch.randn(1, 8, MIXTRAL.hidden_size, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        together = mixture(rows)
        alone = torch.cat([mixture(rows[:, k : k + 1]) for k in range(8)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(together[:, 0], together[:, 1])
