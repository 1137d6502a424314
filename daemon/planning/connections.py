"""The links between stages, as a plan sees them: assumed until they are measured. Pure."""

from dataclasses import dataclass

from headway.daemon.planning.device_order import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAssumptions:
    """What a link is taken to be until it is measured."""

    site_round_trip_s: float = 1e-3
    far_round_trip_s: float = 40e-3
    site_bytes_per_s: float = 1e9
    far_bytes_per_s: float = 12.5e6

    def round_trip_s(self, one: Seat, other: Seat) -> float:
        """There and back between two devices."""
        return self.site_round_trip_s if one.site == other.site else self.far_round_trip_s

    def bytes_per_s(self, one: Seat, other: Seat) -> float:
        """Each way between two devices."""
        return self.site_bytes_per_s if one.site == other.site else self.far_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEstimate:
    """The link from one stage to the next."""

    upper: str
    lower: str
    bytes_per_microbatch: int
    """Each way."""
    batch_seconds: float
    """To carry one batch; hidden behind computation while it is less than the slowest stage's."""
    round_trip_s: float
