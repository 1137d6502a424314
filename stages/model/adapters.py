"""Adapters: beside a frozen matrix W of a block, y = W·x + scale · B·(A·x), of which A and B alone are trained.

W may be kept in 4 or 8 bits, and x has dropout on its way to A. Names and arithmetic are those of PEFT's LoRA:
docs/numerics.md, section 9.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor, nn

from headway.stages.model.quantized import DequantizedLinear, code_shapes
from headway.stages.spec import AdapterSpec

_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR: Final = 0x94D049BB133111EB - 2**64
"""SplitMix64's numbers, as signed ones."""

DOWN: Final = "lora_A"
UP: Final = "lora_B"


class FrozenLinear(nn.Linear):
    """A frozen linear layer, quantized if the adapters want it, and with an adapter beside it if it has one."""

    def __init__(self, plain: nn.Linear, adapter: AdapterSpec, *, name: str, is_adapted: bool) -> None:
        inputs, outputs, rank = plain.in_features, plain.out_features, adapter.rank
        super().__init__(inputs, outputs, bias=plain.bias is not None, device="meta")
        self.quantizer = adapter.quantize
        if self.quantizer != "none":
            (codes, dtype), scales = code_shapes(outputs, inputs, self.quantizer)
            self.weight = nn.Parameter(torch.empty(codes, dtype=dtype, device="meta"), requires_grad=False)
            self.absmax = nn.Parameter(torch.empty(scales, device="meta"))
        self.scale, self.dropout = adapter.scale, adapter.dropout
        self.name = name
        """`layer/path`, as the key of its dropout has it."""
        self.draw = ""
        """`seed/batch/microbatch` of the dropout; empty: there is none, as in an evaluation."""
        self.is_off = False
        """Whether it computes as the frozen layer alone."""
        if is_adapted:
            self.lora_A = nn.Linear(inputs, rank, bias=False, device="meta")
            self.lora_B = nn.Linear(rank, outputs, bias=False, device="meta")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        made = super().forward(input) if self.quantizer == "none" else self._dequantized(input)
        if self.is_off or not hasattr(self, "lora_A"):
            return made
        return made + self.lora_B(self.lora_A(self._dropped(input))) * self.scale  # type: ignore[no-any-return]

    def _dropped(self, inputs: Tensor) -> Tensor:
        if not (self.dropout and self.draw):
            return inputs
        is_kept = kept_values(f"{self.draw}/{self.name}/dropout", inputs.shape, self.dropout, inputs.device)
        return torch.where(is_kept, inputs * (1 / (1 - self.dropout)), 0.0)

    def _dequantized(self, inputs: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features)
        made: Tensor = DequantizedLinear.apply(inputs, self.weight, self.absmax, self.bias, shape, self.quantizer)  # type: ignore[no-untyped-call]
        return made


def kept_values(key: str, shape: torch.Size, probability: float, device: torch.device) -> Tensor:
    """Return which values dropout keeps: 16 bits for each, of SplitMix64 (Steele et al. 2014) seeded by a key's hash.

    Whole numbers alone, so every device finds the same values, in any order of calls.
    """
    seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)
    number = torch.arange(1, -(-shape.numel() // 4) + 1, device=device).mul_(_GOLDEN).add_(seed)
    for shift, factor in ((30, _FIRST_FACTOR), (27, _SECOND_FACTOR)):
        number.bitwise_xor_((number >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    number.bitwise_xor_((number >> 31).bitwise_and_((1 << 33) - 1))
    is_kept: Tensor = number.view(torch.int16)[: shape.numel()] >= round(probability * 2**16) - 2**15
    return is_kept.view(shape)


def set_draw(layer: nn.Module, draw: str) -> None:
    """Say which microbatch a layer's dropout is for, also in what a backward computes again."""
    for part in layer.modules():
        if isinstance(part, FrozenLinear):
            part.draw = draw


def adapt(layer: nn.Module, adapter: AdapterSpec, name: str) -> nn.Module:
    """Give a layer of this name its adapters, and freeze all its other parameters. Without adapter nothing changes."""
    if not adapter.rank:
        return layer
    for path, part in list(layer.named_modules()):
        parent, _, last = path.rpartition(".")
        if not isinstance(part, nn.Linear) or not parent:
            continue
        # An expert's matrices, which are of a class of their own, have adapters if they are named.
        is_adapted = adapter.adapts(last) and (type(part) is nn.Linear or bool(adapter.targets))
        if is_adapted or adapter.quantize != "none":
            frozen = FrozenLinear(part, adapter, name=f"{name}/{path}", is_adapted=is_adapted)
            setattr(layer.get_submodule(parent), last, frozen)
    for key, parameter in layer.named_parameters():
        parameter.requires_grad_(is_of_adapter(key))
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
