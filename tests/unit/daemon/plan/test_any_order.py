"""Of six to eight unlike devices a plan is found whenever some order of them has room, and it is the fastest one."""

import random
from dataclasses import replace
from functools import cache
from itertools import permutations
from math import inf

import pytest

from headway.daemon.cluster.measurements import Port
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.plan.connections import LinkAssumptions, Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.plan.paths import BlockedWay, BlockedWays
from headway.daemon.plan.planner import ClusterPlan, make_plan
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.search import WORTH_A_STAGE
from headway.daemon.plan.stage_costs import StageCosts
from headway.stages.schedule.stage_schedule import schedule_depth
from tests.rigs.brute_force import Instance, best_seconds, fits, worker_seconds
from tests.rigs.clusters import job, node, planned, refused

FREE = LinkAssumptions(site_bytes_per_s=1e15, site_round_trip_s=0.0)


def wide_job(
    num_blocks: int, *, microbatches: int, reduction_groups: int = 1, placement: PlacementSpec | None = None
) -> JobSpec:
    """A job whose first and last layers are larger than its blocks, as a large vocabulary makes them."""
    spec = job(num_blocks=num_blocks, placement=placement, sequence_length=32, recompute="block")
    train = replace(spec.train, microbatches=microbatches, reduction_groups=reduction_groups)
    return replace(spec, model=replace(spec.model, vocab_size=8192), train=train)


def rooms(spec: JobSpec) -> list[int]:
    """Bytes of each layer alone, with as many microbatches in flight as any stage may have."""
    costs = StageCosts(spec, [DeviceSlot.of(node("any"), 0)], Profiles(), Links(FREE, Profiles()))
    depth, groups = costs.memory.least_depth(costs.num_layers), range(spec.train.reduction_groups)
    return [
        costs.memory.device_bytes(costs.slices.slice_number((first, first + 1), "none"), depth, groups)
        for first in range(costs.num_layers)
    ]


def least_slowest(spec: JobSpec, nodes: tuple[NodeRecord, ...]) -> float:
    """Seconds of the slowest stage in the best of all pipelines, over all orders and numbers of stages, each of one
    device; inf if none has room.
    """
    instance, whole = Instance(spec, nodes, FREE), range(spec.train.reduction_groups)

    @cache
    def of_stage(number: int, first: int, end: int, num_stages: int) -> float:
        depth = schedule_depth(spec.train.schedule, spec.train.microbatches, num_stages, 0)
        has_room = fits(spec, nodes[number], first, end, whole, 1, depth)
        return worker_seconds(instance, nodes[number], first, end, whole) if has_room else inf

    @cache
    def before(end: int, used: frozenset[int]) -> float:
        if end == 0:
            return 0.0
        return min(
            (
                max(of_stage(number, first, end, len(used) + 1), before(first, used | {number}))
                for number in range(len(nodes))
                if number not in used
                for first in range(end)
            ),
            default=inf,
        )

    return before(len(spec.layers), frozenset())


def unlike_devices(seed: int) -> tuple[JobSpec, tuple[NodeRecord, ...]]:
    """A job, and six to eight devices of which about half have enough memory for it together."""
    chance = random.Random(seed)
    spec = wide_job(chance.randint(5, 9), microbatches=8)
    number = chance.randint(6, 8)
    fair = sum(rooms(spec)) / number
    return spec, tuple(
        node(f"n{index}", speed=chance.choice((1.0, 2.0, 5.0)), memory_bytes=int(fair * chance.uniform(0.3, 2.4)))
        for index in range(number)
    )


def test_a_plan_is_found_whenever_some_order_has_room() -> None:
    """Some clusters have no room in any order: found and refused rightly, and as fast as the best."""
    found = []
    for seed in range(12):
        spec, nodes = unlike_devices(seed)
        best = least_slowest(spec, nodes)
        plan = make_plan(spec, nodes, links=FREE)
        assert isinstance(plan, ClusterPlan) is (best < inf), f"seed {seed}: {plan}"
        found.append(best < inf)
        if isinstance(plan, ClusterPlan):
            assert plan.predicted_batch_seconds <= best * WORTH_A_STAGE * 1.011, f"seed {seed}"
    assert 3 <= sum(found) <= 10, "both cases occur"


def test_replicas_are_found_where_a_stage_alone_has_no_room() -> None:
    """Six devices of two classes, eight reduction groups: of all orders the brute force has the verdict."""
    found = []
    for seed in range(4):
        chance = random.Random(seed)
        spec = wide_job(2, microbatches=8, reduction_groups=8)
        whole = sum(cost.resident_bytes + 8 * cost.group_bytes for cost in layer_costs(spec))
        sizes = [int(whole * chance.uniform(0.05, 0.3)) for _ in range(2)]
        nodes = tuple(
            node(f"n{index}", memory_bytes=sizes[index % 2], arithmetic_class=f"c{index % 2}") for index in range(6)
        )
        orders = {
            tuple(each.arithmetic_class for each in order): order
            for length in range(1, 7)
            for order in permutations(nodes, length)
        }
        best = min(
            best_seconds(Instance(spec, order, FREE, is_in_turn=is_in_turn))
            for order in orders.values()
            for is_in_turn in (False, True)
        )
        assert isinstance(make_plan(spec, nodes, links=FREE), ClusterPlan) is (best < inf), f"seed {seed}"
        found.append(best < inf)
    assert 1 <= sum(found) <= 3, "both cases occur"


def test_as_many_nodes_as_the_job_demands() -> None:
    """Two large devices would do. With min_nodes = 6 the small ones get what they have room for."""
    spec = wide_job(6, microbatches=8, placement=PlacementSpec(min_nodes=6))
    ends, small = max(rooms(spec)), rooms(spec)[1]
    assert small < rooms(spec)[0]
    nodes = [node(f"s{index}", memory_bytes=small, speed=1.0 + index) for index in range(4)]
    plan = planned(spec, [*nodes, node("big-1", memory_bytes=20 * ends), node("big-2", memory_bytes=20 * ends)])
    assert {stage.node for stage in plan.workers} == {"s0", "s1", "s2", "s3", "big-1", "big-2"}
    assert {plan.workers[0].node, plan.workers[-1].node} == {"big-1", "big-2"}


def test_blocked_nodes_are_no_neighbours() -> None:
    """Where an order has room only with two neighbours that cannot talk, none is found; without the block, one is."""
    spec = wide_job(4, microbatches=8)
    room = rooms(spec)
    assert room[0] < room[-1], "only one node has room for the head"
    nodes = [node("first", memory_bytes=room[0], speed=2.0), node("last", memory_bytes=room[-1], speed=3.0)]
    nodes += [node(f"s{index}", memory_bytes=room[1], speed=1.0 + 0.1 * index) for index in range(4)]
    plan = planned(spec, nodes, links=FREE)
    assert (plan.workers[0].node, plan.workers[-1].node) == ("first", "last")
    ways = tuple(BlockedWay("last", f"s{index}", Port.WORKER, "host:1", "no answer") for index in range(4))
    assert "can talk" in refused(spec, nodes, links=FREE, blocked=BlockedWays(ways))


@pytest.mark.parametrize("num_kinds", [1, 3])
def test_of_many_devices_one_order_with_room_is_found(num_kinds: int) -> None:
    """Sixteen devices, of which the two slowest alone have room for the first and the last layer."""
    spec = wide_job(14, microbatches=16)
    block, ends = rooms(spec)[1], max(rooms(spec))
    assert rooms(spec)[0] > 1.2 * block
    blocks = [node(f"b{index}", memory_bytes=block, speed=4.0 + index % num_kinds) for index in range(14)]
    plan = planned(spec, [*blocks, *(node(f"e{index}", memory_bytes=ends) for index in range(2))])
    assert {plan.workers[0].node, plan.workers[-1].node} == {"e0", "e1"}


def test_a_worse_order_is_not_taken_for_its_room() -> None:
    """Memory is no limit: the pipeline is as fast as before, whatever order one more candidate brings."""
    spec, nodes = unlike_devices(3)
    roomy = tuple(replace(each, devices=(replace(each.devices[0], memory_bytes=0),)) for each in nodes)
    plan = planned(spec, roomy, links=FREE)
    assert plan.predicted_batch_seconds <= least_slowest(spec, roomy) * WORTH_A_STAGE * 1.011
