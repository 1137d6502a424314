"""Codes hidden states and their gradients for a link, and decodes them. Tensors in, tensors out.

INT8 works on blocks of consecutive values of the flattened tensor, each with its own scale s = max |x| / 127:

    q = round(x · 127 / max |x|), to even at a half        decoded: q · s

so |decoded − x| ≤ s / 2 up to a few units in the last place of float32. A block whose largest value is below
LEAST_LARGEST decodes to zeros. A block with a value that is not finite decodes to values that are not finite: a
diverged run stays visible. BF16 rounds to nearest even: |decoded − x| ≤ |x| · 2⁻⁸.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.stages.links.codec import BLOCK, Codec

LEAST_LARGEST: Final = 2.0**-100
"""Below this value, 127 over it would come near the largest float32, and a scale near the smallest."""


@torch.no_grad()
def encode(values: Tensor, codec: Codec) -> tuple[Tensor, ...]:
    """Return the tensors that travel: new ones, unless there is no codec.

    values: floating point, of any shape. BF16: (bfloat16 like values,). INT8: (int8 like values, float32 [blocks]).
    """
    match codec:
        case Codec.NONE:
            return (values,)
        case Codec.BF16:
            return (values.to(torch.bfloat16),)
        case Codec.INT8:
            return _quantised(values)


@torch.no_grad()
def decode(coded: Sequence[Tensor], codec: Codec, dtype: torch.dtype) -> Tensor:
    """Return the values, in the type in which the job computes."""
    match codec:
        case Codec.NONE:
            return coded[0]
        case Codec.BF16:
            return coded[0].to(dtype)
        case Codec.INT8:
            quantised, scales = coded
            values = _blocks(quantised).to(torch.float32)
            values *= scales[:, None]
            return values.flatten()[: quantised.numel()].view(quantised.shape).to(dtype)


class Feedback:
    """The coding errors of a cut's gradients, each to be added to the next gradient of its reduction group.

    Within a group gradients are sent in order of (batch, microbatch), by any holder of the group. So the added errors
    are a function of the job and the cuts. The errors start at zero, and end with the plan.
    """

    def __init__(self, codec: Codec, *, num_groups: int) -> None:
        self._codec = codec
        self._left: list[Tensor | None] = [None] * num_groups

    @torch.no_grad()
    def encode(self, gradient: Tensor, microbatch: int) -> tuple[Tensor, ...]:
        """Code the gradient plus its predecessors' remaining error; keep the new error, in float32."""
        group = microbatch % len(self._left)
        left = self._left[group]
        wanted = gradient.float() if left is None else left.add_(gradient)
        coded = encode(wanted, self._codec)
        decoded = decode(coded, self._codec, gradient.dtype).float()
        self._left[group] = torch.sub(wanted, decoded, out=decoded)
        return coded


def _quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _blocks(values.float())
    largest = blocks.abs().amax(dim=1)
    # Divided directly: the reciprocal of the largest floats is subnormal. A NaN is not below, and stays NaN.
    inverse = torch.full_like(largest, 127).div_(largest).masked_fill_(largest < LEAST_LARGEST, 0.0)
    scales = (largest / 127).masked_fill_(largest < LEAST_LARGEST, 0.0)
    quantised = (blocks * inverse[:, None]).round_().to(torch.int8)
    return quantised.flatten()[: values.numel()].view(values.shape), scales


def _blocks(values: Tensor) -> Tensor:
    """Return [blocks, BLOCK]: a view if the values fill their last block."""
    flat = values.reshape(-1)
    missing = -flat.numel() % BLOCK
    return (pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)
