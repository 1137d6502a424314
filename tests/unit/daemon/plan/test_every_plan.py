"""The planner against all plans there are: any nodes in any order, replicas, cuts, shares and depths."""

import itertools
import random
from dataclasses import replace

import pytest

from headway.daemon.cluster.measurements import Port
from headway.daemon.plan.link_choice import linked_pairs
from headway.daemon.plan.paths import BlockedWay, BlockedWays
from headway.daemon.plan.planner import PlanRefused, make_plan
from tests.rigs.every_plan import EveryPlan
from tests.rigs.pipeline_cut import instance

SAME = 1e-9
NEARLY = 1.01
"""The search tries every order of so few nodes, and along each finds the cut with the fastest slowest stage, with
groups of microbatches that count as large as the largest."""
FAR_OFF = 1.25
"""What no plan exceeds, where groups are uneven, m is too small to hide the ways, or nodes cannot talk."""
MOST_FAR_OFF = 0.25
"""Part of the cases that may be beyond `NEARLY`: they have at most nine microbatches."""


def blocked_by_chance(seed: int, names: list[str]) -> BlockedWays:
    """About a third of all pairs, in either direction."""
    chance = random.Random(seed)
    ways = [
        BlockedWay(source, target, Port.WORKER, "host:7100", "the connection was refused")
        for source, target in (chance.sample(pair, 2) for pair in itertools.combinations(names, 2))
        if chance.random() < 0.35
    ]
    return BlockedWays(tuple(sorted(ways)))


def over_the_best(seed: int, *, is_blocked: bool = False) -> float:
    """Seconds of a batch over the best plan's, of up to 8 layers on up to 5 nodes; 1 where there rightly is none."""
    case, profiles = instance(seed)
    ways = blocked_by_chance(seed, [node.name for node in case.nodes]) if is_blocked else BlockedWays()
    pairs = frozenset(map(frozenset, ways.pairs))
    plan = make_plan(case.spec, case.nodes, links=case.links, profiles=profiles, blocked=ways)
    copies = min(len(case.nodes), 2)
    cases = [replace(case, num_copies=copies, is_in_turn=is_in_turn) for is_in_turn in (False, True)]
    if isinstance(plan, PlanRefused):
        assert not any(EveryPlan(each, profiles, blocked=pairs).is_possible() for each in cases), seed
        return 1.0
    assert linked_pairs(plan.workers, trains_tie=False).isdisjoint(ways.pairs), seed
    seconds = plan.predicted_batch_seconds
    best = [EveryPlan(each, profiles, seconds, blocked=pairs).best_by_size() for each in cases]
    return seconds / min(least for by_size in best for least in by_size.values())


def check(seeds: range, *, is_blocked: bool = False) -> None:
    """Nothing is faster, but for a worker that is not worth its place, and for a few hard cases."""
    factors = [over_the_best(seed, is_blocked=is_blocked) for seed in seeds]
    assert max(factors) <= FAR_OFF
    assert sum(factor > NEARLY for factor in factors) <= MOST_FAR_OFF * len(factors), factors


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.slow) for block in (2, 3))])
def test_nothing_is_faster_than_the_plan(block: int) -> None:
    """Ten of each: schedules, groups, memory, classes, sites, links and measurements by chance."""
    check(range(5000 + 10 * block, 5000 + 10 * (block + 1)))


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.slow) for block in (2, 3))])
def test_nothing_is_faster_where_some_nodes_cannot_talk(block: int) -> None:
    """Ten of each with blocked pairs: no two of them are neighbours, and a plan is found where there is one."""
    check(range(7000 + 10 * block, 7000 + 10 * (block + 1)), is_blocked=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_nothing_is_faster_of_many_where_some_cannot_talk(block: int) -> None:
    check(range(8000 + 20 * block, 8000 + 20 * (block + 1)), is_blocked=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_nothing_is_faster_than_any_of_many_plans(block: int) -> None:
    """The same 20 times 20."""
    check(range(20 * block, 20 * (block + 1)))
