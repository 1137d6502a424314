"""What a mixture of experts costs: memory and updates of all experts, operations of those that a token meets."""

from dataclasses import replace

import pytest

from headway.daemon.jobs.job import JobSection, JobSpec, PlacementSpec
from headway.daemon.plan.layer_costs import layer_costs
from headway.stages.model.decoder import parameter_shapes
from headway.stages.spec import ModelSpec
from tests.rigs.clusters import job, node, planned

MODEL = ModelSpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=100, qk_norm=True)
MIXTURE = replace(MODEL, num_hidden_layers=9, hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
DOTS = replace(MODEL, router_scoring="sigmoid", router_bias=True, num_shared_experts=2, norm_topk_prob=True)


@pytest.mark.parametrize("model", [MODEL, DOTS], ids=["Qwen3-MoE", "dots.llm1"])
def test_every_parameter_is_counted_once(model: ModelSpec) -> None:
    block = layer_costs(JobSpec(job=JobSection(name="j"), model=model))[1]
    assert block.num_parameters == sum(shape.numel() for shape in parameter_shapes("block.0", model).values())


def test_more_experts_take_memory_and_no_operations() -> None:
    """Twice the experts, as many a token: the forward's operations stay, parameters and the update's grow."""
    few, many = (
        layer_costs(JobSpec(job=JobSection(name="j"), model=replace(MODEL, num_experts=number)))[1]
        for number in (8, 16)
    )
    assert few.forward_flops == many.forward_flops
    expert = 3 * MODEL.hidden_size * MODEL.moe_intermediate_size
    assert many.num_parameters - few.num_parameters == 8 * (expert + MODEL.hidden_size)
    assert many.update_flops > 1.5 * few.update_flops


@pytest.mark.parametrize(("sequence_length", "is_long"), [(16, False), (4096, True)])
def test_gradients_come_where_activations_were(sequence_length: int, *, is_long: bool) -> None:
    """Three blocks, one stage in the middle: the backward never has all gradients beside all activations.

    Few tokens: the fullest moment is in the first block, when those above have their gradients. Many: in the last one.
    """
    spec = replace(job(num_blocks=9, sequence_length=sequence_length, schedule="gpipe", microbatches=3), model=MIXTURE)
    spec = replace(spec, placement=PlacementSpec(replicas=(1, 1, 1)))
    (middle,) = [
        each.stage
        for each in planned(spec, [node("a"), node("b"), node("c")]).estimates
        if not {"embed", "head"} & set(each.stage.layers)
    ]
    block, number = layer_costs(spec)[1], len(middle.layers)
    assert number > 1
    assert (block.activation_bytes > block.backward_bytes) is is_long
    moment = (
        number * block.activation_bytes + block.backward_bytes
        if is_long
        else block.activation_bytes + number * block.backward_bytes
    )
    others = (middle.depth - 1) * number * block.activation_bytes
    resident = number * (block.resident_bytes - block.backward_bytes + block.group_bytes)
    assert middle.device_bytes == resident + others + moment
