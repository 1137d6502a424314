"""Predicts a batch's seconds under a job's plans, again only when something has changed that their nodes read. Pure.

A measured way between any two nodes is part of every plan's question, but few ways are between one plan's nodes.
"""

from collections.abc import Mapping, Sequence

from headway.daemon.costs.profiles import Profiles
from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.predicted_time import predict
from headway.daemon.records.records import NodeRecord, StagePlan
from headway.daemon.situation.outlook import measured_ways
from headway.daemon.view.cluster_view import ClusterView


def predicted(
    name: str,
    spec: JobSpec,
    stages: Sequence[StagePlan],
    *,
    nodes: Mapping[str, NodeRecord],
    profiles: Profiles,
    view: ClusterView,
) -> float | None:
    """Return what `predict` would, from all nodes and measurements. name: of the plan, under which the view remembers
    it.
    """
    own = [nodes.get(stage.node) for stage in stages]
    relays = frozenset(node.relay for node in own if node is not None and node.relay)
    hosts = [node for node in nodes.values() if node.address in relays] if relays else []
    known = {node.name: node for node in (*own, *hosts) if node is not None}
    ways = view.derived.lasting(
        f"ways of {name}", (profiles.links, stages, *known.values()), lambda: measured_ways(view, known, relays)
    )
    return view.derived.of(
        f"prediction of {name}",
        (spec, stages, profiles.layers, ways, *known.values()),
        lambda: predict(spec, stages, known.values(), profiles=Profiles(profiles.layers, ways)),
    )
