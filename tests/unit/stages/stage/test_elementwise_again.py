"""With `recompute = "elementwise"` the graph is the same and keeps less: equal bits, for any kind of block."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.layer_costs import layer_costs
from headway.stages.data.microbatch import Microbatch
from headway.stages.spec import AdapterSpec, Recompute
from tests.rigs.middle_stage import MODEL, NUM_IN_FLIGHT, TRAIN, LiveBytes, hidden, middle_stage
from tests.rigs.pipeline import EF, make_job

EXPERTS = replace(MODEL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LINEAR = replace(
    MODEL,
    layer_types=("linear_attention", "full_attention"),
    attn_output_gate=True,
    zero_centered_norms=True,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)
MODELS = {
    "Llama": MODEL,
    "norms before and after": replace(MODEL, norm_placement="both", qk_norm=True),
    "norms after": replace(MODEL, norm_placement="after"),
    "one product of gate and up": replace(MODEL, fused_projections=True, num_key_value_heads=4),
    "gelu": replace(MODEL, hidden_act="gelu_pytorch_tanh"),
    "experts": EXPERTS,
    "experts beside a shared one": replace(EXPERTS, num_shared_experts=1, shared_expert_gate=True),
    "experts with a limit": replace(EXPERTS, swiglu_limit=7.0),
    "linear attention": LINEAR,
    "adapters": replace(MODEL, adapter=AdapterSpec(rank=2)),
    "adapters with dropout": replace(MODEL, adapter=AdapterSpec(rank=2, dropout=0.2)),
    "adapters beside nf4": replace(MODEL, adapter=AdapterSpec(rank=2, quantize="nf4")),
    "an adapter of down_proj alone": replace(MODEL, adapter=AdapterSpec(rank=2, targets=("down_proj",))),
    "an adapter of up_proj alone": replace(MODEL, adapter=AdapterSpec(rank=2, targets=("up_proj",))),
}


def job(recompute: Recompute, name: str, dtype: str = "float32") -> JobSpec:
    return make_job(replace(TRAIN, recompute=recompute, dtype=dtype), EF, model=MODELS[name])  # type: ignore[arg-type]


def all_bits(spec: JobSpec) -> list[Tensor]:
    """Outputs and gradients of two microbatches that are in flight at once."""
    graph, _ = middle_stage(spec)
    rows = [hidden(k).to(getattr(torch, spec.train.dtype)) for k in range(2)]
    seen = [graph.forward((0, k), Microbatch(each, each), version=0) for k, each in enumerate(rows)]
    for k, each in enumerate(rows):
        gradients, below = graph.backward((0, k), each)
        seen += gradients if below is None else [*gradients, below]
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_changes(name: str, dtype: str) -> None:
    """Outputs and gradients of all blocks, as without recomputation."""
    for one, other in zip(all_bits(job("none", name, dtype)), all_bits(job("elementwise", name, dtype)), strict=True):
        assert torch.equal(one, other)


def bytes_in_flight(spec: JobSpec) -> tuple[int, int, int]:
    """What some microbatches keep; what is alive after the backward of all; and the planner's estimate."""
    graph, layers = middle_stage(spec)
    inputs = [hidden(k) for k in range(NUM_IN_FLIGHT)]
    graph.forward((9, 0), Microbatch(hidden(), hidden()), version=0)
    graph.backward((9, 0), hidden())
    held = [tensor for layer in layers for each in layer.versions.sets for tensor in each.values()]
    held += [tensor for layer in layers for tensor in layer.frozen.values()]
    with LiveBytes([*inputs, *held]) as live:
        for k, each in enumerate(inputs):
            graph.forward((0, k), Microbatch(each, each), version=0)
        kept = live.now
        for k in range(NUM_IN_FLIGHT):
            graph.backward((0, k), hidden())
        left = live.now
    return kept, left, NUM_IN_FLIGHT * sum(cost.activation_bytes for cost in layer_costs(spec)[1:-1])


@pytest.mark.parametrize(
    ("name", "most"), [("Llama", 0.64), ("one product of gate and up", 0.69), ("adapters", 0.64), ("experts", 0.75)]
)
def test_less_is_kept_and_the_planner_knows_it(name: str, most: float) -> None:
    """At most this share of what `none` keeps, the planner's number to a tenth, and nothing after the backward."""
    plain, _, _ = bytes_in_flight(job("none", name))
    kept, left, predicted = bytes_in_flight(job("elementwise", name))
    assert kept <= most * plain
    assert 0.9 * predicted <= kept <= 1.1 * predicted
    assert left == 0


def test_what_is_made_again_is_never_made_of_other_weights() -> None:
    """An update has overwritten the version of a microbatch in flight: its backward is refused."""
    graph, layers = middle_stage(job("elementwise", "Llama"))
    graph.forward((0, 0), Microbatch(hidden(), hidden()), version=0)
    for layer in layers:
        layer.versions._held[0] = 2
    with pytest.raises(AssertionError, match="W_0 is not live"):
        graph.backward((0, 0), hidden())
