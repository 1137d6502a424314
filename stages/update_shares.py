"""Which replica of a stage computes which part of an update."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class UpdateShares:
    """The owners of a stage's matrices. All replicas derive the same from the job and the plan."""

    owners: tuple[int, ...]
    """Position of the replica that orthogonalises each matrix, in the order of the stage's optimizers."""
    num_elements: tuple[int, ...]
    """Elements of each replica's share; 0: it owns no matrix, and sends nothing."""
    dtype: torch.dtype
    """Of what is sent: that of the iteration."""

    def of(self, replica: int) -> tuple[int, ...]:
        """Return the matrices that a replica owns."""
        return tuple(index for index, owner in enumerate(self.owners) if owner == replica)
