"""The search along one order, and over all orders, finds what trying everything finds."""

import random
from collections.abc import Sequence
from math import inf
from typing import Literal

import pytest

from headway.daemon.costs.connections import LinkAssumptions, Links
from headway.daemon.costs.devices import DeviceSlot
from headway.daemon.costs.layer_costs import layer_costs
from headway.daemon.costs.profiles import Profiles
from headway.daemon.costs.stage_costs import StageCosts
from headway.daemon.jobs.job import FaultSpec, PlacementSpec
from headway.daemon.planning.cluster_plan import PlanRefused
from headway.daemon.planning.planner import make_plan
from headway.daemon.planning.predicted_time import PredictedTime, place
from headway.daemon.planning.search import WORTH_A_STAGE
from headway.daemon.records.measurements import LayerTime
from headway.daemon.records.records import NodeRecord
from headway.stages.spec import timed_kind
from tests.fakes.every_cut import PipelineCut
from tests.unit.daemon.planning.brute_force import Instance, best_seconds, orders
from tests.unit.daemon.planning.clusters import job, node

SHARE_UPDATES: tuple[Literal["auto", "always", "never"], ...] = ("auto", "never", "always", "auto", "auto")


def instance(seed: int, *, most_nodes: int = 5, is_auto: bool = False) -> tuple[Instance, Profiles]:
    """At most 8 layers and 5 nodes; schedules, groups, memory, classes, sites, links and measurements by chance.

    is_auto: without measurements, and what is computed again is the planner's choice.
    """
    chance = random.Random(seed)
    num_microbatches = chance.randint(1, 9)
    spec = job(
        num_blocks=chance.randint(1, 6),
        microbatches=num_microbatches,
        reduction_groups=chance.randint(1, min(5, num_microbatches)),
        schedule=chance.choice(("2bw", "2bw", "1f1b", "gpipe")),
        recompute="auto" if is_auto else chance.choice(("none", "none", "block")),
        fault=FaultSpec(snapshot_every=chance.choice((0, 20))),
        placement=PlacementSpec(share_updates=SHARE_UPDATES[seed % len(SHARE_UPDATES)]),
    )
    costs = layer_costs(spec)
    whole = sum(cost.resident_bytes + cost.group_bytes + 2 * cost.activation_bytes for cost in costs)
    kept = 6 * sum(cost.state_bytes for cost in costs)
    limits = chance.random() < 0.4
    nodes = tuple(
        node(
            f"n{index}",
            speed=chance.choice((0.5, 1.0, 1.0, 2.0, chance.uniform(0.3, 3.0))),
            site=chance.choice("xxy"),
            arithmetic_class=chance.choice(("one", "one", "one", "two")),
            memory_bytes=chance.choice((0, int(whole * chance.uniform(0.1, 1.2)))) if limits else 0,
            host_bytes=chance.choice((0, 0, int(kept * chance.uniform(0.2, 1.0)))) if limits else 0,
        )
        for index in range(chance.randint(1, most_nodes))
    )
    links = chance.choice(
        (LinkAssumptions(), LinkAssumptions(site_bytes_per_s=2e7, far_bytes_per_s=4e6, far_round_trip_s=0.3))
    )
    measured: dict[tuple[str, str], tuple[float, float]] = {}
    if not is_auto and chance.random() < 0.3:
        measured = {
            (each.name, kind): (chance.uniform(0.005, 0.1), chance.uniform(0.001, 0.1))
            for each in nodes
            for kind in ("embed", "block", "head")
        }
    profiles = Profiles.of(
        {
            (each.name, 0): {
                timed_kind(kind, spec.train.recompute): LayerTime(
                    forward_s=seconds[0] / 4, backward_s=seconds[0] * 3 / 4, update_s=seconds[1]
                )
                for (name, kind), seconds in measured.items()
                if name == each.name
            }
            for each in nodes
            if measured
        }
    )
    return Instance(spec, nodes, links, measured), profiles


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
        expected = min(best_seconds(Instance(case.spec, order, case.links, case.measured)) for order in all_orders)
        if isinstance(plan, PlanRefused):
            assert expected == inf, seed
            continue
        assert plan.distance is not None
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
