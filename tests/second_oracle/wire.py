"""What a coded cut makes of hidden states and their gradients (docs/numerics.md, section 7, "Wire compression")."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 64
SMALLEST = 2.0**-100

Rounding = Callable[[Tensor], Tensor]


def as_bfloat16(values: Tensor) -> Tensor:
    """Every value rounded to bfloat16, to nearest even."""
    return values.to(torch.bfloat16).to(values.dtype)


def as_int8(values: Tensor) -> Tensor:
    """Blocks of 64 consecutive values, each with its own float32 scale; float32."""
    rounded = [_rounded_block(block) for block in torch.split(values.float().flatten(), BLOCK)]
    return torch.cat(rounded).reshape(values.shape)


def _rounded_block(block: Tensor) -> Tensor:
    largest = block.abs().max()
    if largest < SMALLEST:
        return torch.zeros_like(block)
    return (block * (torch.tensor(127.0) / largest)).round() * (largest / 127)


def as_it_is(values: Tensor) -> Tensor:
    """No codec."""
    return values


ROUNDINGS: dict[str, Rounding] = {"none": as_it_is, "bf16": as_bfloat16, "int8": as_int8}


class Wire:
    """The coded cuts of a job: `carry` is what a layer receives for what the layer before it has sent."""

    def __init__(self, codec: str, coded_cuts: Sequence[str], *, has_feedback: bool, num_groups: int) -> None:
        self.rounding = ROUNDINGS[codec]
        self.coded_cuts = frozenset(coded_cuts)
        self.has_feedback = has_feedback and codec == "int8"
        self.num_groups = num_groups
        self.missing: dict[tuple[str, int], Tensor] = {}
        """For each cut and reduction group: what the gradients lost so far, in float32."""

    def carry(self, layer: str, hidden: Tensor, *, i: int) -> Tensor:
        """The hidden states that arrive at a layer. Their gradient takes the same way back."""
        if layer not in self.coded_cuts:
            return hidden
        return _Carried.apply(hidden, self, layer, i)  # type: ignore[no-any-return, no-untyped-call]

    def arriving(self, gradient: Tensor, layer: str, i: int) -> Tensor:
        """The gradient that the layer before receives."""
        if not self.has_feedback:
            return self.rounding(gradient).to(gradient.dtype)
        key = layer, i % self.num_groups
        wanted = gradient.float()
        if key in self.missing:
            wanted = wanted + self.missing[key]
        arrived = self.rounding(wanted).to(gradient.dtype)
        self.missing[key] = wanted - arrived.float()
        return arrived


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wire: Wire, layer: str, i: int) -> Tensor:
        ctx.way_back = wire, layer, i
        return wire.rounding(hidden).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        wire, layer, i = ctx.way_back
        return wire.arriving(gradients[0], layer, i), None, None, None
