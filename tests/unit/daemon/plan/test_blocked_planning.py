"""Plans where some nodes cannot talk: of many nodes, of several devices, and what is said where no order works."""

import pytest

from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.plan.link_choice import linked_pairs
from headway.daemon.plan.plan_question import ask, still_answers
from headway.daemon.plan.planner import ClusterPlan, PlanRefused, answer, make_plan
from tests.rigs.blocked_planning import names, ways
from tests.rigs.clusters import job, node


def test_of_three_nodes_the_one_in_the_middle_talks_to_both() -> None:
    plan = make_plan(job(num_blocks=4, placement=PlacementSpec(min_nodes=3)), names(3), blocked=ways(("n0", "n1")))
    assert isinstance(plan, ClusterPlan)
    assert [stage.node for stage in plan.workers][1] == "n2"


@pytest.mark.parametrize("number", [7, 12, 30])
def test_of_many_nodes_the_one_that_nobody_reaches_is_left_out(number: int) -> None:
    blocked = ways(*((f"n{index}", "n3") for index in range(number) if index != 3))
    plan = make_plan(job(num_blocks=2 * number, microbatches=2 * number), names(number), blocked=blocked)
    assert isinstance(plan, ClusterPlan)
    assert "n3" not in {stage.node for stage in plan.workers}
    assert len(plan.workers) > number // 2


@pytest.mark.parametrize(
    ("number", "groups"),
    [(7, 1), (12, 1), (30, 1), (7, 4), (30, 4), pytest.param(12, 4, marks=pytest.mark.slow)],
)
def test_of_many_nodes_no_neighbours_are_on_a_blocked_pair(number: int, groups: int) -> None:
    blocked = ways(*((f"n{index}", f"n{index + 1}") for index in range(0, number - 1, 3)))
    spec = job(num_blocks=number, microbatches=2 * number, reduction_groups=groups)
    plan = make_plan(spec, names(number), blocked=blocked)
    assert isinstance(plan, ClusterPlan)
    assert linked_pairs(plan.workers, trains_tie=False).isdisjoint(blocked.pairs)
    assert len(plan.workers) > number // 2


def test_where_no_order_works_the_reason_names_the_ways_and_what_to_do() -> None:
    plan = make_plan(job(placement=PlacementSpec(min_nodes=2)), names(2), blocked=ways(("n1", "n0")))
    assert isinstance(plan, PlanRefused)
    assert not plan.is_final
    assert "n1 cannot reach the worker port of n0 at n0:7100 (the connection was refused)" in plan.reason
    assert "min_nodes = 2" in plan.reason
    assert "docs/deployment.md" in plan.reason


def test_without_need_for_both_one_of_two_nodes_goes_on_alone() -> None:
    plan = make_plan(job(), names(2), blocked=ways(("n1", "n0")))
    assert isinstance(plan, ClusterPlan)
    assert len(plan.workers) == 1


def test_what_does_not_fit_anyway_is_not_blamed_on_blocked_ways() -> None:
    plan = make_plan(
        job(num_blocks=8), [node("n0", memory_bytes=1), node("n1", memory_bytes=1)], blocked=ways(("n1", "n0"))
    )
    assert isinstance(plan, PlanRefused)
    assert "cannot reach" not in plan.reason


def test_a_way_that_becomes_blocked_makes_a_plan_across_it_no_answer() -> None:
    """A plan for the question of before, on devices that are all free: not if its neighbours cannot talk now."""
    spec = job(num_blocks=4, placement=PlacementSpec(min_nodes=3))
    before = ask(spec, names(3))
    plan = answer(before)
    assert isinstance(plan, ClusterPlan)
    first, second, third = (stage.node for stage in plan.workers)
    assert not still_answers(plan, before, ask(spec, names(3), blocked=ways((first, second))))
    assert still_answers(plan, before, ask(spec, names(3), blocked=ways((first, third))))
