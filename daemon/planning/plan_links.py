"""Lists the workers of a plan that have a link with each other. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.daemon.costs.blocked_ways import Pair, pair_of
from headway.daemon.records.records import WorkerPart, replicas_of


@dataclass(frozen=True, slots=True)
class Linked:
    """The positions of all workers that have a link with a worker."""

    upstream: tuple[int, ...]
    """Of the stage before, those that share a reduction group."""
    downstream: tuple[int, ...]
    """Of the stage after, likewise."""
    siblings: tuple[int, ...]
    """All other replicas of its stage."""
    tied: tuple[int, ...]
    """At the other end of a tied embedding, those that share a group; empty if the ends are neighbours or one stage."""


def linked(stages: Sequence[WorkerPart], position: int, *, trains_tie: bool) -> Linked:
    """Return the links of a worker. trains_tie: whether the first and the last stage train one matrix."""
    return _linked(stages, replicas_of(stages), position, trains_tie=trains_tie)


def _linked(
    stages: Sequence[WorkerPart], replicas: Sequence[Sequence[int]], position: int, *, trains_tie: bool
) -> Linked:
    stage = next(index for index, workers in enumerate(replicas) if position in workers)

    def of_stage(index: int) -> tuple[int, ...]:
        workers = replicas[index] if 0 <= index < len(replicas) else ()
        return tuple(other for other in workers if _share_a_group(stages[position], stages[other]))

    siblings = tuple(other for other in replicas[stage] if other != position)
    last = len(replicas) - 1
    has_far_end = trains_tie and last > 1 and stage in (0, last)
    tied = of_stage(last - stage) if has_far_end else ()
    return Linked(of_stage(stage - 1), of_stage(stage + 1), siblings, tied)


def neighbours(stages: Sequence[WorkerPart], position: int, *, trains_tie: bool) -> tuple[int, ...]:
    """Return all workers that have a link with a worker, by position."""
    return _neighbours(linked(stages, position, trains_tie=trains_tie))


def _neighbours(found: Linked) -> tuple[int, ...]:
    return tuple(sorted({*found.upstream, *found.downstream, *found.siblings, *found.tied}))


def linked_nodes(stages: Sequence[WorkerPart], *, trains_tie: bool) -> Iterator[tuple[str, str]]:
    """Yield the nodes of each link of a plan, the one that dials first."""
    replicas = replicas_of(stages)
    for position in range(len(stages)):
        for other in _neighbours(_linked(stages, replicas, position, trains_tie=trains_tie)):
            if position < other:
                yield stages[position].node, stages[other].node


def linked_pairs(stages: Sequence[WorkerPart], *, trains_tie: bool) -> frozenset[Pair]:
    """Return the pairs of nodes between which a plan has links."""
    return frozenset(pair_of(*nodes) for nodes in linked_nodes(stages, trains_tie=trains_tie))


def _share_a_group(one: WorkerPart, other: WorkerPart) -> bool:
    return not one.groups or not other.groups or not set(one.groups).isdisjoint(other.groups)
