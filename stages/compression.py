"""Hidden states and their gradients as a link's codec carries them, and back. Pure: tensors in, tensors out.

INT8 works on blocks of consecutive values of the flattened tensor, each with its own scale s = max |x| / 127:

    q = round(x · 127 / max |x|), to even at a half        decoded: q · s

so |decoded − x| ≤ s / 2 up to a few units in the last place of float32; a block whose largest value is below
LEAST_LARGEST decodes to zeros. A block that holds a value that is not finite decodes to values that are not finite: a
lost run is not hidden. BF16 rounds to nearest even: |decoded − x| ≤ |x| · 2⁻⁸.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.stages.codec import BLOCK, Codec

LEAST_LARGEST: Final = 2.0**-100
"""127 over something smaller would come near the largest float32, and a scale near the smallest."""


@torch.no_grad()
def encode(values: Tensor, codec: Codec) -> tuple[Tensor, ...]:
    """The tensors that travel: new ones, unless there is no codec.

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
    """The values again, in the type that the job computes in."""
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
    """What the codec took away from the gradients of a cut, to be added to the next one of the same reduction group.

    Within a group gradients are sent in order of (batch, microbatch), whoever holds the group; so what is added to each
    is a function of the job and the cuts. It begins with nothing, and ends with the plan.
    """

    def __init__(self, codec: Codec, *, num_groups: int) -> None:
        self._codec = codec
        self._left: list[Tensor | None] = [None] * num_groups

    @torch.no_grad()
    def encode(self, gradient: Tensor, microbatch: int) -> tuple[Tensor, ...]:
        """The gradient with what its predecessors still had to say, coded; the rest is kept, in float32."""
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
    # Divided at once: the reciprocal of the largest floats is no normal one. A NaN is not below, and stays one.
    inverse = torch.full_like(largest, 127).div_(largest).masked_fill_(largest < LEAST_LARGEST, 0.0)
    scales = (largest / 127).masked_fill_(largest < LEAST_LARGEST, 0.0)
    quantised = (blocks * inverse[:, None]).round_().to(torch.int8)
    return quantised.flatten()[: values.numel()].view(values.shape), scales


def _blocks(values: Tensor) -> Tensor:
    """[blocks, BLOCK]: a view where the values fill their last block."""
    flat = values.reshape(-1)
    missing = -flat.numel() % BLOCK
    return (pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)
