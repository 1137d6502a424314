"""How a file of gpt-oss has the experts of a block: each kind of matrix as one tensor of all experts, transposed.

`gate_up_proj` [experts, inputs, 2·width] has the gate in its even columns and up in its odd ones, `gate_up_proj_bias`
[experts, 2·width] likewise. Published files have MXFP4 in place of matrices: `…_blocks` and `…_scales`, by output.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from headway.stages.model.families import EXPERT_PARTS, EXPERT_STACK

_MEMBER: Final = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def stacked_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors in a file, from those of single parameters by their names."""
    members = [found for name in shapes if (found := _MEMBER.fullmatch(name)) is not None]
    num_experts = 1 + max((int(found[2]) for found in members), default=0)
    made: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        stack, _, part, num_parts = _place(name)
        if part == 0:
            *inputs, outputs = reversed(shape)
            is_member = stack != name
            made[stack] = (num_experts, *inputs, outputs * num_parts) if is_member else tuple(shape)
    return made


def stacked(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
    """Yield pieces of a file's tensors, from single parameters by their names: the name, the number of the piece among
    those of the tensor, and its values.
    """
    for name, tensor in tensors.items():
        stack, number, part, num_parts = _place(name)
        if stack == name:
            yield name, 0, tensor
        elif part == 0:
            parts = [tensor] if num_parts == 1 else [tensor, tensors[name.replace(".gate_proj.", ".up_proj.")]]
            yield stack, number, torch.stack([each.movedim(0, -1) for each in parts], -1).flatten(-2)


def unstacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inverse: single parameters by their names, from a file's tensors."""
    made = {}
    for name, tensor in tensors.items():
        found = EXPERT_STACK.fullmatch(name)
        if found is None:
            made[name] = tensor
            continue
        parts = EXPERT_PARTS[found[2]]
        for number, whole in enumerate(tensor):
            for part, kind in enumerate(parts):
                own = part_of(whole.movedim(-1, 0), part, len(parts))
                made[f"{found[1]}.{number}.{kind}.{'bias' if found[3] else 'weight'}"] = own
    return made


def part_of(whole: Tensor, part: int, num_parts: int) -> Tensor:
    """Return every num_parts-th output of a matrix or a bias [outputs, …]."""
    return whole[part::num_parts].contiguous()


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the bfloat16 matrix [outputs, inputs] of blocks uint8 [outputs, inputs / 2] and scales uint8
    [outputs, inputs / 32].

    A byte is two values, the first in its lower half: a sign and one of eight sizes. 32 values have one power of two.
    """
    sizes = torch.tensor((*_FP4, *(-each for each in _FP4)), dtype=torch.bfloat16)
    values = torch.stack((sizes[(blocks & 15).int()], sizes[(blocks >> 4).int()]), -1).flatten(-2)
    powers = (scales.int() - 127).repeat_interleave(32, -1)
    return torch.ldexp(values, powers).to(torch.bfloat16)


def _place(name: str) -> tuple[str, int, int, int]:
    """Return the tensor that has a parameter, the expert's number, and which of how many parts it is."""
    found = _MEMBER.fullmatch(name)
    if found is None:
        return name, 0, 0, 1
    stack, parts = next((stack, parts) for stack, parts in EXPERT_PARTS.items() if found[3] in parts)
    return f"{found[1]}.{stack}{'_bias' * (found[4] == 'bias')}", int(found[2]), parts.index(found[3]), len(parts)
