"""Computes what distance costs a pipeline, and how many microbatches in flight hide it. Pure.

A microbatch that leaves stage s is back, as a gradient, after

    way(s) = Σ stages from s on: forward and backward
           + Σ links from s on: round trip + 2 × frame bytes / bandwidth + 2 × lateness

Lateness is for lines that lose packets: later frames wait until a lost packet is sent again, a round trip later, and
meanwhile the sender holds back about a frame. Both the activation and its gradient may wait. If that happens often,
the way to hide includes both waits.

A stage that may have D in flight therefore begins at most D microbatches in way(s). With delay 1 the first microbatch
of a batch also waits for the update of the batch before the last, whose last microbatch is under way for way(0): two
batches take at least one batch of work and way(0). Both vanish behind computation while D and m are at least
way(s) / (seconds between two microbatches).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

SEGMENT_BYTES: Final = 1448
"""Payload of a packet of 1500 bytes."""
OFTEN: Final = 0.05
"""A link counts as late if more than this share of its frames waits for a lost packet."""
ROUNDING: Final = 1e-3
"""Microbatches: a smaller remainder puts no further microbatch in flight."""
FAR: Final = 0.1
"""Links are mentioned if frames are under way for more than this part of the seconds between two microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """A pipeline's ways, and their effect on its batches."""

    stage_seconds: tuple[float, ...]
    """Seconds of forward and backward of one microbatch on each stage: the mean over its workers' shares."""
    link_seconds: tuple[float, ...]
    """Seconds of each link between stages for one microbatch: its activation there and its gradient back."""
    lateness_s: float = 0.0
    """Delay of a frame beyond round trip and bandwidth, over all links one way."""
    pace_s: float
    """Seconds between two microbatches: on the slowest stage, or on the slowest link."""
    hidden_batch_s: float
    """Seconds of a batch if distance cost nothing."""
    num_microbatches: int
    delay: int
    depths: tuple[int, ...]
    """Maximum number of microbatches in flight on each stage, over all its workers."""
    is_cut_short: bool = False
    """True if memory allows less depth than the ways need."""

    @property
    def on_links_s(self) -> float:
        """Return the seconds that one microbatch spends on all links, both ways."""
        return sum(self.link_seconds)

    @property
    def on_links(self) -> float:
        """Return one microbatch's time on all links, in microbatches."""
        return self.on_links_s / self.pace_s

    @property
    def is_far(self) -> bool:
        """Return whether frames are under way for a considerable time."""
        return self.on_links > FAR

    @property
    def least_microbatches(self) -> int:
        """Return the m that hides all ways under 2bw."""
        return microbatches_on_the_way(self.stage_seconds, self.link_seconds, self.pace_s)

    @property
    def is_hidden(self) -> bool:
        """Return whether a batch takes no longer than it would on one site."""
        return bool(self.delay) and self.num_microbatches >= self.least_microbatches and not self.is_cut_short

    @property
    def batch_s(self) -> float:
        """Return a batch's seconds with these depths and this m."""
        seconds = self.hidden_batch_s
        for stage, depth in enumerate(self.depths):
            seconds = max(seconds, self.num_microbatches * self._way_s(stage) / depth)
        return max(seconds, (self.hidden_batch_s + self._way_s(0)) / 2) if self.delay else seconds

    def sentences(self, schedule: str) -> tuple[str, ...]:
        """Return sentences for people; none if no link is long."""
        if not self.is_far:
            return ()
        away = (
            f"Distance: a microbatch is on the links for {_milliseconds(self.on_links_s)} there and back, "
            f"{self.on_links:.3g} microbatches' time"
        )
        if self.lateness_s:
            away += f" (packets are lost, and frames arrive up to {_milliseconds(self.lateness_s)} late)"
        least, m = self.least_microbatches, self.num_microbatches
        if not self.delay:
            return (f"{away}: {schedule} waits for it in every batch, 2bw would not with m ≥ {least}.",)
        took, would = f"{self.batch_s:.3g} s", f"{self.hidden_batch_s:.3g} s"
        cost = "but no batch would be shorter" if took == would else f"{took} a batch instead of {would}"
        if m < least:
            return (f"{away}: m = {m} is too small to hide it, {cost}; m ≥ {least} would.",)
        if self.is_cut_short:
            return (f"{away}: memory allows depth {self.depths[0]}, and {least} would hide it, {cost}.",)
        return (f"{away}: hidden, m = {m}, and {least} would suffice.",)

    def _way_s(self, stage: int) -> float:
        return sum(self.stage_seconds[stage:]) + sum(self.link_seconds[stage:])


def lateness_s(*, loss: float, round_trip_s: float, frame_bytes: float, pace_s: float) -> float:
    """Return the additional delay of a link's frames where packets are lost; 0 if losses are rare.

    loss: share of the packets. A frame waits for each of its own lost packets. It also waits for earlier lost packets
    that are not resent yet: those sent within the last round trip. Each wait takes a round trip, or more if the resent
    packet is lost too. While TCP repairs, it sends no more than arrives, so the frame before this one may still be at
    the sender.
    """
    num_before = frame_bytes * (1 + round_trip_s / pace_s) / SEGMENT_BYTES
    return round_trip_s + pace_s if 1 - (1 - loss) ** num_before > OFTEN else 0.0


def microbatches_on_the_way(stage_seconds: Sequence[float], link_seconds: Sequence[float], pace_s: float) -> int:
    """Return how many microbatches a stage must have in flight so that no stage waits for long, and this one never.

    stage_seconds: of this stage and of each later one; link_seconds: of the links between them. This stage counts as
    one microbatch: its replicas may each have one more than their share. A later stage that is faster than the slowest
    counts as one too, because its microbatches come at the slowest one's pace.

    """
    of_later_stages = sum(max(1.0, seconds / pace_s) for seconds in stage_seconds[1:])
    return ceil(1 + of_later_stages + sum(link_seconds) / pace_s - ROUNDING)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
