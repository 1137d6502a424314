"""The search along one order, and over all orders, finds what trying everything finds."""

from collections.abc import Sequence
from math import inf

import pytest

from headway.daemon.cluster.records import NodeRecord
from headway.daemon.plan.cluster_plan import PlanRefused
from headway.daemon.plan.connections import Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.planner import make_plan
from headway.daemon.plan.predicted_time import PredictedTime, place
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.search import WORTH_A_STAGE
from headway.daemon.plan.stage_costs import StageCosts
from tests.rigs.brute_force import Instance, best_seconds, orders
from tests.rigs.every_cut import PipelineCut
from tests.rigs.pipeline_cut import instance


@pytest.mark.parametrize("block", [*range(2), *(pytest.param(block, marks=pytest.mark.slow) for block in range(2, 10))])
def test_along_one_order_nothing_is_faster(block: int) -> None:
    """All cuts, all divisions into replicas, all shares of the groups: none beats the recurrence, and what it says it
    takes, its placement takes."""
    for seed in range(60 * block, 60 * (block + 1)):
        case, profiles = instance(seed, is_auto=seed % 3 == 0)
        slots = tuple(DeviceSlot.of(each, 0) for each in case.nodes)
        costs = StageCosts(case.spec, slots, profiles, Links(case.links, profiles))
        found = PipelineCut(costs, slots).best()
        expected = best_seconds(case)
        if found is None:
            assert expected == inf, seed
            continue
        assert found[0] == pytest.approx(expected, rel=1e-9), seed
        assert PredictedTime(costs, place(costs, found[1])).batch_seconds == pytest.approx(expected, rel=1e-9), seed
        assert tuple(slot for run in found[1].runs for slot in run) == slots


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 5))])
def test_over_all_orders_nothing_is_faster(block: int) -> None:
    """No set of nodes in any order has a faster stage by more than an unneeded worker is worth, nor, along any order,
    the best cut a faster batch once its distance is counted."""
    for seed in range(1000 + 12 * block, 1000 + 12 * (block + 1)):
        case, profiles = instance(seed, most_nodes=4)
        plan = make_plan(case.spec, case.nodes, links=case.links, profiles=profiles)
        all_orders = [order for length in range(1, len(case.nodes) + 1) for order in orders(case.nodes, length)]
        copies = min(len(case.nodes), 2)
        expected = min(
            best_seconds(Instance(case.spec, order, case.links, case.measured, copies, is_in_turn=is_in_turn))
            for order in all_orders
            for is_in_turn in (False, True)
        )
        if isinstance(plan, PlanRefused):
            assert expected == inf, seed
            continue
        assert expected * (1 - 1e-9) <= plan.distance.hidden_batch_s <= plan.predicted_batch_seconds, seed
        if plan.predicted_batch_seconds <= expected * WORTH_A_STAGE * (1 + 1e-9):
            continue
        with_distance = min(_seconds_with_distance(case, profiles, order) for order in all_orders)
        assert plan.predicted_batch_seconds <= with_distance * WORTH_A_STAGE * (1 + 1e-9), seed


def _seconds_with_distance(case: Instance, profiles: Profiles, order: Sequence[NodeRecord]) -> float:
    """A batch's, of the cut with the least stage time along an order."""
    slots = tuple(DeviceSlot.of(each, 0) for each in order)
    costs = StageCosts(case.spec, slots, profiles, Links(case.links, profiles))
    found = PipelineCut(costs, slots).best()
    if found is None:
        return inf
    times = PredictedTime(costs, place(costs, found[1]))
    return times.distance([times.depth(stage) for stage in range(len(found[1].runs))]).batch_s
