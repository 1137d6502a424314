"""What the links of a cut between two stages carry, and how long they take; those of a tied embedding too. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from headway.daemon.costs.connections import Links
from headway.daemon.costs.device_order import DeviceSlot
from headway.daemon.costs.layer_costs import element_bytes, evaluation_bytes, num_hidden, position_bytes, tied_bytes
from headway.daemon.jobs.job import JobSpec
from headway.stages.links.codec import Codec, codec_between, coded_bytes


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
        if self._links.differ_inside_sites:
            return inf
        sites = frozenset(slot.site for slot in order)
        if sites not in self._widest:
            ends = list({slot.site: slot for slot in order}.values())
            pairs = [(one, other) for one in ends for other in ends if one is not other]
            pairs += [(one, other) for one, other in pairwise(order) if one.site == other.site]
            self._widest[sites] = max((self.boundary_seconds([one], [other]) for one, other in pairs), default=0.0)
        return self._widest[sites]
