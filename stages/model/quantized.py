"""Frozen matrices in 4 or 8 bits, which are dequantized whenever they are used. docs/numerics.md, section 9.

A matrix `P.weight` becomes the codes `P.weight` and the scales `P.absmax`. It is always quantized on the CPU, by
operations that are exact or rounded once, so its bytes are the same on every node.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from headway.stages.errors import MissingPackageError
from headway.stages.spec import NF4_BLOCK, Quantizer

ABSMAX: Final = "absmax"


def code_shapes(rows: int, columns: int, quantizer: Quantizer) -> tuple[tuple[torch.Size, torch.dtype], torch.Size]:
    """Return shape and dtype of a matrix's codes, and the shape of its float32 scales."""
    if quantizer == "int8":
        return (torch.Size((rows, columns)), torch.int8), torch.Size((rows,))
    size = rows * columns
    return (torch.Size((-(-size // 2),)), torch.uint8), torch.Size((-(-size // NF4_BLOCK),))


def quantized_matrices(parameters: Mapping[str, object]) -> Iterator[str]:
    """Yield the P of each `P.weight` among a layer's parameters that is quantized."""
    return (name.removesuffix(f".{ABSMAX}") for name in parameters if name.endswith(f".{ABSMAX}"))


def is_plain(name: str, dtype: torch.dtype) -> bool:
    """Return whether a frozen parameter is in the job's dtype: neither codes nor scales."""
    return dtype.is_floating_point and not name.endswith(f".{ABSMAX}")


def quantize(matrix: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a matrix [rows, columns] on the CPU. Raises MissingPackageError."""
    exact = matrix.to(device="cpu", dtype=torch.float32)
    if quantizer == "int8":
        absmax = exact.abs().amax(1)
        # A row of zeros has no scale; its codes are zeros with any.
        codes = (exact * (127.0 / absmax.where(absmax > 0, 1.0)).unsqueeze(1)).round().to(torch.int8)
        return codes, absmax
    codes, absmax = _kernels().quantize_4bit(exact.contiguous(), NF4_BLOCK, quantizer, torch.uint8)
    return codes.flatten(), absmax


def dequantize(
    codes: Tensor, absmax: Tensor, shape: tuple[int, int], quantizer: Quantizer, dtype: torch.dtype
) -> Tensor:
    """Return the matrix [rows, columns]: each value is computed in float32, and rounded to the dtype once."""
    if quantizer == "int8":
        return codes.float().mul_(absmax.unsqueeze(1)).mul_(1 / 127).to(dtype)
    flat: Tensor = _kernels().dequantize_4bit(codes, absmax, NF4_BLOCK, quantizer, (shape[0] * shape[1],), dtype)
    return flat.view(shape)


def quantized(
    weights: Mapping[str, Tensor], parameters: Mapping[str, object], quantizer: Quantizer
) -> dict[str, Tensor]:
    """Return a layer's weights as its frozen parameters have them. Raises MissingPackageError."""
    found = dict(weights)
    for matrix in quantized_matrices(parameters):
        found[f"{matrix}.weight"], found[f"{matrix}.{ABSMAX}"] = quantize(found[f"{matrix}.weight"], quantizer)
    return found


def dequantized(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], quantizer: Quantizer
) -> dict[str, Tensor]:
    """Return the inverse, as far as there is one: each quantized matrix in float32. shapes: of the plain layer."""
    found = dict(weights)
    for matrix in quantized_matrices(weights):
        rows, columns = shapes[f"{matrix}.weight"]
        codes, absmax = found[f"{matrix}.weight"], found.pop(f"{matrix}.{ABSMAX}")
        found[f"{matrix}.weight"] = dequantize(codes, absmax, (rows, columns), quantizer, torch.float32)
    return found


class DequantizedLinear(torch.autograd.Function):
    """functional.linear with a frozen matrix that is dequantized in the forward, and again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        codes: Tensor,
        absmax: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
        quantizer: Quantizer,
    ) -> Tensor:
        ctx.save_for_backward(codes, absmax)
        ctx.shape, ctx.quantizer = shape, quantizer
        return functional.linear(inputs, dequantize(codes, absmax, shape, quantizer, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (codes, absmax) = gradients, ctx.saved_tensors
        matrix = dequantize(codes, absmax, ctx.shape, ctx.quantizer, gradient.dtype)
        return gradient @ matrix, None, None, None, None, None


@cache
def _kernels() -> Any:
    """Return the operations of bitsandbytes. Raises MissingPackageError."""
    # On some CPUs its import would fetch a kernel from the Hub that nothing here calls, and say so on stderr.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    hub = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("bitsandbytes", "quantized", "a base in nf4 (`[adapter] quantize`)") from error
    finally:
        del sys.modules["kernels"]
        if hub is not None:
            sys.modules["kernels"] = hub
    return torch.ops.bitsandbytes
