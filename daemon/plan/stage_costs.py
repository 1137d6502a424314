"""Computes a slice of layers on one device or several replicas: seconds of a batch, and the best choices. Pure."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import inf
from typing import Final

import numpy as np

from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.connections import CutCosts, Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import kind_of_layer
from headway.daemon.plan.profiles import DeviceClock, Profiles
from headway.daemon.plan.replica_shares import Floats, best_shares, largest_share
from headway.daemon.plan.stage_memory import LayerSlices, StageMemory
from headway.daemon.plan.update_memory import FP32_BYTES
from headway.stages.spec import Recompute

FRAME_S: Final = 0.18e-3
"""Processor seconds to send a frame, or to receive one: coding, TLS, and the turns of its threads. Like the next one,
and START_S of a layer, a figure of `bench/hot_path.py --rows starts`.
"""
STAGE_S: Final = 2.0e-3
"""Processor seconds of what a stage does once a batch: 0.6 ms in its worker, as above, and 1.4 ms in its
node's daemon, whose processor time beside real runs says so.
"""
SHARING_GAIN: Final = 0.02
"""Part of a batch that sharing an update must save: less is not worth messages for which an update waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """How the devices of a stage compute it in the best way."""

    seconds: float
    """Of a batch, with its reduction as far as that counts."""
    recompute: Recompute
    shares: tuple[int, ...]
    """How many reduction groups each replica holds."""
    shares_update: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsParts:
    """The parts of a worker's seconds of a batch."""

    flops: float
    """Operations of a microbatch, forward and backward."""
    flops_per_s: float
    """The device's rate for them, as planned: its speed, or the measured times."""
    microbatch_s: float
    num_microbatches: int
    update_s: float

    @property
    def batch_s(self) -> float:
        """Return forward, backward and update of one batch."""
        return self.num_microbatches * self.microbatch_s + self.update_s


def stage_seconds(device: Device) -> tuple[float, float]:
    """Return the seconds that a device needs to send or receive a frame, and for what a stage does once a batch."""
    if not device.num_cores:
        return 0.0, 0.0
    return FRAME_S / min(1.0, device.num_cores), STAGE_S / min(1.0, device.num_cores)


class StageCosts:
    """The costs of a job on a set of seats. Tables are [num slices], as in LayerSlices."""

    def __init__(
        self,
        spec: JobSpec,
        slots: Sequence[DeviceSlot],
        profiles: Profiles,
        links: Links,
        *,
        num_copies: int = 0,
        has_replicas: bool = True,
    ) -> None:
        """num_copies, has_replicas: as in StageMemory."""
        self.spec = spec
        self.links = links
        self._slots, self._profiles = slots, profiles
        self._num_copies, self._has_replicas = num_copies, has_replicas
        self.slices = LayerSlices(spec)
        self.memory = StageMemory(spec, slots, self.slices, num_copies=num_copies, has_replicas=has_replicas)
        self.cuts = CutCosts(spec, links)
        self.num_layers = self.slices.num_layers
        self.num_microbatches = spec.train.microbatches
        self.num_groups = spec.train.reduction_groups
        devices = {(slot.node, slot.device.index): slot.device for slot in slots}
        ends = self.slices.total(lambda cost: kind_of_layer(cost.name) != "block")
        self._num_frames: Floats = 1 + 2 * (2 - ends)
        """Frames of a microbatch, both ways, on all links of a stage; and what its loop does beside, which takes as
        long as one more. [num slices]
        """
        self._clock = DeviceClock(self.slices.by_kind, spec.train, profiles, devices)
        self.sums_bytes = self.slices.total(lambda cost: FP32_BYTES * cost.num_parameters)
        update_flops = np.maximum(self.slices.total(lambda cost: cost.update_flops), 1.0)
        self.largest_part: Floats = self.slices.most(lambda cost: cost.largest_update_flops) / update_flops
        """Part of Newton–Schulz that the largest matrix takes. [num slices]"""
        self._paces: dict[tuple[str, int], tuple[float, ...]] = {}
        self._seconds: dict[tuple[float, ...], tuple[Floats, Floats, Floats]] = {}
        self._stages: dict[object, StageChoice | None] = {}

    def with_recompute(self, recompute: Recompute) -> "StageCosts":
        """Return the costs of the same job with a fixed choice of what every stage computes again."""
        return self._of(replace(self.spec, train=replace(self.spec.train, recompute=recompute)), self._has_replicas)

    def without_replicas(self) -> "StageCosts":
        """Return the costs of the same job where each stage has one worker, which then needs fewer gradient sums."""
        return self._of(self.spec, has_replicas=False)

    def with_whole_blocks(self) -> "StageCosts":
        """Return the costs of the same job where no plan cuts inside a block."""
        return self._of(self.spec.with_values({"placement.split_blocks": False}), self._has_replicas)

    def _of(self, spec: JobSpec, has_replicas: bool) -> "StageCosts":
        return StageCosts(
            spec, self._slots, self._profiles, self.links, num_copies=self._num_copies, has_replicas=has_replicas
        )

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

    def seconds_along(self, order: Sequence[DeviceSlot]) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of a microbatch, of an update, and the part of it that replicas can share. Each
        [num seats, num slices].
        """
        timed = [self._timed(slot) for slot in order]
        each, update, shareable = (np.array([times[part] for times in timed]) for part in range(3))
        return each, update, shareable

    @property
    def may_share_updates(self) -> bool:
        """Return whether replicas of a stage may share its update."""
        return self.spec.placement.share_updates != "never" and bool(np.any(self.memory.shared_bytes))

    def shared_update_seconds(self, slot: DeviceSlot, num_replicas: int) -> Floats:
        """Return the seconds of an update on a device that does its share of Newton–Schulz. [num slices]"""
        _, update, shareable = self._timed(slot)
        return update - shareable * (1.0 - largest_share(self.largest_part, num_replicas))

    def seconds_parts(
        self, slot: DeviceSlot, index: int, num_microbatches: int, num_replicas: int, *, is_shared: bool
    ) -> SecondsParts:
        """Return what a worker's seconds of a batch consist of. num_replicas: workers of its stage."""
        microbatch_s = float(self.seconds(slot)[0][index])
        flops = sum(number * (cost.forward_flops + cost.backward_flops) for number, cost in self.slices.in_slice(index))
        return SecondsParts(
            flops=flops,
            flops_per_s=flops / microbatch_s,
            microbatch_s=microbatch_s,
            num_microbatches=num_microbatches,
            update_s=float(self._update_seconds(slot, num_replicas, is_shared=is_shared)[index]),
        )

    def operation_seconds(self, slot: DeviceSlot, index: int) -> tuple[float, float, float, float]:
        """Return the seconds of a forward, a backward and an update, and the part of the update that replicas share."""
        numbers, kinds = self.slices.counts[index], list(self.slices.by_kind)
        timed = [
            (float(numbers[at]), self._clock.seconds(slot.node, slot.device, kind)) for at, kind in enumerate(kinds)
        ]
        frame_s, stage_s = stage_seconds(slot.device)
        on_frames_s = frame_s * float(self._num_frames[index]) / 2
        return (
            sum(number * each.forward_s for number, each in timed) + on_frames_s,
            sum(number * each.backward_s for number, each in timed) + on_frames_s,
            sum(number * each.update_s for number, each in timed) + stage_s,
            sum(number * each.shareable_s for number, each in timed),
        )

    def _timed(self, slot: DeviceSlot) -> tuple[Floats, Floats, Floats]:
        pace = self.pace_of(slot)
        found = self._seconds.get(pace)
        if found is None:
            *kinds, frame_s, stage_s = pace
            each, update, shareable = (self.slices.counts @ np.array(kinds[first::3]) for first in range(3))
            found = self._seconds[pace] = each + frame_s * self._num_frames, update + stage_s, shareable
        return found

    def pace_of(self, slot: DeviceSlot) -> tuple[float, ...]:
        """Return a key of a device's times: for each kind of layer, a microbatch, an update, and what of it replicas
        share; then those of `stage_seconds`.
        """
        key = (slot.node, slot.device.index)
        found = self._paces.get(key)
        if found is None:
            kinds = [self._clock.seconds(slot.node, slot.device, kind) for kind in self.slices.by_kind]
            found = self._paces[key] = tuple(
                chain(
                    *((kind.microbatch_s, kind.update_s, kind.shareable_s) for kind in kinds),
                    stage_seconds(slot.device),
                )
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
        sent: Floats = self.sums_bytes * share
        return sent + self.memory.shared_bytes * ((num_replicas - 1) / num_replicas) if is_shared else sent

    def reduction_seconds(self, run: Sequence[DeviceSlot], *, is_shared: bool = False) -> Floats:
        """Return the seconds of one batch's reduction, at the slowest link between the replicas. [num slices]

        is_shared: as in `reduction_bytes`.
        """
        if len(run) == 1:
            return np.zeros(len(self.slices.counts))
        return self.reduction_bytes(len(run), is_shared=is_shared) / self.links.slowest_sibling_bytes_per_s(run)

    def stage(self, run: tuple[DeviceSlot, ...], span: tuple[int, int], num_stages: int) -> StageChoice | None:
        """Return how these devices compute layers in the least seconds of a batch; None: it does not fit.

        num_stages: this stage and those after it.
        """
        workers = tuple((self.pace_of(slot), slot.room_bytes, slot.host_memory_bytes, slot.device.kind) for slot in run)
        bandwidth = self.links.slowest_sibling_bytes_per_s(run) if len(run) > 1 else inf
        key = workers, int(self.slices.slice_of[span]), num_stages if self.memory.is_limited else 0, bandwidth
        if key not in self._stages:
            depth = self.memory.least_depth(num_stages)
            found = (self._choice(run, span, recompute, depth, bandwidth) for recompute in self.slices.recomputes)
            # Of equal times, the first choice is the one that computes the least again.
            self._stages[key] = min(filter(None, found), key=lambda each: each.seconds, default=None)
        return self._stages[key]

    def _choice(
        self, run: tuple[DeviceSlot, ...], span: tuple[int, int], recompute: Recompute, depth: int, bandwidth: float
    ) -> StageChoice | None:
        index = self.slices.slice_number(span, recompute)
        if len(run) == 1:
            each, update, _ = self._timed(run[0])
            if self.memory.most_groups(run[0], depth, 1)[index] < self.num_groups:
                return None
            seconds = self.num_microbatches * each[index] + update[index]
            return StageChoice(seconds=float(seconds), recompute=recompute, shares=(self.num_groups,))
        alone = self._replicated(run, index, recompute, depth, bandwidth, is_shared=False)
        if not self.may_share_updates or not self.memory.shared_bytes[index]:
            return alone
        shared = self._replicated(run, index, recompute, depth, bandwidth, is_shared=True)
        if shared is None or alone is None:
            return shared or alone
        is_wanted = self.spec.placement.share_updates == "always"
        return shared if is_wanted or shared.seconds < (1 - SHARING_GAIN) * alone.seconds else alone

    def _replicated(
        self,
        run: tuple[DeviceSlot, ...],
        index: int,
        recompute: Recompute,
        depth: int,
        bandwidth: float,
        *,
        is_shared: bool,
    ) -> StageChoice | None:
        """Return how several replicas compute a slice; None: their groups do not fit."""
        shares, seconds = best_shares(
            [float(self.seconds(slot)[0][index]) for slot in run],
            [float(self._update_seconds(slot, len(run), is_shared=is_shared)[index]) for slot in run],
            [int(self.memory.most_groups(slot, depth, len(run), is_shared=is_shared)[index]) for slot in run],
            self.memory.ends,
        )
        if not shares:
            return None
        reducing = float(self.reduction_bytes(len(run), is_shared=is_shared)[index]) / bandwidth
        seconds = max(seconds, reducing) if self.spec.train.delay else seconds + reducing
        return StageChoice(seconds=seconds, recompute=recompute, shares=shares, shares_update=is_shared)

    def _update_seconds(self, slot: DeviceSlot, num_replicas: int, *, is_shared: bool) -> Floats:
        return self.shared_update_seconds(slot, num_replicas) if is_shared else self.seconds(slot)[1]

    def can_share(self, run: Sequence[DeviceSlot]) -> bool:
        """Return whether devices may be replicas of one stage: equal arithmetic, a group for each, and all can talk."""
        if len(run) > 1 and not self._has_replicas:
            return False
        are_alike = all(one.arithmetic_class == other.arithmetic_class for one, other in pairwise(run))
        return len(run) <= self.num_groups and are_alike and self.links.siblings_talk(run)
