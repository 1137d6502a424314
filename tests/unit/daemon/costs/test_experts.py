"""What a mixture of experts costs: memory and updates of all experts, operations of those that a token meets."""

from dataclasses import replace

import pytest

from headway.daemon.costs.layer_costs import layer_costs
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.stages.model.decoder import parameter_shapes
from headway.stages.spec import ModelSpec

MODEL = ModelSpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=100, qk_norm=True)
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
