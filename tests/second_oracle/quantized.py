"""Matrices that went through 4 or 8 bits (docs/numerics.md, section 9, "A base in 4 or 8 bits")."""

import torch
from torch import Tensor

from tests.second_oracle.initial_weights import Weights

CODE_BOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64


def through_codes(base: Weights, name: str) -> Weights:
    """The base as the blocks compute with it: the matrices of attention, MLP and experts have lost their other bits."""
    coded = {"nf4": nf4, "int8": int8}[name]

    def arrived(layer: str, key: str, tensor: Tensor) -> Tensor:
        is_coded = layer.startswith("block.") and tensor.dim() == 2 and key != "mlp.gate.weight"
        return coded(tensor) if is_coded else tensor

    return {layer: {key: arrived(layer, key, tensor) for key, tensor in of.items()} for layer, of in base.items()}


def nf4(matrix: Tensor) -> Tensor:
    """Each block of the flattened matrix is its largest value times 16 numbers."""
    book = torch.tensor(CODE_BOOK)
    middles = (book[:-1] + book[1:]) / 2
    found = []
    for block in torch.split(matrix.flatten(), BLOCK):
        largest = block.abs().max()
        if largest == 0:
            found.append(torch.zeros_like(block))
            continue
        shares = block * (1 / largest) if len(block) == BLOCK else block / largest
        codes = (shares.unsqueeze(1) > middles).sum(1)
        found.append(book[codes] * largest)
    return torch.cat(found).view_as(matrix)


def int8(matrix: Tensor) -> Tensor:
    """Each row is its largest value over 127, times whole numbers."""
    found = []
    for row in matrix:
        largest = row.abs().max()
        whole = torch.zeros_like(row) if largest == 0 else torch.round(row * (127 / largest))
        found.append(whole * largest * torch.tensor(1 / 127))
    return torch.stack(found)
