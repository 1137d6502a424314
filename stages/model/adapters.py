"""Adapters: beside a frozen matrix W of a block, y = W·x + scale · B·(A·x), of which A and B alone are trained.

W may be kept in 4 or 8 bits. Names and arithmetic are those of PEFT's LoRA without dropout: numerics.md, section 9.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from headway.stages.model.quantized import DequantizedLinear, code_shapes
from headway.stages.spec import AdapterSpec

DOWN: Final = "lora_A"
UP: Final = "lora_B"


class FrozenLinear(nn.Linear):
    """A frozen linear layer, quantized if the adapters want it, and with an adapter beside it if it has one."""

    def __init__(self, plain: nn.Linear, adapter: AdapterSpec, *, is_adapted: bool) -> None:
        inputs, outputs, rank = plain.in_features, plain.out_features, adapter.rank
        super().__init__(inputs, outputs, bias=plain.bias is not None, device="meta")
        self.quantizer = adapter.quantize
        if self.quantizer != "none":
            (codes, dtype), scales = code_shapes(outputs, inputs, self.quantizer)
            self.weight = nn.Parameter(torch.empty(codes, dtype=dtype, device="meta"), requires_grad=False)
            self.absmax = nn.Parameter(torch.empty(scales, device="meta"))
        self.scale = adapter.scale
        self.is_off = False
        """Whether it computes as the frozen layer alone."""
        if is_adapted:
            self.lora_A = nn.Linear(inputs, rank, bias=False, device="meta")
            self.lora_B = nn.Linear(rank, outputs, bias=False, device="meta")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        made = super().forward(input) if self.quantizer == "none" else self._dequantized(input)
        is_plain = self.is_off or not hasattr(self, "lora_A")
        return made if is_plain else made + self.lora_B(self.lora_A(input)) * self.scale

    def _dequantized(self, inputs: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features)
        made: Tensor = DequantizedLinear.apply(inputs, self.weight, self.absmax, self.bias, shape, self.quantizer)  # type: ignore[no-untyped-call]
        return made


def adapt(layer: nn.Module, adapter: AdapterSpec) -> nn.Module:
    """Give a layer its adapters, and freeze all its other parameters. Without adapter nothing changes."""
    if not adapter.rank:
        return layer
    for path, part in list(layer.named_modules()):
        parent, _, name = path.rpartition(".")
        if not isinstance(part, nn.Linear) or not parent:
            continue
        is_adapted = type(part) is nn.Linear and adapter.adapts(name)
        if is_adapted or adapter.quantize != "none":
            setattr(layer.get_submodule(parent), name, FrozenLinear(part, adapter, is_adapted=is_adapted))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(is_of_adapter(name))
    return layer


@contextmanager
def without_adapters(layer: nn.Module) -> Iterator[None]:
    """Let a layer compute as the frozen one inside the block."""
    adapted = [part for part in layer.modules() if isinstance(part, FrozenLinear)]
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
