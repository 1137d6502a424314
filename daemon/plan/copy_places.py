"""Chooses the nodes that keep the second and further copies of a stage's layers. Pure: every caller gets one answer.

A copy should survive the failure that kills the original. So another host comes first, then a node that is no neighbour
of the stage (one failure often takes two neighbours), then the stage's site (copies are traffic). Load is spread.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain, islice

from headway.daemon.cluster.records import PROTOCOL_VERSION, NodeRecord, PlanRecord, WorkerPart
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.devices import natural
from headway.daemon.plan.paths import NOTHING_BLOCKED, BlockedWays


def may_hold(spec: JobSpec, node: NodeRecord) -> bool:
    """Return whether a node may keep state of a job."""
    return node.protocol == PROTOCOL_VERSION and (not spec.placement.sites or node.site in spec.placement.sites)


def num_copies(spec: JobSpec, nodes: Mapping[str, NodeRecord]) -> int:
    """Return how many nodes must hold a layer before its boundary is restorable: the job's number, if that
    many exist.
    """
    possible = (node for node in nodes.values() if may_hold(spec, node))
    return max(1, sum(1 for _ in islice(possible, spec.fault.copies)))


def possible_holders(spec: JobSpec, nodes: Mapping[str, NodeRecord]) -> tuple[NodeRecord, ...]:
    """Return the nodes that may keep state of a job, in natural order."""
    return tuple(node for name in sorted(nodes, key=natural) if may_hold(spec, node := nodes[name]))


def copy_places(
    spec: JobSpec,
    plan: PlanRecord,
    nodes: Mapping[str, NodeRecord],
    *,
    blocked: BlockedWays = NOTHING_BLOCKED,
) -> tuple[tuple[str, ...], ...]:
    """Return, for each stage, the nodes that keep its layers in addition to the lead's node.

    Draining nodes, and nodes that do not reach the lead's daemon, come last. Nodes on other machines with replicas of
    the stage come first: they already have the layers, and at most lack the journal. A stage whose lead's node is gone
    gets one more node, so that the remaining copy is copied before the next failure.
    """
    possible = possible_holders(spec, nodes)
    at = {node.name: index for index, node in enumerate(possible)}
    wanted = num_copies(spec, nodes)
    load: Counter[str] = Counter()
    places = []
    stages = [[plan.workers[position] for position in workers] for workers in plan.replicas]
    for index, workers in enumerate(stages):
        living = [node for worker in workers if (node := _node_of(worker, nodes)) is not None]
        own = _node_of(workers[0], nodes)
        siblings = {node.name for node in living if node is not own}
        neighbours = {other.node for stage in stages[max(index - 1, 0) : index + 2] for other in stage}
        holders = [own] if own is not None else []
        while len(holders) < wanted:
            taken = {node.name for node in holders}
            start = at.get(own.name, -1) + 1 if own is not None else 0
            candidates = partial(_others, possible, start, taken)
            if own is not None and blocked != NOTHING_BLOCKED:
                reach = [node for node in candidates() if not blocked.cannot_ask(node.name, own.name)]
                candidates = partial(iter, reach) if reach else candidates
            hosts = {node.host for node in holders}
            best = _best(candidates, own=own, siblings=siblings, hosts=hosts, neighbours=neighbours, load=load)
            if best is None:
                break
            holders.append(best)
        chosen = tuple(node.name for node in holders if node is not own)
        load.update(name for name in chosen if name not in siblings)
        places.append(chosen)
    return tuple(places)


def _others(possible: Sequence[NodeRecord], start: int, taken: Set[str]) -> Iterator[NodeRecord]:
    """Yield the nodes that are not taken, the next one after the stage's own first.

    So among equal nodes the copies of many jobs do not meet on one.
    """
    row = chain(islice(possible, start, None), islice(possible, start))
    return (node for node in row if node.name not in taken)


def _node_of(worker: WorkerPart, nodes: Mapping[str, NodeRecord]) -> NodeRecord | None:
    node = nodes.get(worker.node)
    return node if node is not None and node.incarnation == worker.node_incarnation else None


def _best(
    candidates: Callable[[], Iterator[NodeRecord]],
    *,
    own: NodeRecord | None,
    siblings: Set[str],
    hosts: Set[str],
    neighbours: Set[str],
    load: Mapping[str, int],
) -> NodeRecord | None:
    """Return the place of one more copy; None: there is none.

    candidates: yields them, of equal ones the first wins. hosts: the machines that have a copy already. load: copies of
    other stages by node.
    """

    def faults(node: NodeRecord) -> tuple[object, ...]:
        return (
            node.is_draining,
            node.host in hosts,
            node.name not in siblings,
            node.name in neighbours,
            own is not None and node.site != own.site,
            load[node.name],
        )

    # No key is smaller, so that in a large cluster the search ends after a few nodes.
    has_sibling = bool(siblings) and any(node.name in siblings for node in candidates())
    faultless = (False, False, not has_sibling, False, False, 0)
    found = next((node for node in candidates() if faults(node) == faultless), None)
    return found or min(candidates(), key=faults, default=None)
