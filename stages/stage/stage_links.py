"""The links of one worker: to the neighbouring stages, by reduction group, and to its stage's other replicas."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.stages.links.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLinks:
    """The links of a worker. A frame of microbatch i goes to the neighbour that holds group i mod G.

    Several groups may share a link. Only the link of group 0 carries the norm: it joins the leading replicas of both
    stages.
    """

    upstream: Mapping[int, Link] = field(default_factory=dict)
    """Links by the reduction groups that this worker holds; empty on the first stage."""
    downstream: Mapping[int, Link] = field(default_factory=dict)
    """Links by the reduction groups that this worker holds; empty on the last stage."""
    siblings: Mapping[int, Link] = field(default_factory=dict)
    """Links by position among the stage's replicas, without this one; empty when it is alone on its stage."""

    tied: Mapping[int, Link] = field(default_factory=dict)
    """Links to the other end of a tied embedding, by the reduction groups that this worker holds; empty elsewhere."""

    @property
    def upstream_lead(self) -> Link | None:
        """Return the link to the lead of the stage before, if both lead."""
        return self.upstream.get(0)

    @property
    def downstream_lead(self) -> Link | None:
        """Return the link to the lead of the stage after, if both lead."""
        return self.downstream.get(0)


def by_microbatch(links: Mapping[int, Link], *, num_microbatches: int, num_groups: int) -> tuple[Link | None, ...]:
    """Return the link of each microbatch of a batch; None if there is none, or another replica has the microbatch."""
    return tuple(links.get(i % num_groups) for i in range(num_microbatches))
