"""Chooses each parameter's optimizer: matrices inside the blocks go to one, everything else to the other.

A router's matrix goes with everything else: its rows are scores of the experts, and steps of equal size in all
directions would send tokens to and fro. Its bias has a rule of its own.

Of everything else, some kinds may have no weight decay.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum

from torch import Tensor

from headway.optim.spec import Undecayed

BLOCK_PREFIX = "block."


class Group(StrEnum):
    """The two groups of `[optim]`."""

    MATRICES = "matrices"
    REST = "rest"


ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
CONSTANT = "layer_scalar"
"""A parameter whose gradient is zero. Without decay no optimizer moves it."""


def route(layer_name: str, name: str, parameter: Tensor) -> Group:
    """Return the group of one parameter: `matrices` for a 2-D weight of a layer `block.*`; `rest` for all else.

    All else is embedding, head, norms, biases, routers, and the convolutions and decays of linear attention.
    """
    if layer_name.startswith(BLOCK_PREFIX) and parameter.ndim == 2 and name not in ROUTERS:
        return Group.MATRICES
    return Group.REST


def route_layer(layer_name: str, parameters: Mapping[str, Tensor]) -> dict[Group, tuple[str, ...]]:
    """Return parameter names by group, sorted by name so that nothing depends on the mapping's order; no
    empty groups.
    """
    groups = {
        group: tuple(sorted(n for n, p in parameters.items() if route(layer_name, n, p) is group)) for group in Group
    }
    return {group: names for group, names in groups.items() if names}


def kind_of_rest(parameter_name: str, parameter: Tensor) -> Undecayed | None:
    """Return what a parameter of `rest` is; None: a router's or a convolution's."""
    if parameter_name in (*ROUTERS, ROUTER_BIAS) or parameter.ndim == 3:
        return None
    if parameter.ndim == 2:
        return "embeddings"
    return "biases" if parameter_name.endswith((".bias", ".sinks")) else "norms"


def split_by_decay(
    names: Collection[str], parameters: Mapping[str, Tensor], undecayed: Collection[Undecayed]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of `rest` with weight decay, and those without, both in the given order."""
    without = {name for name in names if name == CONSTANT or kind_of_rest(name, parameters[name]) in undecayed}
    return tuple(name for name in names if name not in without), tuple(name for name in names if name in without)
