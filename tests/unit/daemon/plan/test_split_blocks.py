"""Plans that cut between attention and MLP of a block: what halves cost, and when a plan has them."""

from dataclasses import replace

import pytest

from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.plan.cluster_plan import layer_range
from headway.daemon.plan.connections import LinkAssumptions, Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import LayerCost, layer_costs
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.stage_costs import StageCosts
from headway.stages.model.decoder import trained_shapes
from headway.stages.spec import RECOMPUTES, AdapterSpec, ModelSpec, Recompute, computed_layers
from tests.rigs.clusters import job, node, planned
from tests.rigs.pipeline import with_blocks

MIXTURE = ModelSpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=100, qk_norm=True)
DOTS = replace(MIXTURE, router_scoring="sigmoid", router_bias=True, num_shared_experts=2, norm_topk_prob=True)
LINEAR = ModelSpec(
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)
SUMS = ("num_parameters", "state_bytes", "group_bytes", "frozen_bytes", "shared_bytes", "activation_bytes")
RATES = ("forward_flops", "backward_flops", "update_flops", "moved_bytes", "update_bytes")
MODELS = {
    "plain": ModelSpec(),
    "experts": DOTS,
    "four norms, biases": replace(ModelSpec(), norm_placement="both", qkv_bias=True, mlp_bias=True, layer_scalar=True),
    "linear": LINEAR,
    "adapter": ModelSpec(adapter=AdapterSpec(rank=4)),
    "adapter of experts": replace(MIXTURE, adapter=AdapterSpec(rank=4, targets=("q_proj", "up_proj"))),
}


def halves_of(spec: JobSpec, recompute: Recompute = "none") -> list[tuple[LayerCost, LayerCost, LayerCost]]:
    """Each block's cost, and those of its halves."""
    whole = layer_costs(with_blocks(spec, are_split=False), recompute)[1:-1]
    parts = layer_costs(with_blocks(spec, are_split=True), recompute)[1:-1]
    return list(zip(whole, parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_halves_cost_together_what_their_block_costs(model: ModelSpec) -> None:
    """Parameters, states, operations and kept activations add up; each half has those of its own parameters."""
    spec = replace(job(dtype="bfloat16"), model=model)
    for whole, attention, mlp in halves_of(spec):
        for cost in (whole, attention, mlp):
            shapes = trained_shapes(cost.name, model).values()
            assert cost.num_parameters == sum(shape.numel() for shape in shapes)
        for name in SUMS:
            assert getattr(attention, name) + getattr(mlp, name) == getattr(whole, name), name
        for name in RATES:
            assert getattr(attention, name) + getattr(mlp, name) == pytest.approx(getattr(whole, name)), name


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_half_alone_computes_itself_again(recompute: Recompute) -> None:
    """What a half keeps, and what passes in its backward, is no more than the whole block's; `block` keeps its input
    in each of them, attention again concerns one alone."""
    (whole, attention, mlp), *_ = halves_of(job(sequence_length=256), recompute)
    for half in (attention, mlp):
        assert half.activation_bytes <= whole.activation_bytes
        assert half.passing_bytes <= whole.passing_bytes + whole.activation_bytes
    both = attention.activation_bytes + mlp.activation_bytes
    assert both == whole.activation_bytes * (2 if recompute == "block" else 1)


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_whole_blocks_of_a_stage_cost_what_they_cost_without_halves(recompute: str) -> None:
    """A slice between blocks → the same seconds and bytes in a job with halves and in one without."""
    spec = job(num_blocks=5, recompute=recompute, dtype="bfloat16", sequence_length=256)
    slots = [DeviceSlot.of(node("a", memory_bytes=1 << 40), 0)]

    def costs_of(spec: JobSpec) -> StageCosts:
        return StageCosts(spec, slots, Profiles(), Links(LinkAssumptions(), Profiles(), frozenset()))

    whole, halves = (costs_of(with_blocks(spec, are_split=are_split)) for are_split in (False, True))
    names = halves.slices.names
    starts = [*(at for at, name in enumerate(names) if not name.endswith(".mlp")), len(names)]
    for first in range(whole.num_layers):
        for end in range(first + 1, whole.num_layers + 1):
            for choice in whole.slices.recomputes:
                one = whole.slices.slice_number((first, end), choice)
                other = halves.slices.slice_number((starts[first], starts[end]), choice)
                assert computed_layers(names[starts[first] : starts[end]]) == whole.slices.names[first:end]
                assert whole.memory.device_bytes(one, 3, (0,)) == halves.memory.device_bytes(other, 3, (0,))
                for before, after in zip(whole.seconds(slots[0]), halves.seconds(slots[0]), strict=True):
                    assert after[other] == pytest.approx(before[one], rel=1e-12)


@pytest.mark.parametrize(
    ("num_blocks", "num_nodes", "is_inside"), [(5, 1, False), (5, 2, True), (4, 3, True), (5, 3, False), (5, 5, False)]
)
def test_a_plan_cuts_inside_blocks_where_it_gains(num_blocks: int, num_nodes: int, *, is_inside: bool) -> None:
    """Two nodes share five blocks by halves in less time, three share four so; one, or one for each, cuts none."""
    spec = job(num_blocks=num_blocks, sequence_length=256)
    spec = spec.with_values({"model.vocab_size": 64})
    nodes = [node(f"n{index}") for index in range(num_nodes)]
    before, after = (planned(with_blocks(spec, are_split=are_split), nodes) for are_split in (False, True))
    begins = [stage.layers[0] for stage in after.workers]
    assert any(name.endswith(".mlp") for name in begins) is is_inside
    assert sum((stage.layers for stage in after.workers), ()) == with_blocks(spec, are_split=True).layers
    if is_inside:
        assert after.predicted_batch_seconds * 1.01 <= before.predicted_batch_seconds
    else:
        assert after.predicted_batch_seconds == before.predicted_batch_seconds


def test_a_name_tells_where_a_block_is_cut() -> None:
    """Whole blocks are called as ever; a half is named."""
    names = with_blocks(job(num_blocks=4, placement=PlacementSpec()), are_split=True).layers
    assert layer_range(names) == "embed, block.0-3, head"
    assert layer_range(names[:4]) == "embed, block.0-1.attention"
    assert layer_range(names[4:5]) == "block.1.mlp"
    assert layer_range(names[4:8]) == "block.1.mlp-3.attention"
