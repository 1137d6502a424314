"""Adapters: beside a frozen matrix W of a block, y = W·x + scale · B·(A·x), of which A and B alone are trained.

Names and arithmetic are those of PEFT's LoRA without dropout. docs/numerics.md, section 9.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from headway.stages.spec import AdapterSpec

DOWN: Final = "lora_A"
UP: Final = "lora_B"


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, frozen: nn.Linear, adapter: AdapterSpec) -> None:
        inputs, outputs, rank = frozen.in_features, frozen.out_features, adapter.rank
        super().__init__(inputs, outputs, bias=frozen.bias is not None, device="meta")
        self.scale = adapter.scale
        self.is_off = False
        """Whether it computes as the frozen layer alone."""
        self.lora_A = nn.Linear(inputs, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, outputs, bias=False, device="meta")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        if self.is_off:
            return super().forward(input)
        return super().forward(input) + self.lora_B(self.lora_A(input)) * self.scale  # type: ignore[no-any-return]


def adapt(layer: nn.Module, adapter: AdapterSpec) -> nn.Module:
    """Give a layer its adapters, and freeze all its other parameters. Without adapter nothing changes."""
    if not adapter.rank:
        return layer
    for path, part in list(layer.named_modules()):
        parent, _, name = path.rpartition(".")
        if type(part) is nn.Linear and parent and adapter.adapts(name):
            setattr(layer.get_submodule(parent), name, AdaptedLinear(part, adapter))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(is_of_adapter(name))
    return layer


@contextmanager
def without_adapters(layer: nn.Module) -> Iterator[None]:
    """Let a layer compute as the frozen one inside the block."""
    adapted = [part for part in layer.modules() if isinstance(part, AdaptedLinear)]
    for part in adapted:
        part.is_off = True
    try:
        yield
    finally:
        for part in adapted:
            part.is_off = False


def is_of_adapter(parameter: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return parameter.endswith((f".{DOWN}.weight", f".{UP}.weight"))


def merged(base: dict[str, Tensor], adapters: dict[str, Tensor], adapter: AdapterSpec) -> dict[str, Tensor]:
    """Return a layer's weights with its adapters added in: W + scale · (B·A), in float32."""
    weights = {name: tensor.float() for name, tensor in base.items()}
    for name in [name for name in adapters if name.endswith(f".{UP}.weight")]:
        matrix = name.removesuffix(f".{UP}.weight")
        product = torch.mm(adapters[name], adapters[f"{matrix}.{DOWN}.weight"])
        weights[f"{matrix}.weight"] = weights[f"{matrix}.weight"] + product * adapter.scale
    return weights
