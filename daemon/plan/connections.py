"""The links between workers, as a plan sees them: measured, or assumed; and what a job's cuts carry over them. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Final

from headway.daemon.cluster.measurements import LinkProbe
from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import element_bytes, evaluation_bytes, num_hidden, position_bytes, tied_bytes
from headway.daemon.plan.paths import NO_RELAYS, Pair, RelayedWays, pair_of
from headway.daemon.plan.profiles import Profiles
from headway.stages.links.codec import Codec, codec_between, coded_bytes

LEGS: Final = 2
"""Number of ways of which a relayed one consists. Until these or the whole are measured, its round trip counts as that
many times a far one's, and its bandwidth as that many times less: a relay takes each byte, and sends it.
"""


MACHINE_ROUND_TRIP_S: Final = 1e-4
"""Between two processes of one machine."""
MEMORY_BYTES_PER_S: Final = 2e9
"""Of a link inside a machine that goes through its memory: one process copies, the other reads."""
PCIE_BYTES_PER_S: Final = 10e9
"""Of a link by NCCL between two cards: about half of PCIe 4.0, which a copy through the host leaves."""
NVLINK_BYTES_PER_S: Final = 100e9
"""The same over NVLink, each way: less than half of what its generations since the A100 carry."""
_HAS_NVLINK: Final = re.compile(r"(SXM|HBM3|H[18]00|H200|H20\b|B[23]00)(?!.*(PCIe|NVL|MIG))")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAssumptions:
    """The assumed speed of a link until it is measured. Links inside a machine are never measured."""

    site_round_trip_s: float = 1e-3
    far_round_trip_s: float = 40e-3
    site_bytes_per_s: float = 1e9
    far_bytes_per_s: float = 12.5e6

    def round_trip_s(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the round trip between two devices."""
        if one.machine == other.machine:
            return min(self.site_round_trip_s, MACHINE_ROUND_TRIP_S)
        return self.site_round_trip_s if one.site == other.site else self.far_round_trip_s

    def bytes_per_s(self, one: DeviceSlot, other: DeviceSlot, *, by_grpc: bool = False) -> float:
        """Return the bandwidth between two devices, each way. by_grpc: cards send through their host's memory."""
        if one.machine == other.machine:
            return max(self.site_bytes_per_s, _machine_bytes_per_s(one.device, other.device, by_grpc=by_grpc))
        return self.site_bytes_per_s if one.site == other.site else self.far_bytes_per_s


def _machine_bytes_per_s(one: Device, other: Device, *, by_grpc: bool) -> float:
    """Return the bandwidth between two devices of one machine, each way."""
    if by_grpc or (one.kind, other.kind) != ("cuda", "cuda") or max(one.num_sharers, other.num_sharers) > 1:
        return MEMORY_BYTES_PER_S
    has_nvlink = _HAS_NVLINK.search(one.model) and _HAS_NVLINK.search(other.model)
    return NVLINK_BYTES_PER_S if has_nvlink else PCIE_BYTES_PER_S


class Links:
    """The round trips and bandwidths between a job's devices."""

    def __init__(
        self,
        assumptions: LinkAssumptions,
        profiles: Profiles,
        blocked: frozenset[Pair] = frozenset(),
        *,
        relayed: RelayedWays = NO_RELAYS,
        by_grpc: bool = False,
    ) -> None:
        """blocked: pairs of nodes that cannot talk. relayed: which ways lead through relays. by_grpc: whether the job
        wants no collective links.
        """
        self._by_grpc = by_grpc
        self._relayed = relayed
        self._has_relays = bool(relayed)
        self._blocked = blocked
        self._assumptions = assumptions
        self._lines = _rates_through_relays(profiles)
        self._num_through: Mapping[str, int] = {}
        self._speeds: dict[tuple[str, str], LinkProbe | None] = {}
        """Speed of each way that was asked for, where some need a relay: a search asks for each of them often."""
        # After a change of relays, a measurement tells nothing of the way that links take now.
        self._profiles = profiles.over(relayed.between) if self._has_relays or self._lines else profiles
        self._is_assumed = not self._profiles.links
        self._has_loss = any(speed.loss for _, speed in self._profiles.links)

    def shared_by(self, pairs: Iterable[tuple[str, str]]) -> "Links":
        """Return the links where all of these are there at once: those through one relay share its line.

        pairs: the nodes of each link, the earlier one in the plan first.
        """
        if not self._has_relays:
            return self
        found = copy(self)
        found._num_through = Counter(relay for pair in pairs if (relay := self._relayed.between(*pair)))
        return found

    def differ_inside_sites(self, order: Sequence[DeviceSlot]) -> bool:
        """Return whether links of a site may differ: one is measured, needs a relay, or is inside a machine."""
        return self._has_relays or not self._is_assumed or len({slot.machine for slot in order}) < len(order)

    @property
    def has_blocked(self) -> bool:
        """Return whether any two devices cannot talk."""
        return bool(self._blocked)

    def can_talk(self, one: DeviceSlot, other: DeviceSlot) -> bool:
        """Return whether two devices may be neighbours."""
        return not self._blocked or pair_of(one.node, other.node) not in self._blocked

    def all_talk(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> bool:
        """Return whether every worker of one stage can talk to every worker of the next."""
        return not self._blocked or all(self.can_talk(upper, lower) for upper in uppers for lower in lowers)

    def siblings_talk(self, run: Sequence[DeviceSlot]) -> bool:
        """Return whether devices next to each other can be the replicas of one stage."""
        return not self._blocked or all(self.all_talk([slot], run[index + 1 :]) for index, slot in enumerate(run))

    def is_measured(self, one: DeviceSlot, other: DeviceSlot) -> bool:
        """Return whether the link between two devices' nodes has been measured, or each leg of it.

        one: the earlier one in the plan.
        """
        return self._speed(one.node, other.node) is not None

    @property
    def has_relays(self) -> bool:
        """Return whether some links lead through relays."""
        return self._has_relays

    def via(self, one: DeviceSlot, other: DeviceSlot) -> str:
        """Return the relay between two devices; empty: their link is direct. one: the earlier one in the plan."""
        return self._relayed.via(one.node, other.node) if self._has_relays else ""

    def num_relayed(self, stages: Sequence[Sequence[DeviceSlot]], *, is_tied: bool) -> int:
        """Return how many links between the workers of these stages lead through relays."""
        if not self._has_relays:
            return 0
        return self._relayed.num_relayed([[slot.node for slot in stage] for stage in stages], is_tied=is_tied)

    def with_fewer_relays(self, order: tuple[DeviceSlot, ...]) -> tuple[DeviceSlot, ...] | None:
        """Return a similar order of devices in which fewer neighbours need a relay; None: none is found."""
        if not self._has_relays:
            return None
        places = self._relayed.arranged([slot.node for slot in order])
        found = tuple(order[place] for place in places)
        before, after = (self.num_relayed([[slot] for slot in each], is_tied=False) for each in (order, found))
        return found if after < before else None

    def round_trip_s(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the round trip between two devices. one: the earlier one in the plan."""
        speed = self._speed(one.node, other.node)
        if speed is not None:
            return speed.round_trip_s
        assumed_s = self._assumptions.round_trip_s(one, other)
        return LEGS * max(assumed_s, self._assumptions.far_round_trip_s) if self.via(one, other) else assumed_s

    def bytes_per_s(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the bandwidth between two devices, each way. one: the earlier one in the plan.

        A relay's line is as fast as the fastest way that was measured through it: n links have 1/n of that each.
        """
        speed = self._speed(one.node, other.node)
        own = (
            speed.bytes_per_s if speed is not None else self._assumptions.bytes_per_s(one, other, by_grpc=self._by_grpc)
        )
        relay = self._relayed.between(one.node, other.node) if self._has_relays else ""
        if not relay:
            return own
        if speed is None:
            own = min(own, self._assumptions.far_bytes_per_s) / LEGS
        return min(own, max(own, self._lines.get(relay, 0.0)) / max(1, self._num_through.get(relay, 0)))

    def loss(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the share of packets that are lost between two devices; 0 until it is measured."""
        speed = self._speed(one.node, other.node) if self._has_loss else None
        return 0.0 if speed is None else speed.loss

    def _speed(self, dialling: str, dialled: str) -> LinkProbe | None:
        """Return the speed of the way that a link goes: as measured, or as its legs were; None: it has to be
        assumed.
        """
        if self._is_assumed or not self._has_relays:
            return self._measured(dialling, dialled)
        way = dialling, dialled
        if way not in self._speeds:
            self._speeds[way] = self._measured(*way) or self._over_legs(*way)
        return self._speeds[way]

    def _over_legs(self, dialling: str, dialled: str) -> LinkProbe | None:
        """Return the speed of a relayed way by its two ways to the relay and from there; None: one is not measured."""
        legs = [self._measured(*leg) for leg in self._relayed.legs(dialling, dialled)]
        speeds = [leg for leg in legs if leg is not None]
        if not speeds or len(speeds) < len(legs):
            return None
        return LinkProbe(
            round_trip_s=sum(leg.round_trip_s for leg in speeds),
            bytes_per_s=min(leg.bytes_per_s for leg in speeds),
            loss=max(leg.loss for leg in speeds),
        )

    def _measured(self, dialling: str, dialled: str) -> LinkProbe | None:
        """Return the measurement of the way that a link goes; None: there is none.

        A node measures the way that it dials, and the bytes that come to it. So the other one's measurement tells
        nothing of the round trip if it goes through another relay, or none. Yet it is the only one of the bytes that
        go there, and home lines are slower in one direction: the worse bandwidth counts.
        """
        if self._is_assumed:
            return None
        found = self._profiles.link(dialling, dialled)
        if found is None or not self._has_relays:
            return found
        if self._relayed.between(dialling, dialled) == self._relayed.between(dialled, dialling):
            return found
        own = self._profiles.by_link.get((dialling, dialled))
        return None if own is None else replace(found, round_trip_s=own.round_trip_s)

    def slowest_bytes_per_s(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> float:
        """Return the lowest bandwidth of the links between the workers of one stage and those of the next."""
        return min(self.bytes_per_s(upper, lower) for upper in uppers for lower in lowers)

    def longest_round_trip_s(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> float:
        """Return the longest round trip of the links between the workers of one stage and those of the next."""
        return max(self.round_trip_s(upper, lower) for upper in uppers for lower in lowers)

    def worst_loss(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> float:
        """Return the worst loss of the links between the workers of one stage and those of the next."""
        if not self._has_loss:
            return 0.0
        return max(self.loss(upper, lower) for upper in uppers for lower in lowers)

    def slowest_sibling_bytes_per_s(self, replicas: Sequence[DeviceSlot]) -> float:
        """Return the lowest bandwidth of the links between the replicas of a stage, at least two."""
        return min(
            self.bytes_per_s(one, other) for index, one in enumerate(replicas) for other in replicas[index + 1 :]
        )


def _rates_through_relays(profiles: Profiles) -> dict[str, float]:
    """Return the most bytes a second that were measured through each relay."""
    found: dict[str, float] = {}
    for _, speed in profiles.links:
        if speed.via:
            found[speed.via] = max(found.get(speed.via, 0.0), speed.bytes_per_s)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEstimate:
    """The link from a worker of one stage to a worker of the next that shares microbatches with it."""

    upper: str
    """Node of the earlier worker; `node:device` if the plan has several of its devices."""
    lower: str
    num_microbatches: int
    """Microbatches of a batch in the groups that both workers hold."""
    bytes_per_microbatch: int
    """Coded bytes each way."""
    batch_seconds: float
    """Seconds to carry one batch; computation hides them while they are less than the slowest stage's."""
    round_trip_s: float
    lateness_s: float = 0.0
    """Additional delay of frames where packets are lost."""
    is_measured: bool = False
    via: str = ""
    """Relay through which it leads; empty: one node dials the other."""
    codec: str = "none"
    """Codec of the hidden states on the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionEstimate:
    """The exchange between the replicas of a stage at the end of a batch."""

    stage_index: int
    num_replicas: int
    bytes_per_worker: float
    """Average bytes each way: sums to the slices' owners, reduced slices back."""
    batch_seconds: float
    is_hidden: bool
    """True if the reduction runs while the next batch computes, and ends before that batch does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieEstimate:
    """The exchange between the first and the last stage of a tied embedding at the end of a batch."""

    first: str
    """Node of the first stage's leading worker."""
    last: str
    num_bytes: int
    """Bytes each way, of all reduction groups."""
    batch_seconds: float
    is_hidden: bool
    """True if it runs while the next batch computes, and ends before that batch does."""


class CutCosts:
    """The costs of a job's cuts over some links."""

    def __init__(self, spec: JobSpec, links: Links) -> None:
        self._spec = spec
        self._links = links
        self.tied_bytes = tied_bytes(spec)
        """Bytes of a group's sum of the tied matrix, which the first and the last stage exchange; 0: there is none."""
        train = spec.train
        self._far_codec = codec_between(train, is_between_sites=True)
        self._near_codec = codec_between(train, is_between_sites=False)
        self._carried_bytes = {
            codec: coded_bytes(codec, num_hidden(spec), element_bytes(train)) + position_bytes(train)
            for codec in (self._far_codec, self._near_codec)
        }
        self._evaluation_bytes = evaluation_bytes(spec)
        self._widest: dict[frozenset[str], float] = {}

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
        return self._carried_bytes[self.codec(uppers, lowers)]

    def downward_bytes(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> float:
        """Return the bytes that the cut's links carry down per microbatch and evaluation: the mean of all batches."""
        return self.carried_bytes(uppers, lowers) + self._evaluation_bytes

    def boundary_seconds(self, uppers: Sequence[DeviceSlot], lowers: Sequence[DeviceSlot]) -> float:
        """Return the seconds to carry a batch to the next stage: the mean share of the side with fewer workers, slowest
        link.
        """
        carried = self._spec.train.microbatches * self.downward_bytes(uppers, lowers) / min(len(uppers), len(lowers))
        return carried / self._links.slowest_bytes_per_s(uppers, lowers)

    def tie_seconds(self, firsts: Sequence[DeviceSlot], lasts: Sequence[DeviceSlot]) -> float:
        """Return the seconds in which the first and the last stage exchange a batch's sums of a tied embedding.

        That is the mean share of the side with fewer workers, on the slowest link.
        """
        if not self.tied_bytes:
            return 0.0
        carried = self._spec.train.reduction_groups * self.tied_bytes / min(len(firsts), len(lasts))
        return carried / self._links.slowest_bytes_per_s(firsts, lasts)

    def can_tie(self, firsts: Sequence[DeviceSlot], lasts: Sequence[DeviceSlot]) -> bool:
        """Return whether these devices may hold the first and the last stage: with a tied embedding they have links."""
        return not self.tied_bytes or self._links.all_talk(firsts, lasts)

    def widest_boundary_s(self, order: Sequence[DeviceSlot]) -> float:
        """Return a batch's seconds on the slowest link between any two of these seats; inf where each link is
        its own.
        """
        if self._links.differ_inside_sites(order):
            return inf
        sites = frozenset(slot.site for slot in order)
        if sites not in self._widest:
            ends = list({slot.site: slot for slot in order}.values())
            pairs = [(one, other) for one in ends for other in ends if one is not other]
            pairs += [(one, other) for one, other in pairwise(order) if one.site == other.site]
            self._widest[sites] = max((self.boundary_seconds([one], [other]) for one, other in pairs), default=0.0)
        return self._widest[sites]
