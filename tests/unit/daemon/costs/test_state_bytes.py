"""What a layer's optimizer keeps, by the planner's formula and by the tensors themselves."""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from headway.daemon.costs.layer_costs import layer_costs
from headway.stages.ids import LayerName
from headway.stages.state.layer_state import LayerState
from tests.unit.stages.stage.pipeline import NARROW, TRAIN, factory_of, make_job


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
