"""A base in 4 or 8 bits: its bytes, what it computes, and what a graph keeps of it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.stages.model.adapters import adapt
from headway.stages.model.quantized import dequantize, quantize
from headway.stages.spec import AdapterSpec, Quantizer

SHAPE = (24, 80)


def matrix() -> Tensor:
    """A matrix with a row of zeros, and with a value far from the others."""
    found = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    found[5] = 0
    found[7, 3] = 40.0
    return found


def test_codes_are_those_of_qlora() -> None:
    """What bitsandbytes makes of a matrix when a model is loaded in 4 bits has the same bytes."""
    from bitsandbytes.functional import quantize_4bit

    theirs, state = quantize_4bit(matrix(), blocksize=64, quant_type="nf4", compress_statistics=False)
    codes, absmax = quantize(matrix(), "nf4")
    assert torch.equal(codes, theirs.flatten())
    assert torch.equal(absmax, state.absmax)


@pytest.mark.parametrize(("quantizer", "most"), [("nf4", 0.152), ("int8", 0.5 / 127 + 1e-6)])
def test_a_value_comes_back_within_half_a_step(quantizer: Quantizer, most: float) -> None:
    """Of the largest value of its block or row; zeros stay zeros. nf4: half of the widest step of the code book."""
    codes, absmax = quantize(matrix(), quantizer)
    back = dequantize(codes, absmax, SHAPE, quantizer, torch.float32)
    block = 64 if quantizer == "nf4" else SHAPE[1]
    largest = absmax.repeat_interleave(block)[: back.numel()].view(SHAPE)
    assert ((back - matrix()).abs() <= most * largest).all()
    assert not back[5, 48:].any()
    assert codes.nbytes <= matrix().nbytes / (8 if quantizer == "nf4" else 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantizer", ["nf4", "int8"])
def test_a_graph_keeps_the_codes_and_computes_with_the_matrix(quantizer: Quantizer, dtype: torch.dtype) -> None:
    """Output and gradient have the bits of a plain linear layer with that matrix, which no graph keeps."""
    plain = nn.Linear(SHAPE[1], SHAPE[0], bias=True)
    block = nn.ModuleDict({"part": nn.ModuleDict({"q_proj": plain})})
    adapt(block, AdapterSpec(rank=2, targets=("v_proj",), quantize=quantizer), "block.0")
    layer = block.get_submodule("part.q_proj")
    codes, absmax = quantize(matrix(), quantizer)
    bias = torch.linspace(-1, 1, SHAPE[0]).to(dtype)
    layer.load_state_dict({"weight": codes, "absmax": absmax, "bias": bias}, assign=True)
    back = dequantize(codes, absmax, SHAPE, quantizer, dtype)
    inputs = torch.randn(2, 7, SHAPE[1], generator=torch.Generator().manual_seed(4)).to(dtype).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        output = layer(inputs)
    expected = functional.linear(inputs, back, bias)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    assert torch.equal(output, expected)
    (found,), (wanted,) = (torch.autograd.grad(made, inputs, upstream) for made in (output, expected))
    assert torch.equal(found, wanted)
    assert sorted(tensor.nbytes for tensor in kept) == sorted([codes.nbytes, absmax.nbytes])
