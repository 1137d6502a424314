"""Which nodes keep the second and further copies of a stage's layers. Pure, and the same wherever it is asked.

A copy should survive what kills the original: another host comes first, then a node that is no neighbour of the stage
(one failure often takes two neighbours), then the own site (copies are traffic). Load is spread.
"""

from collections import Counter
from collections.abc import Mapping

from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.device_order import natural
from headway.daemon.records import PROTOCOL_VERSION, NodeRecord, PlanRecord


def may_hold(spec: JobSpec, node: NodeRecord) -> bool:
    """Whether a node may keep state of a job."""
    return node.protocol == PROTOCOL_VERSION and (not spec.placement.sites or node.site in spec.placement.sites)


def num_copies(spec: JobSpec, nodes: Mapping[str, NodeRecord]) -> int:
    """How many nodes must hold a layer before its boundary is restorable: as many as the job wants, if there are."""
    return max(1, min(spec.fault.copies, sum(may_hold(spec, node) for node in nodes.values())))


def copy_places(spec: JobSpec, plan: PlanRecord, nodes: Mapping[str, NodeRecord]) -> tuple[tuple[str, ...], ...]:
    """Per stage, the nodes beside its own that keep its layers; draining ones only where there is nobody else.

    A stage whose own node is gone has one more: what is left of it is copied again before the next failure.
    """
    wanted = num_copies(spec, nodes)
    load: Counter[str] = Counter()
    places = []
    for index, stage in enumerate(plan.stages):
        own = nodes.get(stage.node)
        if own is not None and own.incarnation != stage.node_incarnation:
            own = None
        neighbours = {other.node for other in plan.stages[max(index - 1, 0) : index + 2]}
        candidates = [node for node in nodes.values() if node is not own and may_hold(spec, node)]

        def rank(
            node: NodeRecord, own: NodeRecord | None = own, neighbours: set[str] = neighbours
        ) -> tuple[bool, bool, bool, bool, int, tuple[str | int, ...]]:
            return (
                node.is_draining,
                own is not None and node.host == own.host,
                node.name in neighbours,
                own is not None and node.site != own.site,
                load[node.name],
                natural(node.name),
            )

        chosen = tuple(node.name for node in sorted(candidates, key=rank)[: wanted - (own is not None)])
        load.update(chosen)
        places.append(chosen)
    return tuple(places)
