"""The links between workers, as a plan sees them: measured links, and assumptions for the rest. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.daemon.costs.blocked_ways import Pair, pair_of
from headway.daemon.costs.device_order import DeviceSlot
from headway.daemon.costs.profiles import Profiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAssumptions:
    """The assumed speed of a link until it is measured."""

    site_round_trip_s: float = 1e-3
    far_round_trip_s: float = 40e-3
    site_bytes_per_s: float = 1e9
    far_bytes_per_s: float = 12.5e6

    @property
    def slowest_bytes_per_s(self) -> float:
        """Return the lowest bandwidth that any link may have."""
        return min(self.site_bytes_per_s, self.far_bytes_per_s)

    def round_trip_s(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the round trip between two devices."""
        return self.site_round_trip_s if one.site == other.site else self.far_round_trip_s

    def bytes_per_s(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the bandwidth between two devices, each way."""
        return self.site_bytes_per_s if one.site == other.site else self.far_bytes_per_s


class Links:
    """The round trips and bandwidths between a job's devices."""

    def __init__(
        self, assumptions: LinkAssumptions, profiles: Profiles, blocked: frozenset[Pair] = frozenset()
    ) -> None:
        """blocked: pairs of nodes that cannot talk."""
        self._blocked = blocked
        self._assumptions = assumptions
        self._profiles = profiles
        self._is_assumed = not profiles.links
        self._has_loss = any(speed.loss for _, speed in profiles.links)

    @property
    def has_measured(self) -> bool:
        """Return whether any link is measured. Then links inside a site may differ."""
        return not self._is_assumed

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
        """Return whether the link between two devices' nodes has been measured."""
        return not self._is_assumed and self._profiles.link(one.node, other.node) is not None

    def round_trip_s(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the round trip between two devices."""
        speed = None if self._is_assumed else self._profiles.link(one.node, other.node)
        return self._assumptions.round_trip_s(one, other) if speed is None else speed.round_trip_s

    def bytes_per_s(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the bandwidth between two devices, each way."""
        speed = None if self._is_assumed else self._profiles.link(one.node, other.node)
        return self._assumptions.bytes_per_s(one, other) if speed is None else speed.bytes_per_s

    def loss(self, one: DeviceSlot, other: DeviceSlot) -> float:
        """Return the share of packets that are lost between two devices; 0 until it is measured."""
        speed = self._profiles.link(one.node, other.node) if self._has_loss else None
        return 0.0 if speed is None else speed.loss

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEstimate:
    """The link from a worker of one stage to a worker of the next that shares microbatches with it."""

    upper: str
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
