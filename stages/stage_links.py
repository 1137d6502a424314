"""The links of one worker: to the neighbouring stages, by reduction group, and to its stage's other replicas."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.stages.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLinks:
    """A frame of microbatch i goes to the neighbour that holds group i mod G; several groups may share a link.

    Only the link of group 0 carries the norm: it joins the leading replicas of both stages.
    """

    upstream: Mapping[int, Link] = field(default_factory=dict)
    """By the reduction groups that this worker holds; empty on the first stage."""
    downstream: Mapping[int, Link] = field(default_factory=dict)
    """The same; empty on the last stage."""
    siblings: Mapping[int, Link] = field(default_factory=dict)
    """By position among the stage's replicas, without this one; empty when it has the stage to itself."""

    @property
    def upstream_lead(self) -> Link | None:
        """To the lead of the stage before, if both lead."""
        return self.upstream.get(0)

    @property
    def downstream_lead(self) -> Link | None:
        """To the lead of the stage after, if both lead."""
        return self.downstream.get(0)


def by_microbatch(links: Mapping[int, Link], *, num_microbatches: int, num_groups: int) -> tuple[Link | None, ...]:
    """The link of each microbatch of a batch; None where there is none, or the microbatch is another replica's."""
    return tuple(links.get(i % num_groups) for i in range(num_microbatches))
