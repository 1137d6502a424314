"""A running job moves to a better plan when that pays, and a flapping node does not thrash it."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.records import WorkerPart
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.plan.rebalance import (
    LONGEST_PROBATION_S,
    LONGEST_REST_S,
    WINDOW_S,
    MoveCost,
    Outlook,
    is_news,
    is_same,
    judge,
    moving_bytes,
    probation_s,
    rest_s,
)
from headway.stages.spec import ModelSpec, TrainSpec
from tests.rigs.scripted_hour import ScriptedHour

SPEC = JobSpec(
    job=JobSection(name="hour"),
    model=ModelSpec(num_hidden_layers=10, hidden_size=256, intermediate_size=688),
    train=TrainSpec(batches=1_000_000),
    fault=FaultSpec(snapshot_every=5),
)
HALF_AGAIN = Outlook(present_s=1.5, best_s=1.0, is_other=True, batches_left=100, cost=MoveCost(pause_s=10.0))
"""Saves 50 s for 10 s."""


def stage(node: str, *layers: str, groups: tuple[int, ...] = (), depth: int = 1) -> WorkerPart:
    return WorkerPart(
        node=node, node_incarnation=f"{node}-1", device_index=0, layers=layers, depth=depth, groups=groups
    )


def test_a_move_that_saves_more_than_it_costs_is_made() -> None:
    verdict = judge(HALF_AGAIN)
    assert verdict.is_worth_it
    assert verdict.reason == "saves 50 s, costs 10 s"


def test_the_plan_in_force_may_be_the_best() -> None:
    assert judge(replace(HALF_AGAIN, is_other=False)).reason == "the plan in force is the best there is"


def test_near_the_end_a_move_does_not_pay() -> None:
    verdict = judge(replace(HALF_AGAIN, batches_left=29))
    assert not verdict.is_worth_it
    assert (
        verdict.reason
        == "a plan predicted 1.5× faster would save 10 s over the remaining batches, and moving costs 10 s"
    )
    assert verdict.wait_s == 0, "time only brings the end nearer"


def test_bytes_cost_as_much_as_they_take() -> None:
    dear = MoveCost(num_bytes=10_000, bytes_per_s=250.0, pause_s=10.0)
    assert dear.seconds == 50.0
    assert not judge(replace(HALF_AGAIN, cost=dear)).is_worth_it


@pytest.mark.parametrize(
    ("present_s", "joins", "moves"),
    [(1.04, True, False), (1.06, True, True), (1.09, False, False), (1.11, False, True)],
)
def test_noise_is_no_gain(present_s: float, joins: bool, moves: bool) -> None:
    outlook = replace(HALF_AGAIN, present_s=present_s, batches_left=10_000, brings_workers=joins)
    assert judge(outlook).is_worth_it is moves


def test_cuts_in_a_row_take_more_and_more() -> None:
    """After two changes within a minute 1.25 is noise; when the older is a minute ago, it is a gain."""
    restless = replace(
        HALF_AGAIN, present_s=1.25, batches_left=10_000, cost=MoveCost(pause_s=1.0), since_changes=(30.0, 50.0)
    )
    verdict = judge(restless)
    assert not verdict.is_worth_it
    assert verdict.wait_s == 10.0
    assert judge(replace(restless, since_changes=(40.0, 60.5))).is_worth_it


def test_going_back_takes_a_clear_gain_until_the_change_is_forgotten() -> None:
    back = replace(HALF_AGAIN, present_s=1.12, batches_left=10_000, goes_back=True, since_changes=(100.0,))
    verdict = judge(back)
    assert not verdict.is_worth_it
    assert verdict.wait_s == WINDOW_S - 100.0
    assert judge(replace(back, since_changes=(100.0 + verdict.wait_s,))).is_worth_it
    assert judge(replace(back, present_s=1.2)).is_worth_it
    assert judge(replace(back, goes_back=False)).is_worth_it


def test_where_plans_do_not_last_a_move_must_pay_within_their_life() -> None:
    """Twenty changes in ten minutes: the next plan is expected to live for half a minute."""
    restless = replace(HALF_AGAIN, batches_left=10_000, since_changes=tuple(200.0 + 20 * at for at in range(20)))
    verdict = judge(restless)
    assert not verdict.is_worth_it
    assert "20 times recently" in verdict.reason
    assert verdict.wait_s == pytest.approx(WINDOW_S - 580.0)
    calmer = replace(restless, since_changes=restless.since_changes[:10])
    assert judge(calmer).is_worth_it


def test_after_a_change_comes_a_rest() -> None:
    just_now = replace(HALF_AGAIN, batches_left=10_000, since_changes=(3.0, 300.0))
    verdict = judge(just_now)
    assert not verdict.is_worth_it
    assert verdict.wait_s == pytest.approx(rest_s(10.0, 2) - 3.0)
    assert judge(replace(just_now, since_changes=(3.0 + verdict.wait_s, 300.0))).is_worth_it


def test_rest_and_probation_grow_within_bounds() -> None:
    rests = [rest_s(1.0, number) for number in range(200)]
    assert rests == sorted(rests)
    assert (rests[0], rests[-1]) == (2.0, LONGEST_REST_S)
    probations = [probation_s(number) for number in range(10)]
    assert probations == sorted(probations)
    assert (probations[1], probations[-1]) == (0.0, LONGEST_PROBATION_S)


def test_bytes_that_move_are_those_of_the_busiest_worker() -> None:
    costs = layer_costs(SPEC)
    of = {cost.name: cost.state_bytes for cost in costs}
    before = (stage("a", "embed", "block.0"), stage("b", "block.1", "block.2", "head"))
    assert moving_bytes(costs, before, before) == 0
    after = (stage("a", "embed"), stage("c", "block.0", "block.1"), stage("b", "block.2", "head"))
    assert moving_bytes(costs, before, after) == of["block.0"] + of["block.1"], "c loads two, a and b send one each"
    replicas = (stage("a", "embed", "block.0", groups=(0,)), stage("d", "embed", "block.0", groups=(1,)), before[1])
    assert moving_bytes(costs, before, replicas) == of["embed"] + of["block.0"]
    assert moving_bytes(costs, replicas, before) == 0


def test_plans_of_other_depths_are_the_same_and_of_other_groups_are_not() -> None:
    one = (stage("a", "embed"), stage("b", "head"))
    assert is_same(one, (stage("a", "embed", depth=3), stage("b", "head")))
    assert not is_same(one, (stage("a", "embed"), stage("c", "head")))
    assert not is_same(one, (stage("a", "embed"), stage("b", "head", groups=(0,))))


# --- A scripted hour ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_an_hour_of_joins_leaves_and_speed_changes(seed: int) -> None:
    """An event a minute, speeds measured late and with noise: nine tenths of free and instant moves."""
    outcome = ScriptedHour(SPEC, seed).run()
    assert len(outcome.events) > 40
    assert outcome.share >= 0.9
    assert outcome.most_moves_of_an_event() <= 2


@pytest.mark.parametrize(
    "flapping_s", [20.0, *(pytest.param(seconds, marks=pytest.mark.slow) for seconds in (8.0, 45.0))]
)
def test_a_flapping_node_does_not_thrash_the_job(flapping_s: float) -> None:
    """A node that comes and dies in turns soon has to prove itself: the job loses little against going without it."""
    hour = ScriptedHour(SPEC, 0, flapping_s=flapping_s)
    outcome = hour.run()
    assert len(outcome.moves) < 12, f"{len(outcome.moves)} moves at {len(outcome.events)} comings and goings"
    without = 3600 * hour.rate_of("n0", "n1")
    assert outcome.batches > 0.97 * without


def test_a_reason_is_told_again_when_it_says_something_else() -> None:
    """Between 40 and 50 seconds it would come and go with every measurement; other words, or half as much, are news."""
    reason = "a plan predicted 1.2× faster would save {} over the remaining batches, and moving costs 30 s"
    before = reason.format("40 s")
    assert not is_news(before, before)
    assert not is_news(before, reason.format("50 s"))
    assert is_news(before, reason.format("20 s"))
    assert is_news(before, reason.format("1e+03 s"))
    assert is_news(before, "")
    assert is_news("", before)
    assert is_news(before, before.replace("over the remaining batches", "until plans change again"))
