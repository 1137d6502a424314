"""Two versions live, and no set written while somebody reads it."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from headway.stages.ids import LayerName
from headway.stages.spec import TrainSpec
from headway.stages.state.layer_state import LayerState, update_layers
from headway.stages.state.optimizer import LayerOptimizer
from headway.stages.state.weight_versions import WeightVersions


class Halving(LayerOptimizer):
    """An optimizer: W_{b+1} = W_b / 2."""

    def step(
        self,
        update_index: int,
        *,
        current: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        assert update_index >= 0
        assert not gradients
        for name, tensor in current.items():
            target[name].copy_(tensor * 0.5)

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        assert not state


def versions_of(dtype: torch.dtype = torch.float32) -> WeightVersions:
    return WeightVersions({"w": torch.full((2,), 8.0)}, version=0, dtype=dtype)


def test_an_update_writes_the_other_set() -> None:
    """W_0 in set 0, W_1 in set 1, W_2 over W_0: each set keeps its memory."""
    versions = versions_of()
    memory = [versions.sets[k]["w"].data_ptr() for k in (0, 1)]
    versions.update(0, Halving(), {})
    assert (versions.plain(0)["w"].tolist(), versions.plain(1)["w"].tolist()) == ([8.0, 8.0], [4.0, 4.0])
    versions.update(1, Halving(), {})
    assert (versions.plain(1)["w"].tolist(), versions.plain(2)["w"].tolist()) == ([4.0, 4.0], [2.0, 2.0])
    assert not versions.holds(0)
    assert [versions.sets[k]["w"].data_ptr() for k in (0, 1)] == memory


def test_a_version_that_is_not_live_cannot_be_read() -> None:
    """W_1 before update(0), W_0 after update(1) → refused."""
    versions = versions_of()
    with pytest.raises(AssertionError, match="W_1 is not live"):
        versions.plain(1)
    versions.update(0, Halving(), {})
    versions.update(1, Halving(), {})
    with pytest.raises(AssertionError, match="W_0 is not live"):
        versions.plain(0)


def test_a_backward_through_an_overwritten_set_is_refused_by_autograd() -> None:
    """A graph reads W_0, updates 0 and 1 go over it → the backward raises instead of giving wrong gradients."""
    versions = versions_of()
    loss = (versions.sets[0]["w"] ** 2).sum()
    versions.update(0, Halving(), {})
    torch.autograd.grad(loss, [versions.sets[0]["w"]], retain_graph=True)
    versions.update(1, Halving(), {})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, [versions.sets[0]["w"]])


def test_a_bfloat16_job_keeps_one_master_and_two_casts() -> None:
    """The master halves in place; the sets are its casts, the older one untouched."""
    versions = WeightVersions({"w": torch.tensor([1.001])}, version=0, dtype=torch.bfloat16)
    assert versions.master is not None
    master = versions.master["w"]
    versions.update(0, Halving(), {})
    assert versions.exact(1)["w"] is master
    assert master.item() == pytest.approx(0.5005)
    assert versions.plain(1)["w"].dtype == torch.bfloat16
    assert torch.equal(versions.plain(1)["w"], master.bfloat16())
    assert torch.equal(versions.plain(0)["w"], torch.tensor([1.001]).bfloat16())


def test_versions_that_do_not_fit_each_other_are_refused() -> None:
    """W_1 and a W_0 of another shape → ValueError."""
    with pytest.raises(ValueError, match="differ"):
        WeightVersions({"w": torch.ones(2)}, version=1, dtype=torch.float32, previous={"w": torch.ones(3)})


def test_layers_of_an_optimizer_that_knows_no_better_step_one_after_the_other() -> None:
    """update(0) of two layers at once: each has its own half, written to its own other set."""
    layers = [
        LayerState(
            LayerName(name),
            WeightVersions({"w": torch.tensor([weight])}, version=0, dtype=torch.float32),
            Halving(),
            train=TrainSpec(),
        )
        for name, weight in (("block.0", 8.0), ("block.1", 3.0))
    ]
    update_layers(layers, 0, [{}, {}])
    assert [layer.boundary for layer in layers] == [1, 1]
    found = [(layer.versions.plain(0)["w"].item(), layer.versions.plain(1)["w"].item()) for layer in layers]
    assert found == [(8.0, 4.0), (3.0, 1.5)]
