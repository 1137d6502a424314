"""One layer's optimizer: torch optimizers, which step in place and key state by tensor, made to fit weight versions.

W_k lives in tensor set k mod 2, so an update reads one set and writes the other. Torch optimizers know neither sets
nor names. Each parameter therefore has a slot, a Parameter that is pointed at the target for the time of a step: the
optimizer's state hangs on the slot, and the slot has a name.
"""

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from headway.optim.muon import Batch, Matrix, Muon
from headway.optim.routing import ROUTER_BIAS, Group, route_layer, split_by_decay
from headway.optim.spec import STEP_COUNT, GroupSpec, LrSchedule, OptimSpec, StateTensor
from headway.optim.step_count import STEPS
from headway.optim.update_shares import from_shares, joined
from headway.stages.plugin_names import PluginError, imported, told_by


def inner_optimizer(spec: GroupSpec, parameters: Sequence[Tensor]) -> Optimizer:
    """Return the optimizer of one group. Raises PluginError when it is a plug-in that cannot be made."""
    kind, made_with = spec.kind, {"lr": spec.lr, "weight_decay": spec.weight_decay}
    if not spec.is_plugin:
        own = {name: getattr(spec, name) for name in kind.settings}
        made: Optimizer = pkgutil.resolve_name(kind.path)(parameters, **made_with, **own)
        return made
    with told_by(spec.name):
        optimizer = imported(spec.name)(parameters, **made_with, **dict(spec.settings))
    if not isinstance(optimizer, Optimizer):
        raise PluginError(spec.name, f"makes a {type(optimizer).__name__}, which is no torch.optim.Optimizer")
    return optimizer


# Error Feedback for a gradient that is one version old, at the level of the update.
#
# Source: Zmushko et al., "One-Step Gradient Delay is Not a Barrier for Large-Scale Asynchronous Pipeline Parallel LLM
# Pretraining", ICML 2026, arXiv 2606.30634. The rule and its derivation are in docs/numerics.md.

SLOT = "error_feedback"


class ErrorFeedback:
    """Adds the difference of two consecutive updates. State: δ_{b−1} by parameter name, in `deltas`.

    The inner optimizer went from W_b to W'. With δ_b = W_b − W' and c = α·delay:

        W_{b+1} = W' − c·(δ_b − δ_{b−1})        b > sync_batches
        W_{b+1} = W'                            b ≤ sync_batches, up to which gradients are fresh

    At c = 0 it is inactive: not to be called, and it holds no state. `dtype` is that of the state alone: δ_{b−1} is
    rounded to it once, when it is stored.
    """

    def __init__(self, alpha: float, *, delay: int, sync_batches: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.gain = alpha * delay
        self.sync_batches = sync_batches
        self.dtype = dtype
        self.deltas: dict[str, Tensor] = {}

    @property
    def is_active(self) -> bool:
        """Return whether it changes anything."""
        return self.gain != 0.0

    @torch.no_grad()
    def correct(self, name: str, weight: Tensor, *, before: Tensor, update_index: int) -> None:
        """Turn `weight` from W' into W_{b+1} in place; `before` is W_b. Both are fp32, of the parameter's shape.

        Raises KeyError when δ_{b−1} is missing.
        """
        delta = before - weight
        if update_index <= self.sync_batches:
            self.deltas[name] = delta.to(self.dtype)
            return
        # One subtraction, one multiplication, one subtraction, each rounded: `sub(alpha=)` could become a fused
        # multiply-add on one machine and not on another. The buffer of δ_{b−1} holds each result in turn,
        # widened first if its dtype is narrow.
        last = self.deltas[name]
        correction = last.to(delta.dtype)
        torch.sub(delta, correction, out=correction)
        correction.mul_(self.gain)
        weight.sub_(correction)
        last.copy_(delta)


# The running mean of a parameter's gradients between two updates, in the dtype that the job has chosen for it.
#
# An optimizer computes with it in fp32: it is widened before a step and rounded once after it. So a buffer of half the
# size changes what is remembered, and no formula.


class StoredMomentum:
    """The buffers of one optimizer's parameters. In float32 it does nothing."""

    def __init__(self, spec: GroupSpec, optimizer: Optimizer) -> None:
        self.slot = next(iter(spec.kind.slots), "")
        """Name of the buffer in the optimizer's state."""
        self.dtype: torch.dtype = getattr(torch, spec.momentum_dtype)
        self._optimizer = optimizer
        self._stored: dict[Parameter, Tensor] = {}

    def widen(self, parameter: Parameter) -> None:
        """Give the optimizer a parameter's buffer in fp32, for a step."""
        state = self._state_of(parameter)
        if self.dtype is not torch.float32 and self.slot in state:
            self._stored[parameter] = state[self.slot]
            state[self.slot] = state[self.slot].float()

    def narrow(self, parameter: Parameter) -> None:
        """Round what the step has left, into the memory from before."""
        state = self._state_of(parameter)
        if self.dtype is torch.float32 or self.slot not in state:
            return
        stored = self._stored.pop(parameter, None)
        if stored is None:
            state[self.slot] = state[self.slot].to(self.dtype)
        else:
            state[self.slot] = stored.copy_(state[self.slot])

    def _state_of(self, parameter: Parameter) -> MutableMapping[str, Any]:
        # Not `state[parameter]`: that is a defaultdict, and reading must not leave entries behind.
        state: MutableMapping[str, Any] = self._optimizer.state.get(parameter, {})
        return state


@dataclass
class UpdateOrderError(Exception):
    """A layer's updates come one after the other; after update 0 they need the state of the ones before."""

    layer: str
    update_index: int
    expected: int

    def __str__(self) -> str:
        return f"{self.layer}: update {self.update_index} cannot be applied, update {self.expected} is next"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """Some parameters of a layer and the optimizer that steps their slots."""

    spec: GroupSpec
    """Its rate is that before the schedule's factor."""
    optimizer: Optimizer
    names: tuple[str, ...]
    momentum: StoredMomentum
    """The part of the state whose dtype is a setting."""


_Place = tuple["TorchLayerOptimizer", str, Tensor, Tensor, Tensor]
"""Place of a parameter: its owner, its name, W_b, the target of W_{b+1}, the gradient."""


class TorchLayerOptimizer:
    """Fulfils the LayerOptimizer Protocol of the stages, around any optimizers that treat each parameter alone.

    State exists from update 0 on: before, `state()` is empty. Learning rate and step count are set from the update's
    index before each step, so neither is part of the state. Nothing depends on the order of a mapping.
    """

    def __init__(
        self,
        layer_name: str,
        slots: Mapping[str, Parameter],
        *,
        groups: Iterable[OptimizerGroup],
        schedule: LrSchedule,
        error_feedback: ErrorFeedback,
    ) -> None:
        self._layer_name = layer_name
        self._slots = dict(slots)
        self._groups = tuple(groups)
        self._momenta = {name: group.momentum for group in self._groups for name in group.names}
        self._schedule = schedule
        self.error_feedback = error_feedback
        """What corrects its updates; another one may be put here before update 0."""
        self._next_update: int | None = 0  # None: state was loaded, and the next step sets the index

    @torch.no_grad()
    def step(
        self,
        update_index: int,
        *,
        current: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Fill `target` with W_{b+1} from `current` = W_b and the batch's finished fp32 gradient; b is `update_index`.

        `target[name]` may be `current[name]` itself, which is then updated in place. Otherwise the two must not share
        memory, and `current` is left alone. Raises UpdateOrderError; KeyError when the maps do not hold exactly this
        layer's parameters; ValueError beyond the last update. Nothing has changed then.
        """
        maps = (current, target, gradients)
        self._check(update_index, *maps)
        self._begin(update_index)
        for group in self._groups:
            self._step_group(group, update_index, *maps)
        self._next_update = update_index + 1

    @classmethod
    @torch.no_grad()
    def step_together(
        cls,
        optimizers: Sequence[Self],
        update_index: int,
        *,
        current: Sequence[Mapping[str, Tensor]],
        target: Sequence[Mapping[str, Tensor]],
        gradients: Sequence[Mapping[str, Tensor]],
        owners: Sequence[int] = (),
        shares: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Do `step` of several layers, with the maps of each: equal bits, in less time if matrices are small.

        shares: by replica, what `orthogonalize_share` has returned for the matrices that it owns; None: it is computed.
        owners: the replica of each matrix, in the order of `matrix_shapes`.
        Besides the optimizers' own memory, it takes only that of a batch of matrices, or of one layer's other
        parameters, for a time. Raises as `step`; then nothing has changed in any layer.
        """
        given = list(zip(optimizers, current, target, gradients, strict=True))
        for optimizer, *maps in given:
            optimizer._check(update_index, *maps)
        for optimizer, *_ in given:
            optimizer._begin(update_index)
        homes: dict[Parameter, _Place] = {
            slot: (optimizer, name, weights[name], updated[name], sums[name])
            for optimizer, weights, updated, sums in given
            for name, slot in optimizer._slots.items()
        }
        matrices = cls._matrices(optimizers)
        arrived = None
        if shares is not None:
            results = from_shares(shares, cls.matrix_shapes(optimizers), owners)
            arrived = {slot: result for (_, slot, _), result in zip(matrices, results, strict=True)}
        for batch in Muon.batches(matrices):
            updates = None if arrived is None else [arrived[slot] for _, slot, _ in batch]
            cls._step_batch(batch, [homes[slot] for _, slot, _ in batch], update_index, updates)
        for optimizer, *maps in given:
            for group in optimizer._groups:
                if not isinstance(group.optimizer, Muon):
                    optimizer._step_group(group, update_index, *maps)
            optimizer._next_update = update_index + 1

    @classmethod
    def matrix_shapes(cls, optimizers: Sequence[Self]) -> list[tuple[int, int]]:
        """Return the shapes of the matrices that Muon steps, in an order that all replicas of a stage share."""
        return [(slot.size(0), slot.size(1)) for _, slot, _ in cls._matrices(optimizers)]

    @classmethod
    @torch.no_grad()
    def orthogonalize_share(
        cls,
        optimizers: Sequence[Self],
        update_index: int,
        *,
        gradients: Sequence[Mapping[str, Tensor]],
        matrices: Sequence[int],
    ) -> Tensor:
        """Return the part of a coming `step_together` that takes its time: the results for some matrices, as one row.

        matrices: their places in `matrix_shapes`. Neither weights nor state change. Raises as `step`.
        """
        for optimizer, sums in zip(optimizers, gradients, strict=True):
            optimizer._check(update_index, sums)
        of_slot = {
            slot: sums[name]
            for optimizer, sums in zip(optimizers, gradients, strict=True)
            for name, slot in optimizer._slots.items()
        }
        every = cls._matrices(optimizers)
        results: dict[Parameter, Tensor] = {}
        for batch in Muon.batches(every[index] for index in matrices):
            slots = [slot for _, slot, _ in batch]
            results |= zip(slots, Muon.orthogonalized(batch, [of_slot[slot] for slot in slots]), strict=True)
        return joined([results[every[index][1]] for index in matrices])

    @classmethod
    def _matrices(cls, optimizers: Sequence[Self]) -> list[Matrix]:
        return [matrix for optimizer in optimizers for muon in optimizer._muons for matrix in muon.matrices()]

    @staticmethod
    def _step_batch(
        batch: Batch, places: Sequence[_Place], update_index: int, updates: Sequence[Tensor] | None
    ) -> None:
        before = [
            optimizer._prepare(name, current, target, gradient) for optimizer, name, current, target, gradient in places
        ]
        Muon.step_batch(batch, updates)
        for (optimizer, name, _, target, _), old in zip(places, before, strict=True):
            optimizer._finish(update_index, name, target, old)

    @property
    def _muons(self) -> list[Muon]:
        return [group.optimizer for group in self._groups if isinstance(group.optimizer, Muon)]

    def _check(self, update_index: int, *maps: Mapping[str, Tensor]) -> None:
        """Check that the update can be applied. Raises as `step`."""
        if self._next_update is not None and update_index != self._next_update:
            raise UpdateOrderError(self._layer_name, update_index, self._next_update)
        for given in maps:
            self._check_names(given, self._slots)
        self._schedule(update_index)

    def _begin(self, update_index: int) -> None:
        """Set the values that depend on the update's index."""
        factor = self._schedule(update_index)
        for group in self._groups:
            for parameter_group in group.optimizer.param_groups:
                parameter_group["lr"] = group.spec.lr * factor
            for name in group.names:
                # The optimizer adds one: bias correction is by b+1.
                state = self._state_of(group, name)
                if isinstance(step_count := state.get(STEP_COUNT), Tensor):
                    step_count.fill_(update_index)
                elif step_count is not None:
                    state[STEP_COUNT] = update_index

    def _step_group(
        self,
        group: OptimizerGroup,
        update_index: int,
        current: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        before = [self._prepare(name, current[name], target[name], gradients[name]) for name in group.names]
        if group.spec.is_plugin:
            with told_by(group.spec.name):
                group.optimizer.step()
            self._check_plugin(group, target)
        else:
            group.optimizer.step()
        for name, old in zip(group.names, before, strict=True):
            self._finish(update_index, name, target[name], old)

    def _check_plugin(self, group: OptimizerGroup, target: Mapping[str, Tensor]) -> None:
        """Check what a plug-in's step has made. Raises PluginError."""
        for name in group.names:
            slot, what = self._slots[name], f"its step of {self._layer_name} {name}"
            if slot.data_ptr() != target[name].data_ptr() or slot.shape != target[name].shape:
                raise PluginError(group.spec.name, f"{what} replaced the weights; it has to change them in place")
            if not target[name].isfinite().all():
                raise PluginError(group.spec.name, f"{what} made weights that are not finite")
            found, known = state_tensors(self._state_of(group, name)), group.spec.state_of(tuple(slot.shape))
            if set(found) != set(known):
                differing = sorted({each.slot for each in {*found} ^ {*known}})
                raise PluginError(group.spec.name, f"{what} keeps another `{differing[0]}` than when it was submitted")

    def _finish(self, update_index: int, name: str, weight: Tensor, before: Tensor) -> None:
        """Turn W', which a step has made of W_b, into W_{b+1}."""
        self._slots[name].grad = None
        self._momenta[name].narrow(self._slots[name])
        STEPS.num_done += 1
        if self.error_feedback.is_active:
            self.error_feedback.correct(name, weight, before=before, update_index=update_index)
        # The slot is an alias with its own version counter; autograd watches the counter of the target.
        increment_version(weight)

    def state(self) -> dict[str, Tensor]:
        """Return the live state, flat: `<slot>/<parameter name>` to tensor. Empty before update 0."""
        state = {
            f"{slot}/{name}": tensor
            for group in self._groups
            for name in group.names
            for slot, tensor in self._state_of(group, name).items()
            if slot != STEP_COUNT
        }
        return state | {f"{SLOT}/{name}": delta for name, delta in self.error_feedback.deltas.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of the `state()` of an equal optimizer; empty means boundary 0.

        Raises KeyError naming what is missing or unknown, ValueError on another shape. Nothing has changed then.
        """
        kept = {
            name: group.spec.state_of(tuple(self._slots[name].shape)) for group in self._groups for name in group.names
        }
        homes = {f"{each.slot}/{name}": each for name, of in kept.items() for each in of if each.slot != STEP_COUNT}
        if self.error_feedback.is_active:
            dtype = str(self.error_feedback.dtype).removeprefix("torch.")
            homes |= {f"{SLOT}/{name}": StateTensor(SLOT, tuple(of.shape), dtype) for name, of in self._slots.items()}
        if state:
            self._check_names(state, homes)
        for key, tensor in state.items():
            if tuple(tensor.shape) != homes[key].shape:
                raise ValueError(f"{self._layer_name}: {key} has shape {list(tensor.shape)}, not that of its parameter")
            if tensor.dtype != (wanted := getattr(torch, homes[key].dtype)):
                raise ValueError(f"{self._layer_name}: {key} is {tensor.dtype}, not {wanted}")

        self.error_feedback.deltas.clear()
        for group in self._groups:
            group.optimizer.state.clear()
        # Without any state, as at boundary 0, only update 0 can follow; an optimizer that never has state cannot tell.
        self._next_update = 0 if homes and not state else None
        if not state:
            return
        for group in self._groups:
            for name in group.names:
                home = group.optimizer.state[self._slots[name]]
                for each in kept[name]:
                    home[each.slot] = (
                        self._own(state[f"{each.slot}/{name}"], name) if each.slot != STEP_COUNT else _step_count(each)
                    )
        if self.error_feedback.is_active:
            self.error_feedback.deltas |= {name: self._own(state[f"{SLOT}/{name}"], name) for name in self._slots}

    def _prepare(self, name: str, current: Tensor, target: Tensor, gradient: Tensor) -> Tensor:
        """Point a parameter's slot at its target, which holds W_b from here on. Returns W_b for Error Feedback."""
        slot = self._slots[name]
        before = current
        if target is not current:
            target.copy_(current)
        elif self.error_feedback.is_active:
            before = current.clone()
        slot.data = target.detach()
        slot.grad = gradient
        self._momenta[name].widen(slot)
        return before

    def _state_of(self, group: OptimizerGroup, name: str) -> dict[str, Tensor]:
        # Not `optimizer.state[slot]`: that is a defaultdict, and reading must not leave entries behind.
        state: dict[str, Tensor] = group.optimizer.state.get(self._slots[name], {})
        return state

    def _own(self, tensor: Tensor, name: str) -> Tensor:
        return tensor.to(device=self._slots[name].device, copy=True, memory_format=torch.contiguous_format)

    def _check_names(self, given: Iterable[str], wanted: Iterable[str]) -> None:
        missing, unknown = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
        if missing:
            raise KeyError(f"{self._layer_name}: {missing[0]} is missing")
        if unknown:
            raise KeyError(f"{self._layer_name}: {unknown[0]} is unknown")


def optimizer_factory(
    spec: OptimSpec, *, num_batches: int, delay: int, sync_batches: int = 0
) -> Callable[[str, Mapping[str, Tensor]], TorchLayerOptimizer]:
    """Return the factory of each layer's optimizer, by the layer's name and its parameters.

    Only shape and device of the parameters are read; the masters that are stepped later must be fp32.
    """
    schedule = spec.rate_factors(num_batches)
    undecayed = replace(spec.rest, weight_decay=0.0)
    # Without momentum, Lion steps by the sign of the gradient: the rule of a router's bias.
    signs = GroupSpec(name="lion", lr=spec.router_bias_lr, betas=(0.0, 0.0), weight_decay=0.0)

    def specs(layer_name: str, parameters: Mapping[str, Tensor]) -> Iterator[tuple[GroupSpec, tuple[str, ...]]]:
        """Yield the settings of a layer's parameters, by their names."""
        for group, names in route_layer(layer_name, parameters).items():
            if group is Group.MATRICES:
                yield spec.matrices, names
            else:
                plain = [name for name in names if name != ROUTER_BIAS]
                decayed, others = split_by_decay(plain, parameters, spec.undecayed)
                biases = tuple(name for name in names if name == ROUTER_BIAS)
                kinds = ((spec.rest, decayed), (undecayed, others), (signs, biases))
                yield from ((of, some) for of, some in kinds if some)

    def make(layer_name: str, parameters: Mapping[str, Tensor]) -> TorchLayerOptimizer:
        slots = {name: Parameter(parameters[name].detach(), requires_grad=False) for name in sorted(parameters)}
        groups = [_group(of, names, [slots[name] for name in names]) for of, names in specs(layer_name, parameters)]
        return TorchLayerOptimizer(
            layer_name,
            slots,
            groups=groups,
            schedule=schedule,
            error_feedback=ErrorFeedback(
                spec.error_feedback,
                delay=delay,
                sync_batches=sync_batches,
                dtype=getattr(torch, spec.error_feedback_dtype),
            ),
        )

    return make


def _group(spec: GroupSpec, names: tuple[str, ...], slots: Sequence[Parameter]) -> OptimizerGroup:
    optimizer = inner_optimizer(spec, slots)
    return OptimizerGroup(spec=spec, optimizer=optimizer, names=names, momentum=StoredMomentum(spec, optimizer))


def state_tensors(state: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    """Return what an optimizer keeps for a parameter, by name. Raises TypeError for what cannot be saved."""

    def described(slot: str, value: object) -> StateTensor:
        if isinstance(value, Tensor):
            return StateTensor(slot, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if slot == STEP_COUNT and isinstance(value, int | float):
            return StateTensor(slot, (), "int")
        raise TypeError(f"keeps a {type(value).__name__} as `{slot}`; only tensors, and the count `step`, are saved")

    return tuple(described(slot, state[slot]) for slot in sorted(state))


def _step_count(kept: StateTensor) -> Tensor | int:
    return 0 if kept.dtype == "int" else torch.zeros((), dtype=getattr(torch, kept.dtype))
