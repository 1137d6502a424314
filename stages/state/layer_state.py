"""The whole state of a layer at a boundary: its live weight versions and its optimizer's state."""

from collections.abc import Mapping, Sequence
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from headway.stages.ids import Boundary, LayerName
from headway.stages.model.adapters import is_of_adapter
from headway.stages.model.decoder import frozen_shapes, parameter_shapes, trained_shapes
from headway.stages.model.initial_weights import frozen_beside, in_dtype, initial_adapters, initial_parameters
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.state.optimizer import LayerOptimizer, OptimizerFactory
from headway.stages.state.weight_versions import WeightVersions

INITIAL: Final = "initial"
"""Slot of the weights with which a model begins, in any dtype: a file of boundary 0 has them alone."""


class LayerState:
    """One layer, live. When a layer moves, its name, versions and optimizer move.

    Under an adapter they are of the adapter alone. Then `frozen` has the weights beside it, in the job's dtype: one
    version, in no file, from the model's folder or the seed wherever the layer goes.
    """

    __slots__ = ("frozen", "name", "optimizer", "train", "versions")

    def __init__(
        self,
        name: LayerName,
        versions: WeightVersions,
        optimizer: LayerOptimizer,
        *,
        train: TrainSpec,
        frozen: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.name = name
        self.frozen = {key: Parameter(tensor, requires_grad=False) for key, tensor in (frozen or {}).items()}
        self.versions = versions
        self.optimizer = optimizer
        self.train = train

    @classmethod
    def initial(
        cls,
        name: LayerName,
        model: ModelSpec,
        train: TrainSpec,
        *,
        seed: int,
        device: torch.device | str,
        optimizer_factory: OptimizerFactory,
        frozen: Mapping[str, Tensor] | None = None,
        adapters: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Return boundary 0: a function of the seed and the layer's name. frozen: None: drawn, if there is any.

        adapters: those with which the layer begins; None: drawn, if there are any.
        """
        initial = initial_adapters if model.has_adapter else initial_parameters
        drawn = initial(name, model, seed=seed) if adapters is None else adapters
        weights = {n: tensor.to(device) for n, tensor in drawn.items()}
        if frozen is None:
            frozen = frozen_weights(name, model, train, seed=seed, device=device)
        return cls._beginning(name, weights, train, optimizer_factory, frozen=frozen)

    @classmethod
    def _beginning(
        cls,
        name: LayerName,
        weights: dict[str, Tensor],
        train: TrainSpec,
        optimizer_factory: OptimizerFactory,
        *,
        frozen: Mapping[str, Tensor],
    ) -> Self:
        optimizer = optimizer_factory(name, weights)
        versions = WeightVersions(weights, version=0, dtype=getattr(torch, train.dtype))
        return cls(name, versions, optimizer, train=train, frozen=frozen)

    @classmethod
    def from_tensors(
        cls,
        name: LayerName,
        tensors: Mapping[str, Tensor],
        model: ModelSpec,
        train: TrainSpec,
        *,
        boundary: Boundary,
        device: torch.device | str,
        optimizer_factory: OptimizerFactory,
        frozen: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Return the inverse of `tensors()`, or boundary 0 with given weights. Takes over tensors on the device.

        frozen: the weights beside the adapters, which no file of a boundary has.

        Raises ValueError when a tensor is missing, unknown or misshapen.
        """
        slots: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            slot, _, rest = key.partition("/")
            slots.setdefault(slot, {})[rest] = tensor
        if slots.keys() == {INITIAL} and boundary == 0 and not model.has_adapter:
            weights = initial_weights(slots[INITIAL], parameter_shapes(name, model), device)
            return cls._beginning(name, weights, train, optimizer_factory, frozen={})
        dtype: torch.dtype = getattr(torch, train.dtype)
        newest = "current" if dtype == torch.float32 else "master"
        needs_previous = _needs_previous(boundary, train)
        unknown = slots.keys() - {newest, "optim"} - ({"previous"} if needs_previous else set())
        if unknown:
            raise ValueError(f"a layer at boundary {boundary} has no {', '.join(sorted(unknown))}")
        shapes = trained_shapes(name, model)
        weights = _checked(newest, slots, shapes, torch.float32, device)
        previous = _checked("previous", slots, shapes, dtype, device) if needs_previous else None
        optimizer = optimizer_factory(name, weights)
        try:
            optimizer.load_state(slots.get("optim", {}))
        except KeyError as error:
            raise ValueError(f"the optimizer's state does not fit: {error}") from error
        versions = WeightVersions(weights, version=boundary, dtype=dtype, previous=previous)
        return cls(name, versions, optimizer, train=train, frozen=frozen)

    @property
    def boundary(self) -> Boundary:
        """Return b, when the newest version is W_b."""
        return Boundary(self.versions.version)

    def update(self, batch: int, gradients: Mapping[str, Tensor]) -> None:
        """Do update(b): from boundary b to boundary b+1."""
        self.versions.update(batch, self.optimizer, gradients)

    def tensors(self) -> dict[str, Tensor]:
        """Return the content of the boundary, flat. Live: not copies.

        `current/<parameter>` W_b in fp32, `master/<parameter>` instead of it in a bfloat16 job;
        `previous/<parameter>` W_{b-1} in the job's dtype, if batch b is computed on it;
        `optim/<slot>/<parameter>` the optimizer's state.
        """
        newest = "current" if self.versions.master is None else "master"
        content = {f"{newest}/{name}": tensor for name, tensor in self.weights().items()}
        if _needs_previous(self.boundary, self.train):
            plain = self.versions.plain(self.boundary - 1)
            content |= {f"previous/{name}": tensor for name, tensor in plain.items()}
        return content | {f"optim/{key}": tensor for key, tensor in self.optimizer.state().items()}

    def weights(self) -> Mapping[str, Tensor]:
        """Return W_b in fp32, by parameter name. Live: not copies."""
        return self.versions.exact(self.boundary)


def frozen_weights(
    name: LayerName,
    model: ModelSpec,
    train: TrainSpec,
    *,
    seed: int,
    device: torch.device | str,
    given: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return what a layer has beside its adapters, in the job's dtype; empty: everything is trained.

    given: the tensors of its part of a model's folder; None: the weights are drawn. Raises ValueError as
    `initial_weights`.
    """
    if not model.has_adapter:
        return {}
    if given is None:
        return frozen_beside(initial_parameters(name, model, seed=seed), name, model, train, device=device)
    weights = {key.removeprefix(f"{INITIAL}/"): tensor for key, tensor in given.items() if not is_of_adapter(key)}
    _check_shapes(weights, {key: shape for key, (shape, _) in frozen_shapes(name, model).items()})
    return in_dtype(weights, train, device)


def given_adapters(given: Mapping[str, Tensor], name: LayerName, model: ModelSpec) -> dict[str, Tensor]:
    """Return the adapters with which a layer begins, in fp32. given: the tensors of its part of a model's folder.

    Raises ValueError as `initial_weights`.
    """
    adapters = {key.removeprefix(f"{INITIAL}/"): tensor for key, tensor in given.items() if is_of_adapter(key)}
    return initial_weights(adapters, trained_shapes(name, model), "cpu")


def initial_weights(
    given: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], device: torch.device | str
) -> dict[str, Tensor]:
    """Return W_0 in fp32, in the module's order, from weights of any dtype: the cast is exact.

    Raises ValueError when one is missing, unknown or misshapen.
    """
    _check_shapes(given, shapes)
    return {name: given[name].to(device=device, dtype=torch.float32) for name in shapes}


def _check_shapes(given: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    if given.keys() != shapes.keys():
        odd = sorted(given.keys() ^ shapes.keys())
        raise ValueError(f"{INITIAL} has not exactly the parameters of the layer: {', '.join(odd[:3])}")
    for name, shape in shapes.items():
        if given[name].shape != shape:
            raise ValueError(f"{INITIAL}/{name} is {list(given[name].shape)} instead of {list(shape)}")


def share_of_update(
    layers: Sequence[LayerState], batch: int, gradients: Sequence[Mapping[str, Tensor]], matrices: Sequence[int]
) -> Tensor:
    """Return what the optimizers compute for some of a stage's matrices, as one row. Nothing changes."""
    optimizers = [layer.optimizer for layer in layers]
    return type(optimizers[0]).orthogonalize_share(optimizers, batch, gradients=gradients, matrices=matrices)


def update_layers(
    layers: Sequence[LayerState],
    batch: int,
    gradients: Sequence[Mapping[str, Tensor]],
    *,
    owners: Sequence[int] = (),
    shares: Mapping[int, Tensor] | None = None,
) -> None:
    """Do update(b) of a stage's layers, with the gradients of each: the bits equal each layer's own `update`.

    owners, shares: see `LayerOptimizer.step_together`.
    """
    optimizers, versions = [layer.optimizer for layer in layers], [layer.versions for layer in layers]
    begun = [of_layer.begin_update(batch) for of_layer in versions]
    current, target = [weights for weights, _ in begun], [weights for _, weights in begun]
    type(optimizers[0]).step_together(
        optimizers, batch, current=current, target=target, gradients=gradients, owners=owners, shares=shares
    )
    for of_layer in versions:
        of_layer.end_update(batch)


def _needs_previous(boundary: int, train: TrainSpec) -> bool:
    """Return whether batch b, the first after the boundary, is computed on an older version than W_b."""
    return train.weight_version(boundary) < boundary


def _checked(
    slot: str,
    slots: Mapping[str, Mapping[str, Tensor]],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Return one slot's tensors in the module's order, on the device."""
    given = slots.get(slot, {})
    if given.keys() != shapes.keys():
        raise ValueError(f"{slot} has not exactly the parameters {', '.join(shapes)}")
    for name, shape in shapes.items():
        if given[name].shape != shape or given[name].dtype != dtype:
            raise ValueError(
                f"{slot}/{name} is {given[name].dtype} {list(given[name].shape)} instead of {dtype} {list(shape)}"
            )
    return {name: given[name].to(device) for name in shapes}


def split_by_layer(layers: Sequence[LayerState], gradients: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return a stage's gradients, in backward's order, by layer and parameter name."""
    numbered = iter(gradients)
    return [{name: next(numbered) for name in layer.versions.sets[0]} for layer in layers]
