"""What a decision about a job has read of things that change often and concern few jobs: ways, and plans. Pure.

Any measured way is part of each plan's question, but a job reads only the ways between nodes of its plans. So a
decision notes which ways it has read and which plans it has found. It still holds if all of them are the same now.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from headway.daemon.costs.profiles import Profiles, Ways
from headway.daemon.records.measurements import ProbeRecord
from headway.daemon.situation.outlook import all_ways
from headway.daemon.situation.plan_cache import LookUp, PlanRequest, Plans
from headway.daemon.view.cluster_view import ClusterView


@dataclass(frozen=True, slots=True)
class Reads:
    """What one decision about one job has read."""

    look_ups: tuple[LookUp, ...] = ()
    ways: tuple[tuple[str, ProbeRecord | None], ...] = ()
    """Nodes whose ways were read, with what they said of them."""
    all_ways: Ways = ()
    """The ways in the questions: nothing was read anew while they are the same object."""

    @classmethod
    def of(cls, look_ups: Iterable[LookUp], nodes: Iterable[str], view: ClusterView) -> "Reads":
        """Return the reads of a decision. nodes: those whose ways were read."""
        return cls(tuple(look_ups), tuple((name, view.probes.get(name)) for name in nodes), all_ways(view))

    def __bool__(self) -> bool:
        return bool(self.look_ups or self.ways)

    @property
    def missing(self) -> tuple[PlanRequest, ...]:
        """Return the plans that did not exist."""
        return tuple(each.request for each in self.look_ups if each.found is None)

    @property
    def stale(self) -> tuple[PlanRequest, ...]:
        """Return the plans that were used although measurements have changed since then."""
        return tuple(each.request for each in self.look_ups if each.found is not None and not each.found.is_current)

    def now(self, probes: Mapping[str, ProbeRecord], ways: Ways, plans: Plans) -> "Reads | None":
        """Return the reads with all present ways in the questions; None: a decision would read something else now.

        The caller knows that nothing but ways has changed. probes, ways: of all present nodes.
        """
        if self.all_ways is ways:
            return self
        if any(probes.get(name) is not record for name, record in self.ways):
            return None
        look_ups = []
        for each in self.look_ups:
            question = each.request.question
            profiles = Profiles(layers=question.profiles.layers, links=ways)
            request = replace(each.request, question=replace(question, profiles=profiles))
            if plans.find(request) != each.found:
                return None
            look_ups.append(LookUp(request, each.found))
        return Reads(tuple(look_ups), self.ways, ways)
