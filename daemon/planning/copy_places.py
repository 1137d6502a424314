"""Which nodes keep the second and further copies of a stage's layers. Pure, and the same wherever it is asked.

A copy should survive what kills the original: another host comes first, then a node that is no neighbour of the stage
(one failure often takes two neighbours), then the own site (copies are traffic). Load is spread.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

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
        holders = [own] if own is not None else []
        while candidates and len(holders) < wanted:
            hosts = {node.host for node in holders}
            best = _best(candidates, own=own, hosts=hosts, neighbours=neighbours, load=load)
            candidates.remove(best)
            holders.append(best)
        chosen = tuple(node.name for node in holders if node is not own)
        load.update(chosen)
        places.append(chosen)
    return tuple(places)


def _best(
    candidates: Sequence[NodeRecord],
    *,
    own: NodeRecord | None,
    hosts: Set[str],
    neighbours: Set[str],
    load: Mapping[str, int],
) -> NodeRecord:
    """Where one more copy goes. hosts: the machines that have one; load: copies of other stages by node."""
    return min(
        candidates,
        key=lambda node: (
            node.is_draining,
            node.host in hosts,
            node.name in neighbours,
            own is not None and node.site != own.site,
            load[node.name],
            natural(node.name),
        ),
    )
