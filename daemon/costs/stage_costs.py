"""Computes a slice of layers on one device or several replicas: seconds of a batch, and the best choices. Pure."""

from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from math import inf
from typing import Final

import numpy as np

from headway.daemon.costs.connections import CutCosts, Links
from headway.daemon.costs.devices import DeviceSlot
from headway.daemon.costs.profiles import DeviceClock, Profiles
from headway.daemon.costs.replica_shares import Bools, Counts, Floats, best_shares, largest_share, least_seconds
from headway.daemon.costs.stage_memory import LayerSlices, StageMemory
from headway.daemon.costs.update_memory import FP32_BYTES
from headway.daemon.jobs.job import JobSpec
from headway.stages.spec import Recompute

SHARING_GAIN: Final = 0.02
"""Part of a batch that sharing an update must save: less is not worth messages for which an update waits."""


class StageCosts:
    """The costs of a job on a set of seats. Tables are [num slices], as in LayerSlices."""

    def __init__(self, spec: JobSpec, slots: Sequence[DeviceSlot], profiles: Profiles, links: Links) -> None:
        self.spec = spec
        self.links = links
        self.slices = LayerSlices(spec)
        self.memory = StageMemory(spec, slots, self.slices)
        self.cuts = CutCosts(spec, links)
        self.num_layers = self.slices.num_layers
        self.num_microbatches = spec.train.microbatches
        self.num_groups = spec.train.reduction_groups
        devices = {(slot.node, slot.device.index): slot.device for slot in slots}
        self._clock = DeviceClock(self.slices.by_kind, spec.train, profiles, devices)
        self.sums_bytes = self.slices.total(lambda cost: FP32_BYTES * cost.num_parameters)
        update_flops = np.maximum(self.slices.total(lambda cost: cost.update_flops), 1.0)
        self._largest_part: Floats = self.slices.most(lambda cost: cost.largest_update_flops) / update_flops
        """Part of Newton–Schulz that the largest matrix takes. [num slices]"""
        self._paces: dict[tuple[str, int], tuple[float, ...]] = {}
        self._seconds: dict[tuple[float, ...], tuple[Floats, Floats, Floats]] = {}
        self._run_seconds: dict[object, tuple[Floats, Counts, Bools]] = {}

    def on(self, links: Links) -> "StageCosts":
        """Return the same costs over other links between the same devices."""
        if links is self.links:
            return self
        # What is remembered here depends on no link, or has the link's bandwidth in its key.
        found = copy(self)
        found.links, found.cuts = links, CutCosts(self.spec, links)
        return found

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
            each, update, shareable = (self.slices.counts @ np.array(pace[first::3]) for first in range(3))
            found = self._seconds[pace] = each, update, shareable
        return found

    def pace_of(self, slot: DeviceSlot) -> tuple[float, ...]:
        """Return a key of a device's times: for each kind of layer, a microbatch, an update, and what of it replicas
        share.
        """
        key = (slot.node, slot.device.index)
        found = self._paces.get(key)
        if found is None:
            kinds = [self._clock.seconds(slot.node, slot.device, kind) for kind in self.slices.by_kind]
            found = self._paces[key] = tuple(
                value for kind in kinds for value in (kind.microbatch_s, kind.update_s, kind.shareable_s)
            )
        return found

    def reduction_bytes(self, num_replicas: int, *, is_shared: bool) -> Floats:
        """Return the average bytes that each replica sends, and receives, per batch: sums to owners, reduced slices to
        all.

        All replicas together send (G + R) (R − 1) / R times the layers' sums: G groups' slices to their owners, and R
        reduced slices to R − 1 others. [num slices]

        is_shared: with the exchange of their shares of the update, which follows it.
        """
        share = (self.num_groups / num_replicas + 1) * (num_replicas - 1) / num_replicas
        sent = self.sums_bytes * share
        return sent + self.memory.shared_bytes * ((num_replicas - 1) / num_replicas) if is_shared else sent

    def reduction_seconds(self, run: Sequence[DeviceSlot], *, is_shared: bool = False) -> Floats:
        """Return the seconds of one batch's reduction, at the slowest link between the replicas. [num slices]

        is_shared: as in `reduction_bytes`.
        """
        if len(run) == 1:
            return np.zeros(len(self.slices.counts))
        return self.reduction_bytes(len(run), is_shared=is_shared) / self.links.slowest_sibling_bytes_per_s(run)

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
        return self.slices.recomputes[int(self._best_of_choices(run, num_stages)[1][self.slices.slice_of[span]])]

    def shares_update(
        self, run: tuple[DeviceSlot, ...], span: tuple[int, int], num_stages: int, recompute: Recompute
    ) -> bool:
        """Return whether the replicas of a stage share its update, for a slice for which `run_seconds` found a fit."""
        return bool(self._best_of_choices(run, num_stages)[2][self.slices.slice_number(span, recompute)])

    def _best_of_choices(self, run: tuple[DeviceSlot, ...], num_stages: int) -> tuple[Floats, Counts, Bools]:
        """Return the seconds [first, end], the choice of recomputation that takes them [num slices of one choice], and
        whether an update is shared [num slices].
        """
        workers = [(self.pace_of(slot), slot.room_bytes, slot.host_memory_bytes, slot.device.kind) for slot in run]
        if self.num_microbatches % self.num_groups == 0:
            workers.sort()
        key = (
            tuple(workers),
            num_stages if self.memory.is_limited else 0,
            self.links.slowest_sibling_bytes_per_s(run) if len(run) > 1 else 0.0,
        )
        found = self._run_seconds.get(key)
        if found is None:
            timed, is_shared = self._slice_seconds(run, num_stages)
            by_choice = timed.reshape(len(self.slices.recomputes), self.slices.num_slices)
            seconds = np.append(np.min(by_choice, axis=0), inf)
            # Of equal times, the first choice is the one that computes the least again.
            found = self._run_seconds[key] = seconds[self.slices.slice_of], np.argmin(by_choice, axis=0), is_shared
        return found

    def _slice_seconds(self, run: tuple[DeviceSlot, ...], num_stages: int) -> tuple[Floats, Bools]:
        """Return the seconds, and whether the replicas share the update. Both [num slices]"""
        depth, never = self.memory.least_depth(num_stages), np.zeros(len(self.slices.counts), dtype=np.bool_)
        if len(run) == 1:
            each, update = self.seconds(run[0])
            fits = self.memory.most_groups(run[0], depth, 1) >= self.num_groups
            return np.where(fits, self.num_microbatches * each + update, inf), never
        alone = self._replicated_seconds(run, depth, is_shared=False)
        wish = self.spec.placement.share_updates
        if wish == "never" or not np.any(self.memory.shared_bytes):
            return alone, never
        shared = self._replicated_seconds(run, depth, is_shared=True)
        is_shared = (shared < inf if wish == "always" else shared < (1 - SHARING_GAIN) * alone) & (
            self.memory.shared_bytes > 0
        )
        return np.where(is_shared, shared, alone), is_shared

    def _replicated_seconds(self, run: tuple[DeviceSlot, ...], depth: int, *, is_shared: bool) -> Floats:
        """Return the seconds of a batch on several replicas; inf where they do not fit. [num slices]"""
        computing = least_seconds(
            [self.seconds(slot)[0] for slot in run],
            [self._update_seconds(slot, len(run), is_shared=is_shared) for slot in run],
            [self.memory.most_groups(slot, depth, len(run), is_shared=is_shared) for slot in run],
            self.memory.ends,
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
        index, depth = self.slices.slice_number(span, recompute), self.memory.least_depth(num_stages)
        is_shared = self.shares_update(run, span, num_stages, recompute)
        return best_shares(
            [float(self.seconds(slot)[0][index]) for slot in run],
            [float(self._update_seconds(slot, len(run), is_shared=is_shared)[index]) for slot in run],
            [int(self.memory.most_groups(slot, depth, len(run), is_shared=is_shared)[index]) for slot in run],
            self.memory.ends,
        )
