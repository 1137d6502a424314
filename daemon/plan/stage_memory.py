"""What a slice of layers takes in a device's memory, and on its host. Pure.

Layers of one kind cost the same, so a slice is known by its number of layers of each kind. One table of all different
slices serves every place in the pipeline.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from headway.daemon.jobs.job import FaultSpec, JobSpec
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import (
    LayerCost,
    document_bytes,
    kind_of_layer,
    layer_costs,
    num_hidden,
    tied_bytes,
)
from headway.daemon.plan.replica_shares import Counts, Floats, group_ends
from headway.stages.links.codec import codec_between, feedback_bytes
from headway.stages.schedule.stage_schedule import replica_depth, schedule_depth
from headway.stages.spec import MIXING_HALF, MLP_HALF, ModelSpec, timed_kind, whole_layer


class LayerSlices:
    """Slices are (first layer, end); tables over them are [num slices].

    A table has all slices once for each choice of recomputation, one choice after another.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.recomputes = spec.train.recomputes
        """What a stage may compute again, the fastest first."""
        whole = spec.with_values({"placement.split_blocks": False})
        halves = {recompute: layer_costs(spec, recompute) if whole != spec else () for recompute in self.recomputes}
        self.layers = layer_costs(spec, self.recomputes[0])
        self.names = tuple(cost.name for cost in self.layers)
        self.num_layers = len(self.layers)
        self.by_kind = {
            timed_kind(spec.model.kind_of(cost.name), recompute): cost
            for recompute in self.recomputes
            for cost in (*layer_costs(whole, recompute), *halves[recompute][1:-1])
        }
        """Costs of a layer of each kind, as in `timed_kind`. Both halves of a block are a whole one."""
        plain = list(dict.fromkeys(map(spec.model.kind_of, (*whole.layers, *self.names))))
        size = self.num_layers + 1
        firsts, ends = np.triu_indices(size, k=1)
        numbers, slices = np.unique(_numbers(self.names, spec.model, plain, firsts, ends), axis=0, return_inverse=True)
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

    def order(self) -> Counts:
        """Return the places of the kinds in a slice. [num kinds]"""
        index = {whole_layer(name): index for index, name in enumerate(self.names)}
        # Of a block's halves, a slice has the MLP alone at its beginning, and attention alone at its end.
        ends = {MLP_HALF: 0, MIXING_HALF: self.num_layers}
        return np.array([ends.get(c.name.split(".")[-1], index[whole_layer(c.name)]) for c in self.by_kind.values()])

    def slice_number(self, span: tuple[int, int], recompute: str) -> int:
        """Return the slice of (first layer, end) under a choice of recomputation."""
        return self._choice(recompute) * self.num_slices + int(self.slice_of[span])

    def in_slice(self, index: int) -> list[tuple[int, LayerCost]]:
        """Return how many layers of each kind a slice has, and the cost of one."""
        costs = self.by_kind.values()
        return [(round(number), cost) for number, cost in zip(self.counts[index], costs, strict=True) if number]

    def _choice(self, recompute: str) -> int:
        return self.recomputes.index(recompute) if recompute in self.recomputes else 0


def _numbers(names: Sequence[str], model: ModelSpec, kinds: Sequence[str], firsts: Counts, ends: Counts) -> Counts:
    """Return how many layers of each kind slices have, with both halves of a block as one. [num slices, num kinds]"""

    def is_of(kind_of: Iterable[str]) -> Counts:
        return np.array([[each == kind for kind in kinds] for each in kind_of], dtype=np.int64)

    blocks = [whole_layer(name) for name in names]
    whole, alone = is_of(map(model.kind_of, blocks)), is_of(map(model.kind_of, names))
    changes = np.array([one != other for one, other in pairwise(blocks)])[:, np.newaxis]
    begin, finish = np.vstack(([[True]], changes)), np.vstack((changes, [[True]]))
    none = np.zeros((1, len(kinds)), dtype=np.int64)
    begun, finished = (np.vstack((none, np.cumsum(whole * each, axis=0))) for each in (begin, finish))
    lead, tail = np.vstack((alone * ~begin, none)), np.vstack((none, alone * ~finish))
    found: Counts = finished[ends] - begun[firsts] + lead[firsts] + tail[ends]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """The parts of a worker's memory on its device, in bytes. Their sum is what the plan counts."""

    weights: int
    """fp32 masters; 0: the versions are fp32 themselves."""
    versions: int
    """The weights as the forward sees them, in two versions."""
    frozen: int
    """The weights beside adapters, in one version."""
    optimizer: int
    """Momentum, second moments, Error Feedback."""
    gradients: int
    """Sums of each reduction group, sets that wait for their update, and buffers to reduce them with others."""
    activations: int
    """What layers keep of the microbatches in flight, except for the loss."""
    loss: int
    """What the loss keeps of them, and what its backward has for a moment."""
    recomputed: int
    """One block's graph, when it is computed again."""
    update: int
    """What the update of one matrix, or of one layer's other parameters, takes above the most of a backward."""
    shares: int
    """Results of Newton–Schulz that replicas have sent each other; 0: each does its whole update."""
    feedback: int
    """Remainders of coded links, which the next frame carries."""
    beyond: int = 0
    """What the plan counts above these parts, because peaks were measured above them."""


HOST_STATES: Final = 2
"""Number of boundary states for which a node's memory must have room: one being written, one being sent."""
HOST_STATES_WITH_SNAPSHOTS: Final = 3
"""The same of each copy while the job takes snapshots: two to go back to, and one that is being written or fetched."""
OPEN_SUMS_IN_TURN: Final = 2
"""Gradient sums of a stage in a plan without replicas: the total, and that of the group that is under way."""


def num_host_states(fault: FaultSpec) -> int:
    """Return how many boundary states of a layer a node that holds it must have room for."""
    return HOST_STATES_WITH_SNAPSHOTS if fault.snapshot_every else HOST_STATES


class StageMemory:
    """The bytes of each slice of a job's layers. Tables are [num slices], as in LayerSlices."""

    def __init__(
        self,
        spec: JobSpec,
        slots: Sequence[DeviceSlot],
        slices: LayerSlices,
        *,
        num_copies: int = 0,
        has_replicas: bool = True,
    ) -> None:
        """num_copies: nodes that hold each layer of a boundary; 0: as many as the job wants.

        has_replicas: whether any stage of a plan may have them.
        """
        self._train = spec.train
        self._slices = slices
        self._num_groups = spec.train.reduction_groups
        self._is_without_replicas = not has_replicas or set(spec.placement.replicas) == {1}
        """Whether no stage has replicas: then one group's microbatches come after another's."""
        self.ends = group_ends(spec.train.microbatches, spec.train.reduction_groups)
        self._tied_bytes = tied_bytes(spec)
        has_sites = len({slot.site for slot in slots}) > 1
        is_coded = any(codec_between(spec.train, is_between_sites=is_far) for is_far in (False, has_sites))
        self.feedback_bytes = feedback_bytes(spec.train, num_hidden(spec)) if is_coded else 0
        """Bytes per reduction group if the links upstream are coded. They count on every worker of such a job."""
        self.is_limited = any(slot.limit_bytes for slot in slots)
        """True if memory on a device counts, which depends on how many stages come after a stage."""
        self._resident_bytes = slices.total(lambda cost: cost.resident_bytes)
        self._group_bytes = slices.total(lambda cost: cost.group_bytes)
        self._activation_bytes = slices.total(lambda cost: cost.activation_bytes)
        has_blocks = slices.most(lambda cost: kind_of_layer(cost.name) == "block")
        self._activation_bytes += document_bytes(spec) * has_blocks
        self._passing_bytes = slices.most(lambda cost: cost.passing_bytes)
        # An update has the memory of a backward's gradients, and of what passes in a backward, to itself.
        self._backward_bytes = slices.total(lambda cost: cost.backward_bytes)
        self.relief_bytes = self._relief()
        """Bytes that no moment of a backward needs: gradients of layers above come where those kept their activations.
        [num slices]
        """
        freed = self._backward_bytes + self._passing_bytes - self.relief_bytes
        self.update_bytes: Floats = np.maximum(slices.most(lambda cost: cost.moment_bytes) - freed, 0.0)
        """Bytes that an update takes above the most that a backward does."""
        self.state_bytes = slices.total(lambda cost: cost.state_bytes)
        """Bytes of one boundary state. [num slices]"""
        self.takes_snapshots = spec.fault.snapshot_every > 0
        self.num_copies = (num_copies or spec.fault.copies) if self.takes_snapshots else 1
        """Nodes that hold each layer while the job runs."""
        self.num_states = num_host_states(spec.fault)
        """Boundary states that each of them has."""
        self._num_ends = slices.total(lambda cost: kind_of_layer(cost.name) in ("embed", "head"))
        self.shared_bytes = slices.total(lambda cost: cost.shared_bytes)
        """Bytes of Newton–Schulz's results of a batch, which replicas that share its update hold. [num slices]

        Results of the next batch come only after its sums are reduced, and fit where those were.
        """
        self._most_groups: dict[tuple[int, int, str, int, int, bool], Counts] = {}

    def _relief(self) -> Floats:
        """Return by how much a backward's fullest moment is below the sum of all activations and gradients of one
        microbatch, and of what passes. [num slices]

        A backward goes from the last layer to the first. When it is in a layer, that one has its activations and its
        gradients, those below have their activations alone, and those above their gradients alone. Of layers of one
        kind, either the last or the first has the most.
        """
        counts, costs = self._slices.counts, list(self._slices.by_kind.values())
        kept = counts * np.array([cost.activation_bytes for cost in costs], dtype=np.float64)
        returned = counts * np.array([cost.backward_bytes for cost in costs], dtype=np.float64)
        order, most = self._slices.order(), np.zeros(len(counts))
        for column, cost in enumerate(costs):
            others = kept[:, order < order[column]].sum(axis=1) + returned[:, order > order[column]].sum(axis=1)
            of_last = kept[:, column] + cost.backward_bytes
            of_first = cost.activation_bytes + returned[:, column]
            moment = others + np.maximum(of_last, of_first) + cost.passing_bytes
            most = np.where(counts[:, column] > 0, np.maximum(most, moment), most)
        found: Floats = kept.sum(axis=1) + returned.sum(axis=1) + self._passing_bytes - most
        return found

    def least_depth(self, num_stages: int) -> int:
        """Return the microbatches in flight that the schedule needs, without latency or slack, on the first of these
        stages.
        """
        train = self._train
        return schedule_depth(train.schedule, train.microbatches, num_stages, 0)

    def num_held(self, groups: Iterable[int]) -> int:
        """Return the number of a batch's microbatches in some reduction groups."""
        return sum(int(self.ends[group + 1] - self.ends[group]) for group in groups)

    def depth_of(self, depth: int, num_held: int) -> int:
        """Return the depth of a worker that computes some microbatches of a stage of this depth."""
        return replica_depth(depth, num_held=num_held, num_microbatches=self._train.microbatches)

    def device_bytes(
        self, index: int, depth: int, groups: Sequence[int], num_replicas: int = 1, *, is_shared: bool = False
    ) -> int:
        """Return the bytes on a worker's device: a slice's tensors, sums, and activations at the depth of its stage."""
        held = self.depth_of(depth, self.num_held(groups))
        found = self._device_bytes(len(groups), num_replicas, held, is_shared=is_shared)[index]
        return int(found) + self.feedback_bytes * len(groups)

    def parts(self, index: int, held: int, groups: Sequence[int], num_replicas: int, *, is_shared: bool) -> MemoryParts:
        """Return what `device_bytes` consists of. held: the microbatches that the worker itself has in flight."""
        layers, number = self._slices.in_slice(index), len(groups)

        def total(of_layer: Callable[[LayerCost], int]) -> int:
            return sum(number * of_layer(cost) for number, cost in layers)

        passing = max((cost for _, cost in layers), key=lambda cost: cost.passing_bytes)
        is_loss = kind_of_layer(passing.name) == "head"
        loss_bytes = total(lambda cost: cost.loss_bytes)
        gradients = total(lambda cost: cost.gradient_bytes) - self.relief_bytes[index]
        gradients += float(self.gradient_sets(number, num_replicas)) * self._group_bytes[index]
        gradients += self.tie_bytes(number, num_replicas)[index]
        gradients += self.reduction_excess(number, num_replicas, held)[index]
        return MemoryParts(
            weights=total(lambda cost: cost.master_bytes),
            versions=total(lambda cost: cost.version_bytes),
            frozen=total(lambda cost: cost.frozen_bytes),
            optimizer=total(lambda cost: cost.optimizer_bytes),
            gradients=int(gradients),
            activations=held * (int(self._activation_bytes[index]) - loss_bytes),
            loss=held * loss_bytes + is_loss * passing.passing_bytes,
            recomputed=0 if is_loss else passing.passing_bytes,
            update=int(self.update_bytes[index]),
            shares=is_shared * int(self.shared_bytes[index]),
            feedback=self.feedback_bytes * number,
        )

    def host_bytes(self, slot: DeviceSlot) -> Floats:
        """Return the bytes that a slice takes on hosts: boundary states of all its copies and, beside a card, the
        pinned copy from which a snapshot is written. [num slices]
        """
        is_pinned = self.takes_snapshots and slot.device.kind == "cuda"
        found: Floats = (self.num_states * self.num_copies + is_pinned) * self.state_bytes
        return found

    def _device_bytes(
        self, num_groups: int | Counts, num_replicas: int, held: int | Counts, *, is_shared: bool
    ) -> Floats:
        """Return the bytes for a number of groups and of microbatches in flight. [num slices]"""
        needed: Floats = self._resident_bytes + self._passing_bytes - self.relief_bytes + self.update_bytes
        if is_shared:
            needed = needed + self.shared_bytes
        sets = self.gradient_sets(num_groups, num_replicas)
        needed = needed + self._group_bytes * sets + self._activation_bytes * held
        needed = needed + self.tie_bytes(num_groups, num_replicas)
        return needed + self.reduction_excess(num_groups, num_replicas, held)

    def tie_bytes(self, num_groups: int | Counts, num_replicas: int) -> Floats:
        """Return what a tied embedding takes beside the gradient sets that are counted anyway. [num slices]

        The sums of all groups stay until the other end's are here. With delay the next batch's are made meanwhile. If
        both ends are in one stage, both copies' sums and their sum are there for a moment.
        """
        own = np.asarray(num_groups, dtype=np.float64)
        is_in_turn = num_replicas == 1 and self._is_without_replicas
        kept = own - np.minimum(own, OPEN_SUMS_IN_TURN) if is_in_turn else np.zeros_like(own)
        at_one_end = kept + (1 + self._train.delay) * own + 1
        in_one_stage = 2 * kept + 2
        sets = np.where(self._num_ends == 1, at_one_end, np.where(self._num_ends == 2, in_one_stage, 0.0))
        found: Floats = self._tied_bytes * sets
        return found

    def reduction_excess(self, num_groups: int | Counts, num_replicas: int, held: int | Counts) -> Floats:
        """Return the bytes by which a replica needs more when a batch ends than in a backward. [num slices]

        Its sums are cut up then: they are there twice, beside the row for their mean. No backward has its gradients and
        what passes in it; without delay nothing is in flight.
        """
        if num_replicas == 1:
            return np.zeros(len(self._slices.counts))
        own, delay = np.asarray(num_groups, dtype=np.float64), self._train.delay
        sets = 2 * own + 1 + (1 + delay) * (self._num_groups - own) / num_replicas
        more = self._group_bytes * (sets - self.gradient_sets(num_groups, num_replicas))
        fewer = self._backward_bytes + self._passing_bytes - self.relief_bytes + self.update_bytes
        in_flight = np.asarray(held) * (1 - delay) + delay
        excess: Floats = np.maximum(more - fewer - self._activation_bytes * in_flight, 0.0)
        return excess

    def gradient_sets(self, num_groups: int | Counts, num_replicas: int) -> Floats:
        """Return a slice's gradient sets: the sums of the worker's own groups, and buffers to reduce them with others.

        A worker alone counts all its groups, unless no stage of its plan has replicas.

        These are the sets of a backward. Without delay only sums of replicas that are ahead come to the worker's own
        sums. With delay the worker sums the next batch, and of the last one it has one of three: its own sums cut up,
        and of two batches what others sent, while one of them is late; what others sent of the next batch, beside its
        own parts on their way; or what they sent of two batches to come.
        """
        own = np.asarray(num_groups, dtype=np.float64)
        if num_replicas == 1:
            return np.minimum(own, OPEN_SUMS_IN_TURN) if self._is_without_replicas else own
        received = (self._num_groups - own) / num_replicas
        if not self._train.delay:
            return np.asarray(own + received)
        while_one_is_late = own + 2 * received * (num_replicas - 2) / (num_replicas - 1)
        on_the_way = (own * (num_replicas - 1) + 1) / num_replicas + received
        return np.asarray(own + np.maximum(np.maximum(while_one_is_late, on_the_way), 2 * received))

    def most_groups(self, slot: DeviceSlot, depth: int, num_replicas: int, *, is_shared: bool = False) -> Counts:
        """Return how many groups a worker's memory has room for; 0: not even one. [num slices]"""
        limit = slot.room_bytes
        key = (limit, slot.host_memory_bytes, slot.device.kind, depth, num_replicas, is_shared)
        if key in self._most_groups:
            return self._most_groups[key]
        most = np.full(len(self._slices.counts), self._num_groups, dtype=np.int64)
        if limit:
            below, above = np.zeros_like(most), most
            # The first groups have the most microbatches.
            depths = np.array([self.depth_of(depth, int(end)) for end in self.ends], dtype=np.int64)
            while np.any(below < above):
                middle = (below + above + 1) // 2
                needed = self._device_bytes(middle, num_replicas, depths[middle], is_shared=is_shared)
                needed = needed + self.feedback_bytes * middle
                fits = np.floor(needed) <= limit
                below, above = np.where(fits, middle, below), np.where(fits, above, middle - 1)
            most = below
        if slot.host_memory_bytes:
            most = np.where(self.host_bytes(slot) <= slot.host_memory_bytes, most, 0)
        self._most_groups[key] = most
        return most
