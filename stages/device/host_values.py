"""Reads numbers out of tensors in host memory. Nowhere else does a stage's path read any: it could wait for a card."""

from torch import Tensor


def numbers_of(tensor: Tensor) -> list[float]:
    """Return the numbers of a tensor in host memory, flat, whatever its shape is."""
    assert tensor.is_cpu, "the numbers of a tensor on a device are known only after a copy"
    numbers: list[float] = tensor.reshape(-1).tolist()
    return numbers
