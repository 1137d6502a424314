"""Lists the workers of a plan that have a link with each other. Pure."""

from collections.abc import Sequence

from headway.daemon.costs.blocked_ways import Pair, pair_of
from headway.daemon.records.records import StagePlan, replicas_of


def linked(stages: Sequence[StagePlan], position: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the positions of a worker's neighbours: of the stage before, of the stage after, and its siblings.

    Workers of neighbouring stages have a link if they share a reduction group; all replicas of a stage have one.
    """
    replicas = replicas_of(stages)
    stage = next(index for index, workers in enumerate(replicas) if position in workers)

    def of_stage(index: int) -> tuple[int, ...]:
        workers = replicas[index] if 0 <= index < len(replicas) else ()
        return tuple(other for other in workers if _share_a_group(stages[position], stages[other]))

    siblings = tuple(other for other in replicas[stage] if other != position)
    return of_stage(stage - 1), of_stage(stage + 1), siblings


def neighbours(stages: Sequence[StagePlan], position: int) -> tuple[int, ...]:
    """Return all workers that have a link with a worker, by position."""
    return tuple(sorted({other for found in linked(stages, position) for other in found}))


def linked_pairs(stages: Sequence[StagePlan]) -> frozenset[Pair]:
    """Return the pairs of nodes between which a plan has links."""
    return frozenset(
        pair_of(stages[position].node, stages[other].node)
        for position in range(len(stages))
        for other in neighbours(stages, position)
    )


def _share_a_group(one: StagePlan, other: StagePlan) -> bool:
    return not one.groups or not other.groups or not set(one.groups).isdisjoint(other.groups)
