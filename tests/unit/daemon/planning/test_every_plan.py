"""The planner against all plans there are: any nodes in any order, replicas, cuts, shares and depths."""

import itertools
import random

import pytest

from headway.daemon.costs.link_choice import linked_pairs
from headway.daemon.costs.paths import BlockedWay, BlockedWays
from headway.daemon.planning.planner import WORTH_A_STAGE, PlanRefused, make_plan
from headway.daemon.records.measurements import Port
from tests.unit.daemon.planning.every_plan import EveryPlan
from tests.unit.daemon.planning.test_pipeline_cut import instance

SAME = 1e-9
WHERE_DISTANCE_COSTS = 1.02
"""The search finds the cut with the fastest slowest stage, exactly. What is waited for beyond that, because m is too
small to hide the ways through the pipe, it counts in what it finds, but does not search for."""


def blocked_by_chance(seed: int, names: list[str]) -> BlockedWays:
    """About a third of all pairs, in either direction."""
    chance = random.Random(seed)
    ways = [
        BlockedWay(source, target, Port.WORKER, "host:7100", "the connection was refused")
        for source, target in (chance.sample(pair, 2) for pair in itertools.combinations(names, 2))
        if chance.random() < 0.35
    ]
    return BlockedWays(tuple(sorted(ways)))


def check(seed: int, *, is_blocked: bool = False) -> None:
    """Up to 8 layers on up to 5 nodes: nothing is faster, but for a worker that is not worth its place."""
    case, profiles = instance(seed)
    ways = blocked_by_chance(seed, [node.name for node in case.nodes]) if is_blocked else BlockedWays()
    pairs = frozenset(map(frozenset, ways.pairs))
    plan = make_plan(case.spec, case.nodes, links=case.links, profiles=profiles, blocked=ways)
    if isinstance(plan, PlanRefused):
        assert not EveryPlan(case, profiles, blocked=pairs).is_possible(), seed
        return
    assert linked_pairs(plan.workers, trains_tie=False).isdisjoint(ways.pairs), seed
    seconds = plan.predicted_batch_seconds
    best = EveryPlan(case, profiles, seconds * WORTH_A_STAGE, blocked=pairs).best_by_size()
    fastest = min(best.values())
    expected = min(size for size, taken in best.items() if taken <= fastest * WORTH_A_STAGE * (1 + SAME))
    assert plan.distance is not None
    if plan.distance.batch_s > plan.distance.hidden_batch_s * (1 + SAME):
        assert seconds <= best[expected] * WHERE_DISTANCE_COSTS, (seed, best)
        return
    assert seconds == pytest.approx(best[expected], rel=SAME), (seed, best)
    assert len(plan.workers) == expected, (seed, best)


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.slow) for block in (2, 3))])
def test_nothing_is_faster_than_the_plan(block: int) -> None:
    """Ten of each: schedules, groups, memory, classes, sites, links and measurements by chance."""
    for seed in range(5000 + 10 * block, 5000 + 10 * (block + 1)):
        check(seed)


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.slow) for block in (2, 3))])
def test_nothing_is_faster_where_some_nodes_cannot_talk(block: int) -> None:
    """Ten of each with blocked pairs: no two of them are neighbours, and a plan is found where there is one."""
    for seed in range(7000 + 10 * block, 7000 + 10 * (block + 1)):
        check(seed, is_blocked=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_nothing_is_faster_of_many_where_some_cannot_talk(block: int) -> None:
    for seed in range(8000 + 20 * block, 8000 + 20 * (block + 1)):
        check(seed, is_blocked=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_nothing_is_faster_than_any_of_many_plans(block: int) -> None:
    """The same 20 times 20."""
    for seed in range(20 * block, 20 * (block + 1)):
        check(seed)
