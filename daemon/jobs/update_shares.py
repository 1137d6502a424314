"""Which replica of a stage orthogonalises which of its matrices: derived from the job and the stage's layers."""

from collections.abc import Sequence

import torch

from headway.daemon.jobs.job import JobSpec
from headway.optim.routing import Group, route_layer
from headway.optim.update_shares import matrix_owners
from headway.stages.model.decoder import trained_shapes
from headway.stages.update_shares import UpdateShares


def update_shares(spec: JobSpec, layers: Sequence[str], num_replicas: int) -> UpdateShares | None:
    """Return the owners of a stage's matrices; None if there is nothing to share: one worker, or no matrix for Muon."""
    shapes = orthogonalized_shapes(spec, layers)
    if num_replicas < 2 or not shapes:
        return None
    owners = matrix_owners(shapes, num_replicas)
    num_elements = [0] * num_replicas
    for (rows, columns), owner in zip(shapes, owners, strict=True):
        num_elements[owner] += rows * columns
    return UpdateShares(owners, tuple(num_elements), getattr(torch, spec.optim.matrices.newton_schulz_dtype))


def orthogonalized_shapes(spec: JobSpec, layers: Sequence[str]) -> list[tuple[int, int]]:
    """Return the shapes of the matrices that Muon steps, in the order of the stage's optimizers."""
    if spec.optim.matrices.name != "muon":
        return []
    shapes: list[tuple[int, int]] = []
    for layer in layers:
        parameters = {
            name: torch.empty(shape, device="meta") for name, shape in trained_shapes(layer, spec.model).items()
        }
        names = route_layer(layer, parameters).get(Group.MATRICES, ())
        shapes += [(parameters[name].size(0), parameters[name].size(1)) for name in names]
    return shapes
