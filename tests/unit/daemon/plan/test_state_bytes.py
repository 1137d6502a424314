"""What a layer's optimizer keeps, by the planner's formula and by the tensors themselves."""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.plan.connections import LinkAssumptions, Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.stage_costs import StageCosts
from headway.stages.ids import LayerName
from headway.stages.state.layer_state import LayerState
from tests.rigs.clusters import job, node
from tests.rigs.pipeline import NARROW, TRAIN, factory_of, make_job


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_the_state_of_a_narrow_optimizer_has_the_bytes_of_its_tensors(schedule: Literal["2bw", "1f1b"]) -> None:
    """Momentum and Error Feedback in bfloat16 → each layer's state_bytes are those of its tensors after an update."""
    job = make_job(replace(TRAIN, schedule=schedule, dtype="bfloat16"), NARROW)
    for cost in layer_costs(job):
        layer = LayerState.initial(
            LayerName(cost.name), job.model, job.train, seed=0, device="cpu", optimizer_factory=factory_of(job)
        )
        layer.update(0, {name: torch.ones_like(tensor) for name, tensor in layer.weights().items()})
        assert cost.state_bytes == sum(tensor.nbytes for tensor in layer.tensors().values())


@pytest.mark.parametrize(
    ("replicas", "num_nodes", "num_sets"), [((1, 1), 2, 2), ((), 2, 4), ((2, 1), 3, 4), ((1, 2), 3, 4)]
)
def test_without_replicas_two_sums_count(replicas: tuple[int, ...], num_nodes: int, num_sets: int) -> None:
    """Four reduction groups: two sums if the job wants no replicas, else one for each group of a worker alone."""
    spec = job(num_blocks=4, placement=PlacementSpec(replicas=replicas), reduction_groups=4, microbatches=8)
    slots = [DeviceSlot.of(node(f"n{index}"), 0) for index in range(num_nodes)]
    costs = StageCosts(spec, slots, Profiles(), Links(LinkAssumptions(), Profiles(), frozenset()))
    assert float(costs.memory.gradient_sets(4, 1)) == num_sets
    assert float(costs.memory.gradient_sets(1, 1)) == 1
