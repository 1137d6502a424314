"""Predicts a batch's seconds under a job's plans, again only when something has changed that their nodes read. Pure.

A measured way between any two nodes is part of every plan's question, but few ways are between one plan's nodes.
"""

from collections.abc import Mapping, Sequence

from headway.daemon.costs.profiles import Profiles
from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.predicted_time import predict
from headway.daemon.records.records import NodeRecord, WorkerPart
from headway.daemon.situation.outlook import measured_ways
from headway.daemon.view.cluster_view import ClusterView


def relays_of(stages: Sequence[WorkerPart], nodes: Mapping[str, NodeRecord]) -> frozenset[str]:
    """Return the relays of a plan's nodes. What any other nodes measured through these is read too."""
    own = (nodes.get(stage.node) for stage in stages)
    return frozenset(node.relay for node in own if node is not None and node.relay)


def concerned(stages: Sequence[WorkerPart], nodes: Mapping[str, NodeRecord]) -> dict[str, NodeRecord]:
    """Return the nodes that a plan's prediction reads: its own, as far as they are there, and their relays."""
    own, relays = [nodes.get(stage.node) for stage in stages], relays_of(stages, nodes)
    hosts = [node for node in nodes.values() if node.address in relays] if relays else []
    return {node.name: node for node in (*own, *hosts) if node is not None}


def predicted(
    name: str,
    spec: JobSpec,
    stages: Sequence[WorkerPart],
    *,
    known: Mapping[str, NodeRecord],
    profiles: Profiles,
    view: ClusterView,
) -> float | None:
    """Return what `predict` would, from all nodes and measurements. name: of the plan, under which the view remembers
    it. known: the plan's `concerned` nodes.
    """
    relays = relays_of(stages, known)
    ways = view.derived.lasting(
        f"ways of {name}", (profiles.links, stages, *known.values()), lambda: measured_ways(view, known, relays)
    )
    return view.derived.of(
        f"prediction of {name}",
        (spec, stages, profiles.layers, ways, *known.values()),
        lambda: predict(spec, stages, known.values(), profiles=Profiles(profiles.layers, ways)),
    )
