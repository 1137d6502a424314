"""What dropout keeps of an adapter's input (docs/numerics.md, section 9, "Adapters")."""

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from tests.second_oracle.initial_weights import Weights


def kept_inputs(weights: Weights, num_rows: int, length: int, *, share: float, draw: str) -> Weights:
    """By layer, whether each value of a matrix's input [rows, length, inputs] is kept, as `matrix.kept`."""
    found: Weights = {layer: {} for layer in weights}
    for layer, parameters in weights.items():
        for name, tensor in parameters.items():
            matrix = name.removesuffix(".lora_A.weight")
            if matrix != name:
                shape = (num_rows, length, tensor.shape[1])
                found[layer][f"{matrix}.kept"] = kept(f"{draw}/{layer}/{matrix}/dropout", shape, share)
    return found


def kept(key: str, shape: tuple[int, ...], share: float) -> Tensor:
    """The generator gives four values a number."""
    size = int(np.prod(shape))
    seed = np.uint64(int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        z = seed + np.arange(1, (size + 3) // 4 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    parts = [(z >> np.uint64(16 * part)).astype(np.uint16).view(np.int16) for part in range(4)]
    numbers = np.stack(parts, axis=1).reshape(-1)[:size]
    return torch.from_numpy(numbers >= round(share * 65536) - 32768).view(shape)
