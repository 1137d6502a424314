"""What the planner believes that a block keeps for its backward is what autograd keeps."""

from typing import Any

import pytest

from headway.daemon.plan.block_widths import block_widths
from headway.stages.spec import AdapterSpec, ModelSpec, TrainSpec, matrix_names
from tests.rigs.block_widths import MOST_BESIDE, TOKENS, saved_values

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DOTS: dict[str, Any] = EXPERTS | {
    "num_shared_experts": 2, "router_scoring": "sigmoid", "router_bias": True, "norm_topk_prob": True,
}  # fmt: skip
QWEN2_MOE: dict[str, Any] = EXPERTS | {"num_shared_experts": 2, "shared_expert_gate": True, "qkv_bias": True}
GEMMA: dict[str, Any] = {
    "norm_placement": "both", "zero_centered_norms": True, "hidden_act": "gelu_pytorch_tanh", "qk_norm": True,
}  # fmt: skip
GLM: dict[str, Any] = {
    "norm_placement": "both", "fused_gate_up": True, "partial_rotary_factor": 0.5, "rope_interleaved": True,
}  # fmt: skip
OLMO: dict[str, Any] = {"norm_placement": "after", "qk_norm": True, "qk_norm_over": "heads"}


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        *(({}, (name,)) for name in matrix_names(ModelSpec(**SHAPE))),
        ({}, ("q_proj", "v_proj")),
        ({}, ()),
        ({"fused_projections": True}, ()),
        ({"fused_projections": True}, ("gate_up_proj",)),
        ({"head_dim": 24}, ()),
        ({"qk_norm": True}, ()),
        ({"qkv_bias": True, "output_bias": True}, ("q_proj",)),
        (GEMMA, ()),
        (GLM, ()),
        (GLM, ("q_proj", "down_proj")),
        (OLMO, ()),
        (EXPERTS, ()),
        (DOTS, ("q_proj",)),
        (QWEN2_MOE, ()),
    ],
    ids=str,
)
def test_a_block_beside_adapters_keeps_what_is_counted(options: dict[str, Any], targets: tuple[str, ...]) -> None:
    """Every storage that autograd saves, without the parameters, over the tokens: little more than the widths."""
    model = ModelSpec(**SHAPE, **options, adapter=AdapterSpec(rank=3, targets=targets))
    counted = block_widths(model, TrainSpec(batches=1)).kept
    assert 0 <= saved_values(model) / TOKENS - counted <= MOST_BESIDE


@pytest.mark.parametrize(
    "options", [{}, {"fused_projections": True}, {"qk_norm": True}, GEMMA, GLM, OLMO, EXPERTS, DOTS], ids=str
)
def test_a_trained_block_keeps_what_is_counted(options: dict[str, Any]) -> None:
    """Without adapters each matrix keeps its input, an expert's the rows sent to it, and each norm its normed input."""
    model = ModelSpec(**SHAPE, **options)
    assert 0 <= saved_values(model) / TOKENS - block_widths(model, TrainSpec(batches=1)).kept <= MOST_BESIDE
