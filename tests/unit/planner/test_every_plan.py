"""The planner against all plans there are: any nodes in any order, replicas, cuts, shares and depths."""

import pytest

from headway.daemon.planning.planner import WORTH_A_STAGE, PlanRefused, make_plan
from tests.unit.planner.every_plan import EveryPlan
from tests.unit.planner.test_pipeline_cut import instance

SAME = 1e-9
WHERE_DISTANCE_COSTS = 1.02
"""The search finds the cut with the fastest slowest stage, exactly. What is waited for beyond that, because m is too
small to hide the ways through the pipe, it counts in what it finds, but does not search for."""


def check(seed: int) -> None:
    """Up to 8 layers on up to 5 nodes: nothing is faster, but for a worker that is not worth its place."""
    case, profiles = instance(seed)
    plan = make_plan(case.spec, case.nodes, links=case.links, profiles=profiles)
    if isinstance(plan, PlanRefused):
        assert not EveryPlan(case, profiles).is_possible(), seed
        return
    seconds = plan.predicted_batch_seconds
    best = EveryPlan(case, profiles, seconds * WORTH_A_STAGE).best_by_size()
    fastest = min(best.values())
    expected = min(size for size, taken in best.items() if taken <= fastest * WORTH_A_STAGE * (1 + SAME))
    assert plan.distance is not None
    if plan.distance.batch_s > plan.distance.hidden_batch_s * (1 + SAME):
        assert seconds <= best[expected] * WHERE_DISTANCE_COSTS, (seed, best)
        return
    assert seconds == pytest.approx(best[expected], rel=SAME), (seed, best)
    assert len(plan.stages) == expected, (seed, best)


@pytest.mark.parametrize("block", range(4))
def test_nothing_is_faster_than_the_plan(block: int) -> None:
    """Ten of each: schedules, groups, memory, classes, sites, links and measurements by chance."""
    for seed in range(5000 + 10 * block, 5000 + 10 * (block + 1)):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_nothing_is_faster_than_any_of_many_plans(block: int) -> None:
    """The same 20 times 20."""
    for seed in range(20 * block, 20 * (block + 1)):
        check(seed)
