"""Computes a slice of layers on one device or several replicas: seconds of a batch, bytes in memory. Pure.

Layers of one kind cost the same, so a slice is known by its number of layers of each kind. One table of all different
slices serves every place in the pipeline.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from itertools import pairwise
from math import inf
from typing import Final

import numpy as np

from headway.daemon.costs.connections import Links
from headway.daemon.costs.device_order import DeviceSlot
from headway.daemon.costs.layer_costs import (
    LayerCost,
    document_bytes,
    element_bytes,
    evaluation_bytes,
    kind_of_layer,
    layer_costs,
    num_hidden,
    position_bytes,
    tied_bytes,
)
from headway.daemon.costs.profiles import DeviceClock, Profiles
from headway.daemon.costs.replica_shares import (
    Bools,
    Counts,
    Floats,
    best_shares,
    group_ends,
    largest_share,
    least_seconds,
)
from headway.daemon.costs.update_memory import FP32_BYTES
from headway.daemon.jobs.job import JobSpec
from headway.stages.links.codec import Codec, codec_between, coded_bytes, feedback_bytes
from headway.stages.schedule.schedule import replica_depth, schedule_depth
from headway.stages.spec import Recompute, timed_kind

HOST_STATES: Final = 2
"""Number of boundary states for which a node's memory must have room: one being written, one being sent."""
HOST_STATES_WITH_SNAPSHOTS: Final = 6
SHARING_GAIN: Final = 0.02
"""Part of a batch that sharing an update must save: less is not worth messages for which an update waits."""
OPEN_SUMS_IN_TURN: Final = 2
"""Gradient sums of a stage where the job wants no replicas: the total, and that of the group that is under way."""


class StageCosts:
    """The costs of a job on a set of seats. Slices are (first layer, end); tables over them are [num slices].

    A table has all slices once for each choice of recomputation, one choice after another.
    """

    def __init__(self, spec: JobSpec, slots: Sequence[DeviceSlot], profiles: Profiles, links: Links) -> None:
        self.spec = spec
        self.links = links
        self.tied_bytes = tied_bytes(spec)
        """Bytes of a group's sum of the tied matrix, which the first and the last stage exchange; 0: there is none."""
        self.recomputes = spec.train.recomputes
        """What a stage may compute again, the fastest first."""
        self._layers_by_choice = [layer_costs(spec, recompute) for recompute in self.recomputes]
        self.layers = self._layers_by_choice[0]
        self.names = tuple(cost.name for cost in self.layers)
        self.num_layers = len(self.layers)
        self.num_microbatches = spec.train.microbatches
        self.num_groups = spec.train.reduction_groups
        self._is_without_replicas = set(spec.placement.replicas) == {1}
        """Whether the job wants no replicas: then one group's microbatches come after another's."""
        self.ends = group_ends(self.num_microbatches, self.num_groups)
        self._num_hidden = num_hidden(spec)
        sites = {slot.site for slot in slots}
        self._far_codec = codec_between(spec.train, is_between_sites=True)
        self._near_codec = codec_between(spec.train, is_between_sites=False)
        is_coded = bool(self._near_codec or (self._far_codec and len(sites) > 1))
        self.feedback_bytes = feedback_bytes(spec.train, self._num_hidden) if is_coded else 0
        """Bytes per reduction group if the links upstream are coded. They count on every worker of such a job."""
        self._by_kind = {
            timed_kind(cost.name, recompute): cost
            for recompute, layers in zip(self.recomputes, self._layers_by_choice, strict=True)
            for cost in layers
        }
        self._kinds = tuple(self._by_kind)
        self._clock = DeviceClock(
            self._by_kind, spec.train, profiles, {(slot.node, slot.device.index): slot.device for slot in slots}
        )
        self._count_slices()
        self._paces: dict[tuple[str, int], tuple[float, ...]] = {}
        self._seconds: dict[tuple[float, ...], tuple[Floats, Floats, Floats]] = {}
        self._run_seconds: dict[object, tuple[Floats, Counts, Bools]] = {}
        self._widest: dict[frozenset[str], float] = {}
        self._most_groups: dict[tuple[int, int, str, int, int, bool], Counts] = {}
        self.is_limited = any(slot.limit_bytes for slot in slots)
        """True if memory on a device counts, which depends on how many stages come after a stage."""

    def on(self, links: Links) -> "StageCosts":
        """Return the same costs over other links between the same devices."""
        if links is self.links:
            return self
        # What is remembered depends on no link, or has the link's bandwidth in its key.
        found = copy(self)
        found.links = links
        return found

    def _count_slices(self) -> None:
        """Count all different slices, by their number of layers of each kind, once for each choice of recomputation."""
        plain = list(dict.fromkeys(kind_of_layer(cost.name) for cost in self.layers))
        kinds = np.array([plain.index(kind_of_layer(cost.name)) for cost in self.layers])
        size = self.num_layers + 1
        before = np.zeros((size, len(plain)), dtype=np.int64)
        before[1:] = np.cumsum(kinds[:, np.newaxis] == np.arange(len(plain)), axis=0)
        firsts, ends = np.triu_indices(size, k=1)
        numbers, slices = np.unique(before[ends] - before[firsts], axis=0, return_inverse=True)
        self.num_slices = len(numbers)
        counts = np.zeros((len(self.recomputes) * self.num_slices, len(self._kinds)), dtype=np.int64)
        for choice, recompute in enumerate(self.recomputes):
            columns = [self._kinds.index(timed_kind(kind, recompute)) for kind in plain]
            counts[choice * self.num_slices : (choice + 1) * self.num_slices, columns] = numbers
        self.slice_of: Counts = np.full((size, size), self.num_slices, dtype=np.int64)
        """Slice of each [first, end] under the first choice of recomputation; num_slices where there is none."""
        self.slice_of[firsts, ends] = slices.reshape(-1)
        self._counts = counts.astype(np.float64)
        self.resident_bytes = self._sum(lambda kind: self._by_kind[kind].resident_bytes)
        self.group_bytes = self._sum(lambda kind: self._by_kind[kind].group_bytes)
        self.activation_bytes = self._sum(lambda kind: self._by_kind[kind].activation_bytes)
        are_blocks = [kind.startswith("block") for kind in self._kinds]
        self.activation_bytes += document_bytes(self.spec) * np.any(counts[:, are_blocks] > 0, axis=1)
        passing = np.array([self._by_kind[kind].passing_bytes for kind in self._kinds], dtype=np.float64)
        self.passing_bytes: Floats = np.max(np.where(counts > 0, passing, 0.0), axis=1)
        moment = np.array([self._by_kind[kind].moment_bytes for kind in self._kinds], dtype=np.float64)
        updating: Floats = np.max(np.where(counts > 0, moment, 0.0), axis=1)
        # An update has the memory of a backward's gradients, and of what passes in a backward, to itself.
        self._backward_bytes = self._sum(lambda kind: self._by_kind[kind].backward_bytes)
        freed = self._backward_bytes + self.passing_bytes
        self.relief_bytes = self._relief(self._counts, [plain.index(kind.partition("+")[0]) for kind in self._kinds])
        """Bytes that no moment of a backward needs: gradients of layers above come where those kept their activations.
        [num slices]
        """
        freed -= self.relief_bytes
        self.update_bytes: Floats = np.maximum(updating - freed, 0.0)
        """Bytes that an update takes above the most that a backward does."""
        copies = HOST_STATES_WITH_SNAPSHOTS if self.spec.fault.snapshot_every else HOST_STATES
        self._host_bytes = self._sum(lambda kind: copies * self._by_kind[kind].state_bytes)
        self._num_ends = self._sum(lambda kind: float(kind in ("embed", "head")))
        pinned = self._sum(lambda kind: self._by_kind[kind].state_bytes) if self.spec.fault.snapshot_every else 0.0
        self._host_bytes_of_card: Floats = self._host_bytes + pinned
        self.sums_bytes = self._sum(lambda kind: FP32_BYTES * self._by_kind[kind].num_parameters)
        self.shared_bytes = self._sum(lambda kind: self._by_kind[kind].shared_bytes)
        """Bytes of Newton–Schulz's results of a batch, which replicas that share its update hold. [num slices]

        Results of the next batch come only after its sums are reduced, and fit where those were.
        """
        largest = np.array([self._by_kind[kind].largest_update_flops for kind in self._kinds], dtype=np.float64)
        total = np.maximum(self._sum(lambda kind: self._by_kind[kind].update_flops), 1.0)
        self._largest_part: Floats = np.max(np.where(counts > 0, largest, 0.0), axis=1) / total
        """Part of Newton–Schulz that the largest matrix takes. [num slices]"""

    def _relief(self, counts: Floats, places: Sequence[int]) -> Floats:
        """Return by how much a backward's fullest moment is below the sum of all activations and gradients of one
        microbatch, and of what passes. [num slices]

        A backward goes from the last layer to the first. When it is in a layer, that one has its activations and its
        gradients, those below have their activations alone, and those above their gradients alone.

        places: of each kind in the model's order; of one kind either the last layer or the first has the most.
        """
        costs = [self._by_kind[kind] for kind in self._kinds]
        kept = counts * np.array([cost.activation_bytes for cost in costs], dtype=np.float64)
        returned = counts * np.array([cost.backward_bytes for cost in costs], dtype=np.float64)
        order, most = np.array(places), np.zeros(len(counts))
        for column, cost in enumerate(costs):
            others = kept[:, order < order[column]].sum(axis=1) + returned[:, order > order[column]].sum(axis=1)
            of_last = kept[:, column] + cost.backward_bytes
            of_first = cost.activation_bytes + returned[:, column]
            moment = others + np.maximum(of_last, of_first) + cost.passing_bytes
            most = np.where(counts[:, column] > 0, np.maximum(most, moment), most)
        found: Floats = kept.sum(axis=1) + returned.sum(axis=1) + self.passing_bytes - most
        return found

    def _sum(self, of_kind: Callable[[str], float]) -> Floats:
        """Sum over a slice's layers. [num slices]"""
        sums: Floats = self._counts @ np.array([of_kind(kind) for kind in self._kinds], dtype=np.float64)
        return sums

    def slice_number(self, span: tuple[int, int], recompute: str) -> int:
        """Return the slice of (first layer, end) under a choice of recomputation."""
        choice = self.recomputes.index(recompute) if recompute in self.recomputes else 0
        return choice * self.num_slices + int(self.slice_of[span])

    def layers_of(self, layers: Collection[str], recompute: str) -> tuple[LayerCost, ...]:
        """Return the costs of some layers under a choice of recomputation."""
        choice = self.recomputes.index(recompute) if recompute in self.recomputes else 0
        return tuple(cost for cost in self._layers_by_choice[choice] if cost.name in layers)

    # --- Seconds ------------------------------------------------------------------------------------------------------

    def seconds(self, slot: DeviceSlot) -> tuple[Floats, Floats]:
        """Return the seconds of a microbatch and of an update, on a device. Both [num slices]."""
        return self._timed(slot)[:2]

    def shared_update_seconds(self, slot: DeviceSlot, num_replicas: int) -> Floats:
        """Return the seconds of an update on a device that does its share of Newton–Schulz. [num slices]"""
        _, update, shareable = self._timed(slot)
        return update - shareable * (1.0 - largest_share(self._largest_part, num_replicas))

    def _timed(self, slot: DeviceSlot) -> tuple[Floats, Floats, Floats]:
        pace = self.pace_of(slot)
        found = self._seconds.get(pace)
        if found is None:
            each, update, shareable = (self._counts @ np.array(pace[first::3]) for first in range(3))
            found = self._seconds[pace] = each, update, shareable
        return found

    def pace_of(self, slot: DeviceSlot) -> tuple[float, ...]:
        """Return a key of a device's times: for each kind of layer, a microbatch, an update, and what of it replicas
        share.
        """
        key = (slot.node, slot.device.index)
        found = self._paces.get(key)
        if found is None:
            kinds = [self._clock.seconds(slot.node, slot.device, kind) for kind in self._kinds]
            found = self._paces[key] = tuple(
                value for kind in kinds for value in (kind.microbatch_s, kind.update_s, kind.shareable_s)
            )
        return found

    def reduction_bytes(self, num_replicas: int) -> Floats:
        """Return the average bytes that each replica sends, and receives, per batch: sums to owners, reduced slices to
        all.

        All replicas together send (G + R) (R − 1) / R times the layers' sums: G groups' slices to their owners, and R
        reduced slices to R − 1 others. [num slices]
        """
        share = (self.num_groups / num_replicas + 1) * (num_replicas - 1) / num_replicas
        return self.sums_bytes * share

    def exchange_bytes(self, num_replicas: int) -> Floats:
        """Return the average bytes that each replica sends, and receives, per batch where they share the update.
        [num slices]
        """
        return self.shared_bytes * ((num_replicas - 1) / num_replicas)

    def reduction_seconds(self, run: Sequence[DeviceSlot], *, is_shared: bool = False) -> Floats:
        """Return the seconds of one batch's reduction, at the slowest link between the replicas. [num slices]

        is_shared: with the exchange of their shares of the update, which follows it.
        """
        if len(run) == 1:
            return np.zeros(len(self._counts))
        sent = self.reduction_bytes(len(run)) + (self.exchange_bytes(len(run)) if is_shared else 0.0)
        return sent / self.links.slowest_sibling_bytes_per_s(run)

    def with_reduction(self, computing: Floats, reducing: Floats) -> Floats:
        """Return a stage's seconds of a batch: reduction runs during the next batch or, without delay, after
        its own.
        """
        return np.maximum(computing, reducing) if self.spec.train.delay else computing + reducing

    def run_seconds(self, run: tuple[DeviceSlot, ...], num_stages: int) -> Floats:
        """Return a batch's seconds on a stage that these devices share in the best way; inf where it does not fit.

        num_stages: this stage and those after it. [first, end], each of num_layers + 1
        """
        return self._best_of_choices(run, num_stages)[0]

    def recompute(self, run: tuple[DeviceSlot, ...], span: tuple[int, int], num_stages: int) -> Recompute:
        """Return what a stage computes again in its least time, for a slice for which `run_seconds` found a fit."""
        return self.recomputes[int(self._best_of_choices(run, num_stages)[1][self.slice_of[span]])]

    def shares_update(
        self, run: tuple[DeviceSlot, ...], span: tuple[int, int], num_stages: int, recompute: Recompute
    ) -> bool:
        """Return whether the replicas of a stage share its update, for a slice for which `run_seconds` found a fit."""
        return bool(self._best_of_choices(run, num_stages)[2][self.slice_number(span, recompute)])

    def _best_of_choices(self, run: tuple[DeviceSlot, ...], num_stages: int) -> tuple[Floats, Counts, Bools]:
        """Return the seconds [first, end], the choice of recomputation that takes them [num slices of one choice], and
        whether an update is shared [num slices].
        """
        workers = [(self.pace_of(slot), slot.room_bytes, slot.host_memory_bytes, slot.device.kind) for slot in run]
        if self.num_microbatches % self.num_groups == 0:
            workers.sort()
        key = (
            tuple(workers),
            num_stages if self.is_limited else 0,
            self.links.slowest_sibling_bytes_per_s(run) if len(run) > 1 else 0.0,
        )
        found = self._run_seconds.get(key)
        if found is None:
            timed, is_shared = self._slice_seconds(run, num_stages)
            by_choice = timed.reshape(len(self.recomputes), self.num_slices)
            seconds = np.append(np.min(by_choice, axis=0), inf)
            # Of equal times, the first choice is the one that computes the least again.
            found = self._run_seconds[key] = seconds[self.slice_of], np.argmin(by_choice, axis=0), is_shared
        return found

    def _slice_seconds(self, run: tuple[DeviceSlot, ...], num_stages: int) -> tuple[Floats, Bools]:
        """Return the seconds, and whether the replicas share the update. Both [num slices]"""
        depth, never = self.least_depth(num_stages), np.zeros(len(self._counts), dtype=np.bool_)
        if len(run) == 1:
            each, update = self.seconds(run[0])
            fits = self.most_groups(run[0], depth, 1) >= self.num_groups
            return np.where(fits, self.num_microbatches * each + update, inf), never
        alone = self._replicated_seconds(run, depth, is_shared=False)
        wish = self.spec.placement.share_updates
        if wish == "never" or not np.any(self.shared_bytes):
            return alone, never
        shared = self._replicated_seconds(run, depth, is_shared=True)
        is_shared = (shared < inf if wish == "always" else shared < (1 - SHARING_GAIN) * alone) & (
            self.shared_bytes > 0
        )
        return np.where(is_shared, shared, alone), is_shared

    def _replicated_seconds(self, run: tuple[DeviceSlot, ...], depth: int, *, is_shared: bool) -> Floats:
        """Return the seconds of a batch on several replicas; inf where they do not fit. [num slices]"""
        computing = least_seconds(
            [self.seconds(slot)[0] for slot in run],
            [self._update_seconds(slot, len(run), is_shared=is_shared) for slot in run],
            [self.most_groups(slot, depth, len(run), is_shared=is_shared) for slot in run],
            self.ends,
        )
        return self.with_reduction(computing, self.reduction_seconds(run, is_shared=is_shared))

    def _update_seconds(self, slot: DeviceSlot, num_replicas: int, *, is_shared: bool) -> Floats:
        return self.shared_update_seconds(slot, num_replicas) if is_shared else self.seconds(slot)[1]

    def can_share(self, run: Sequence[DeviceSlot]) -> bool:
        """Return whether devices may be replicas of one stage: equal arithmetic, a group for each, and all can talk."""
        are_alike = all(one.arithmetic_class == other.arithmetic_class for one, other in pairwise(run))
        return len(run) <= self.num_groups and are_alike and self.links.siblings_talk(run)

    def shares(
        self, run: tuple[DeviceSlot, ...], span: tuple[int, int], num_stages: int, recompute: Recompute
    ) -> tuple[int, ...]:
        """Return how many groups each replica holds, for a slice for which `run_seconds` found a fit."""
        if len(run) == 1:
            return (self.num_groups,)
        index, depth = self.slice_number(span, recompute), self.least_depth(num_stages)
        is_shared = self.shares_update(run, span, num_stages, recompute)
        return best_shares(
            [float(self.seconds(slot)[0][index]) for slot in run],
            [float(self._update_seconds(slot, len(run), is_shared=is_shared)[index]) for slot in run],
            [int(self.most_groups(slot, depth, len(run), is_shared=is_shared)[index]) for slot in run],
            self.ends,
        )

    # --- Links --------------------------------------------------------------------------------------------------------

    def codec(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> Codec:
        """Return the codec of the cut between two stages: of all links between their workers."""
        if self._far_codec is self._near_codec:
            return self._near_codec
        is_far = len({slot.site for slots in (uppers, lowers) for slot in slots}) > 1
        return self._far_codec if is_far else self._near_codec

    def carried_bytes(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> int:
        """Return the coded bytes that the cut's links carry each way per microbatch: hidden states, or their
        gradient, with positions in documents.
        """
        train = self.spec.train
        return coded_bytes(self.codec(uppers, lowers), self._num_hidden, element_bytes(train)) + position_bytes(train)

    def downward_bytes(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> float:
        """Return the bytes that the cut's links carry down per microbatch and evaluation: the mean of all batches."""
        return self.carried_bytes(uppers, lowers) + evaluation_bytes(self.spec)

    def boundary_seconds(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> float:
        """Return the seconds to carry a batch to the next stage: the mean share of the side with fewer workers, slowest
        link.
        """
        carried = self.num_microbatches * self.downward_bytes(uppers, lowers) / min(len(uppers), len(lowers))
        return carried / self.links.slowest_bytes_per_s(uppers, lowers)

    def tie_seconds(self, firsts: Sequence[DeviceSlot], lasts: Sequence[DeviceSlot]) -> float:
        """Return the seconds in which the first and the last stage exchange a batch's sums of a tied embedding.

        That is the mean share of the side with fewer workers, on the slowest link.
        """
        if not self.tied_bytes:
            return 0.0
        carried = self.num_groups * self.tied_bytes / min(len(firsts), len(lasts))
        return carried / self.links.slowest_bytes_per_s(firsts, lasts)

    def can_tie(self, firsts: Sequence[DeviceSlot], lasts: Sequence[DeviceSlot]) -> bool:
        """Return whether these devices may hold the first and the last stage: with a tied embedding they have links."""
        return not self.tied_bytes or self.links.all_talk(firsts, lasts)

    def widest_boundary_s(self, order: Sequence[DeviceSlot]) -> float:
        """Return a batch's seconds on the slowest link between any two of these seats; inf where each link is
        its own.
        """
        if self.links.differ_inside_sites:
            return inf
        sites = frozenset(slot.site for slot in order)
        if sites not in self._widest:
            ends = list({slot.site: slot for slot in order}.values())
            pairs = [(one, other) for one in ends for other in ends if one is not other]
            pairs += [(one, other) for one, other in pairwise(order) if one.site == other.site]
            self._widest[sites] = max((self.boundary_seconds([one], [other]) for one, other in pairs), default=0.0)
        return self._widest[sites]

    # --- Memory -------------------------------------------------------------------------------------------------------

    def least_depth(self, num_stages: int) -> int:
        """Return the microbatches in flight that the schedule needs, without latency or slack, on the first of these
        stages.
        """
        train = self.spec.train
        return schedule_depth(train.schedule, train.microbatches, num_stages, 0)

    def num_held(self, groups: Iterable[int]) -> int:
        """Return the number of a batch's microbatches in some reduction groups."""
        return sum(int(self.ends[group + 1] - self.ends[group]) for group in groups)

    def depth_of(self, depth: int, num_held: int) -> int:
        """Return the depth of a worker that computes some microbatches of a stage of this depth."""
        return replica_depth(depth, num_held=num_held, num_microbatches=self.num_microbatches)

    def device_bytes(
        self, index: int, depth: int, groups: Sequence[int], num_replicas: int = 1, *, is_shared: bool = False
    ) -> int:
        """Return the bytes on a worker's device: a slice's tensors, sums, and activations at the depth of its stage."""
        held = self.depth_of(depth, self.num_held(groups))
        found = self._device_bytes(len(groups), num_replicas, held, is_shared=is_shared)[index]
        return int(found) + self.feedback_bytes * len(groups)

    def host_bytes(self, slot: DeviceSlot) -> Floats:
        """Return the bytes that a slice takes on the host: boundary states and, beside a card, the pinned copy from
        which a snapshot is written. [num slices]
        """
        return self._host_bytes_of_card if slot.device.kind == "cuda" else self._host_bytes

    def _device_bytes(
        self, num_groups: int | Counts, num_replicas: int, held: int | Counts, *, is_shared: bool
    ) -> Floats:
        """Return the bytes for a number of groups and of microbatches in flight. [num slices]"""
        needed: Floats = self.resident_bytes + self.passing_bytes - self.relief_bytes + self.update_bytes
        if is_shared:
            needed = needed + self.shared_bytes
        sets = self.gradient_sets(num_groups, num_replicas)
        needed = needed + self.group_bytes * sets + self.activation_bytes * held
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
        at_one_end = kept + (1 + self.spec.train.delay) * own + 1
        in_one_stage = 2 * kept + 2
        sets = np.where(self._num_ends == 1, at_one_end, np.where(self._num_ends == 2, in_one_stage, 0.0))
        found: Floats = self.tied_bytes * sets
        return found

    def reduction_excess(self, num_groups: int | Counts, num_replicas: int, held: int | Counts) -> Floats:
        """Return the bytes by which a replica needs more when a batch ends than in a backward. [num slices]

        Its sums are cut up then: they are there twice, beside the row for their mean. No backward has its gradients and
        what passes in it; without delay nothing is in flight.
        """
        if num_replicas == 1:
            return np.zeros(len(self._counts))
        own, delay = np.asarray(num_groups, dtype=np.float64), self.spec.train.delay
        sets = 2 * own + 1 + (1 + delay) * (self.num_groups - own) / num_replicas
        more = self.group_bytes * (sets - self.gradient_sets(num_groups, num_replicas))
        fewer = self._backward_bytes + self.passing_bytes - self.relief_bytes + self.update_bytes
        in_flight = np.asarray(held) * (1 - delay) + delay
        excess: Floats = np.maximum(more - fewer - self.activation_bytes * in_flight, 0.0)
        return excess

    def gradient_sets(self, num_groups: int | Counts, num_replicas: int) -> Floats:
        """Return a slice's gradient sets: the sums of the worker's own groups, and buffers to reduce them with others.

        A worker alone counts all its groups, unless the job wants no replicas.

        These are the sets of a backward. Without delay only sums of replicas that are ahead come to the worker's own
        sums. With delay the worker sums the next batch, and of the last one it has one of three: its own sums cut up,
        and of two batches what others sent, while one of them is late; what others sent of the next batch, beside its
        own parts on their way; or what they sent of two batches to come.
        """
        own = np.asarray(num_groups, dtype=np.float64)
        if num_replicas == 1:
            return np.minimum(own, OPEN_SUMS_IN_TURN) if self._is_without_replicas else own
        received = (self.num_groups - own) / num_replicas
        if not self.spec.train.delay:
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
        most = np.full(len(self._counts), self.num_groups, dtype=np.int64)
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
