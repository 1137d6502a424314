"""Forward and backward of a stage's layers, and the autograd graphs of the microbatches in flight."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.stages.layer_state import LayerState
from headway.stages.model import build_layer, token_loss
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.weight_versions import ParameterSet


@dataclass(frozen=True, slots=True)
class _InFlight:
    """One microbatch between its forward and its backward."""

    version: int
    hidden: Tensor
    output: Tensor


class StageGraph:
    """The layers of a stage in a row, on an explicit weight version.

    There is one module per layer and tensor set, its parameters being that set's tensors: the version that a forward
    reads is the module that it calls. The arithmetic is that of functional_call, without its cost per call.
    """

    def __init__(
        self, layers: Sequence[LayerState], model: ModelSpec, train: TrainSpec, *, is_first: bool, is_last: bool
    ) -> None:
        self._layers = tuple(layers)
        self._is_first = is_first
        self._is_last = is_last
        self._modules = tuple(
            tuple(
                _bound(
                    build_layer(layer.name, model, attention_backend=train.attention_backend), layer.versions.sets[k]
                )
                for layer in layers
            )
            for k in (0, 1)
        )
        self._parameters = tuple(
            [tensor for layer in layers for tensor in layer.versions.sets[k].values()] for k in (0, 1)
        )
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._num_readers = [0, 0]

    @property
    def is_empty(self) -> bool:
        """Whether no graph is alive."""
        return not self._in_flight

    def forward(self, key: tuple[int, int], inputs: Tensor, targets: Tensor, *, version: int) -> Tensor:
        """Compute a microbatch on W_version and keep its graph.

        key: (batch, microbatch). inputs: int64 tokens [microbatch, sequence] on the first stage, hidden [microbatch,
        sequence, hidden] on the others. Returns the hidden output, or the loss [] on the last stage, without a graph.
        """
        assert key not in self._in_flight, f"microbatch {key} is in flight already"
        assert all(layer.versions.holds(version) for layer in self._layers), f"W_{version} is not live"
        hidden = inputs if self._is_first else inputs.detach().requires_grad_()
        output = hidden
        for module in self._modules[version % 2]:
            output = module(output)
        if self._is_last:
            output = token_loss(output, targets)
        self._in_flight[key] = _InFlight(version, hidden, output)
        self._num_readers[version % 2] += 1
        return output.detach()

    def backward(self, key: tuple[int, int], gradient: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """Differentiate a microbatch by the weights its forward read, and free its graph.

        gradient: that of the output; None on the last stage. Returns the parameters' gradients, in the order of the
        layers and their parameters, and that of the input; None on the first stage.
        """
        held = self._in_flight.pop(key)
        inputs: list[Tensor] = [*self._parameters[held.version % 2]]
        if not self._is_first:
            inputs.append(held.hidden)
        gradients = list(torch.autograd.grad(held.output, inputs, None if gradient is None else (gradient,)))
        self._num_readers[held.version % 2] -= 1
        return gradients, None if self._is_first else gradients.pop()

    def version_of(self, key: tuple[int, int]) -> int:
        """The version that a microbatch in flight was computed on."""
        return self._in_flight[key].version

    def update(self, batch: int, gradients: Sequence[Tensor]) -> None:
        """update(b) of every layer, with the finished gradients in the order in which backward gives them."""
        assert self._num_readers[(batch + 1) % 2] == 0, f"update {batch} would overwrite weights that are in use"
        numbered = iter(gradients)
        for layer in self._layers:
            layer.update(batch, {name: next(numbered) for name in layer.versions.sets[0]})


def _bound(module: nn.Module, parameters: ParameterSet) -> nn.Module:
    """A module whose parameters are the given ones. Raises KeyError when one is missing."""
    for path, part in module.named_modules():
        for name in [name for name, _ in part.named_parameters(recurse=False)]:
            part.register_parameter(name, parameters[f"{path}.{name}" if path else name])
    return module
