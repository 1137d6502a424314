"""All different slices of a job's layers, and how many layers of each kind they have. Pure.

Layers of one kind cost the same, so a slice is known by its number of layers of each kind. One table of all different
slices serves every place in the pipeline.
"""

from collections.abc import Callable, Collection

import numpy as np

from headway.daemon.costs.layer_costs import LayerCost, layer_costs
from headway.daemon.costs.replica_shares import Counts, Floats
from headway.daemon.jobs.job import JobSpec
from headway.stages.spec import timed_kind


class LayerSlices:
    """Slices are (first layer, end); tables over them are [num slices].

    A table has all slices once for each choice of recomputation, one choice after another.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.recomputes = spec.train.recomputes
        """What a stage may compute again, the fastest first."""
        self._layers_by_choice = [layer_costs(spec, recompute) for recompute in self.recomputes]
        self.layers = self._layers_by_choice[0]
        self.names = tuple(cost.name for cost in self.layers)
        self.num_layers = len(self.layers)
        self.by_kind = {
            timed_kind(spec.model.kind_of(cost.name), recompute): cost
            for recompute, layers in zip(self.recomputes, self._layers_by_choice, strict=True)
            for cost in layers
        }
        """Costs of a layer of each kind, as in `timed_kind`."""
        kinds_of_layers = [spec.model.kind_of(name) for name in self.names]
        plain = list(dict.fromkeys(kinds_of_layers))
        kinds = np.array([plain.index(kind) for kind in kinds_of_layers])
        size = self.num_layers + 1
        before = np.zeros((size, len(plain)), dtype=np.int64)
        before[1:] = np.cumsum(kinds[:, np.newaxis] == np.arange(len(plain)), axis=0)
        firsts, ends = np.triu_indices(size, k=1)
        numbers, slices = np.unique(before[ends] - before[firsts], axis=0, return_inverse=True)
        self.num_slices = len(numbers)
        """Of one choice of recomputation."""
        counts = np.zeros((len(self.recomputes), self.num_slices, len(self.by_kind)))
        for choice, recompute in enumerate(self.recomputes):
            columns = [list(self.by_kind).index(timed_kind(kind, recompute)) for kind in plain]
            counts[choice][:, columns] = numbers
        self.counts: Floats = counts.reshape(-1, len(self.by_kind))
        """Layers of each kind. [num slices, num kinds]"""
        self.slice_of: Counts = np.full((size, size), self.num_slices, dtype=np.int64)
        """Slice of each [first, end] under the first choice of recomputation; num_slices where there is none."""
        self.slice_of[firsts, ends] = slices.reshape(-1)

    def total(self, of_layer: Callable[[LayerCost], float]) -> Floats:
        """Return the sum over a slice's layers. [num slices]"""
        sums: Floats = self.counts @ self._each(of_layer)
        return sums

    def most(self, of_layer: Callable[[LayerCost], float]) -> Floats:
        """Return the most that one of a slice's layers has. [num slices]"""
        most: Floats = np.max(np.where(self.counts > 0, self._each(of_layer), 0.0), axis=1)
        return most

    def _each(self, of_layer: Callable[[LayerCost], float]) -> Floats:
        return np.array([of_layer(cost) for cost in self.by_kind.values()], dtype=np.float64)

    def slice_number(self, span: tuple[int, int], recompute: str) -> int:
        """Return the slice of (first layer, end) under a choice of recomputation."""
        return self._choice(recompute) * self.num_slices + int(self.slice_of[span])

    def layers_of(self, layers: Collection[str], recompute: str) -> tuple[LayerCost, ...]:
        """Return the costs of some layers under a choice of recomputation."""
        return tuple(cost for cost in self._layers_by_choice[self._choice(recompute)] if cost.name in layers)

    def _choice(self, recompute: str) -> int:
        return self.recomputes.index(recompute) if recompute in self.recomputes else 0
