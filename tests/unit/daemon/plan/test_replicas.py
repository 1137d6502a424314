"""Replicas in plans: shares by speed, whole groups, one class of arithmetic, and what people are told of them."""

import itertools
import random
from dataclasses import replace
from math import inf
from typing import Any, Literal

import pytest

from headway.daemon.client.plan_simulation import forecast
from headway.daemon.cluster.records import replicas_of
from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.plan.cluster_plan import StageEstimate
from headway.daemon.plan.connections import LinkAssumptions, Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.plan.planner import ClusterPlan
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.replica_shares import best_shares, group_ends, interleaved
from headway.daemon.plan.stage_costs import StageCosts
from headway.optim.spec import OptimSpec
from headway.stages.schedule.stage_schedule import replica_depth
from tests.rigs.brute_force import backward_moment
from tests.rigs.clusters import job, node, planned, refused


def replicated(shape: tuple[int, ...], *, speeds: tuple[float, ...], **train: object) -> ClusterPlan:
    """A plan of a wanted shape on nodes of these speeds."""
    spec = job(num_blocks=4, placement=PlacementSpec(replicas=shape), **train)  # type: ignore[arg-type]
    return planned(spec, [node(f"n{index}", speed=speed) for index, speed in enumerate(speeds)])


@pytest.mark.parametrize(("m", "num_groups", "sizes"), [(8, 2, (4, 4)), (8, 3, (3, 3, 2)), (5, 5, (1,) * 5)])
def test_groups_have_their_microbatches(m: int, num_groups: int, sizes: tuple[int, ...]) -> None:
    """Microbatch i is in group i mod G."""
    ends = group_ends(m, num_groups)
    assert tuple(end - first for first, end in itertools.pairwise(ends.tolist())) == sizes
    assert sizes == tuple(sum(i % num_groups == group for i in range(m)) for group in range(num_groups))


def test_shares_follow_the_speeds() -> None:
    """A card of twice the speed beside two others has half of the groups."""
    ends = group_ends(16, 8)
    assert best_shares([0.5, 1.0, 1.0], [0.0, 0.0, 0.0], [8, 8, 8], ends) == ((4, 2, 2), 4.0)


def test_memory_limits_a_share() -> None:
    """The fast one has room for one group only; where the others have none left, nothing fits."""
    ends = group_ends(8, 4)
    assert best_shares([0.1, 1.0], [0.0, 0.0], [1, 4], ends)[0] == (1, 3)
    assert best_shares([0.1, 1.0], [0.0, 0.0], [1, 2], ends) == ((), inf)


def test_a_reserve_limits_a_device_of_as_much_memory() -> None:
    """Two cards of one size, one with more in reserve: a stage that fits on the first does not fit on the other."""
    spec = job(num_blocks=4)
    roomy = node("a", memory_bytes=1 << 30)
    tight = replace(roomy, devices=(replace(roomy.devices[0], reserve_bytes=(1 << 30) - 1024),))
    slots = [DeviceSlot.of(each, 0) for each in (roomy, tight)]
    costs = StageCosts(spec, slots, Profiles(), Links(LinkAssumptions(), Profiles(), frozenset()))
    assert [costs.stage((slot,), (0, costs.num_layers), 1) is not None for slot in slots] == [True, False]


def test_a_plan_says_which_groups_each_replica_has() -> None:
    """Together all, none twice, dealt out in turn from the first; a stage of one worker names none."""
    plan = replicated((2, 1, 3), speeds=(1.0,) * 6, reduction_groups=4, microbatches=8)
    assert [len(positions) for positions in replicas_of(plan.workers)] == [2, 1, 3]
    for positions in replicas_of(plan.workers):
        held = [plan.workers[position].groups for position in positions]
        if len(held) == 1:
            assert held == [()]
        else:
            assert sorted(itertools.chain(*held)) == [0, 1, 2, 3]
            assert held[0][0] == 0
            assert held == sorted(held)
    assert [estimate.stage_index for estimate in plan.estimates] == [0, 0, 1, 2, 2, 2]
    assert sum(estimate.share for estimate in plan.estimates) == pytest.approx(3)


@pytest.mark.parametrize(
    ("shares", "num_microbatches", "held"),
    [
        ((4,), 8, [(0, 1, 2, 3)]),
        ((2, 2), 8, [(0, 2), (1, 3)]),
        ((3, 1), 8, [(0, 2, 3), (1,)]),
        ((1, 6, 1), 16, [(0,), (1, 3, 4, 5, 6, 7), (2,)]),
        # The first two have a microbatch more: as many of those as if they followed one another.
        ((3, 1), 10, [(0, 1, 2), (3,)]),
        ((1, 3), 10, [(0,), (1, 2, 3)]),
        ((2, 4), 9, [(0, 2), (1, 3, 4, 5)]),
    ],
)
def test_groups_are_dealt_out_in_turn(
    shares: tuple[int, ...], num_microbatches: int, held: list[tuple[int, ...]]
) -> None:
    """Each replica has as many groups as its share, with as many microbatches, and the turns come evenly."""
    assert list(interleaved(shares, num_microbatches)) == held


def test_a_fast_card_alone_beside_two_slow_ones() -> None:
    """One model that two stages would cut badly: three layers, one of them most of the work."""
    spec = job(num_blocks=1, microbatches=16, reduction_groups=8)
    plan = planned(spec, [node("fast", speed=2.0), node("s1"), node("s2")])
    groups = {stage.node: len(stage.groups) for stage in plan.workers}
    assert groups == {"fast": 4, "s1": 2, "s2": 2}


def test_replicas_are_of_one_arithmetic() -> None:
    """Two classes on one stage would not make the same update: each stage is of one class, or there is one worker."""
    spec = job(num_blocks=1, microbatches=16, reduction_groups=8)
    nodes = [node("a"), node("b", arithmetic_class="two"), node("c"), node("d", arithmetic_class="two")]
    plan = planned(spec, nodes)
    classes = {each.name: each.arithmetic_class for each in nodes}
    for positions in replicas_of(plan.workers):
        assert len({classes[plan.workers[position].node] for position in positions}) == 1
    wanted = job(num_blocks=1, microbatches=16, reduction_groups=8, placement=PlacementSpec(replicas=(2,)))
    assert refused(wanted, [node("a"), node("b", arithmetic_class="two")])


def test_unlike_cards_of_one_node_are_no_replicas() -> None:
    """The class belongs to the device: two models in one machine share no stage, wherever the plan puts them."""
    classes = ("one", "two", "one", "two")
    unlike = node("a", device_classes=classes)
    plan = planned(job(num_blocks=1, microbatches=16, reduction_groups=8), [unlike])
    assert max(map(len, replicas_of(plan.workers))) > 1
    for positions in replicas_of(plan.workers):
        assert len({classes[plan.workers[position].device_index] for position in positions}) == 1
    wanted = job(num_blocks=1, microbatches=16, reduction_groups=8, placement=PlacementSpec(replicas=(2,)))
    assert refused(wanted, [node("a", device_classes=("one", "two"))])
    assert planned(wanted, [unlike]).is_exact


def test_never_more_replicas_than_groups() -> None:
    """Two groups: two replicas at most, however many nodes there are."""
    plan = planned(job(num_blocks=1, microbatches=4, reduction_groups=2), [node(f"n{index}") for index in range(7)])
    assert max(map(len, replicas_of(plan.workers))) <= 2


def test_a_shape_that_a_job_wants_is_kept_or_waited_for() -> None:
    """2-1-2 on five nodes; with four the reason says what is missing."""
    plan = replicated((2, 1, 2), speeds=(1.0, 2.0, 1.0, 1.0, 1.0), reduction_groups=2)
    assert [len(positions) for positions in replicas_of(plan.workers)] == [2, 1, 2]
    spec = job(num_blocks=4, placement=PlacementSpec(replicas=(2, 1, 2)), reduction_groups=2)
    reason = refused(spec, [node(f"n{index}") for index in range(4)])
    assert reason == "waits for 1 more free device: replicas = [2, 1, 2] asks for 5 workers, 4 free"


def test_a_shape_holds_among_many_nodes() -> None:
    """Twenty nodes of different speeds, five wanted: five fast ones."""
    spec = job(num_blocks=4, placement=PlacementSpec(replicas=(2, 1, 2)), reduction_groups=2)
    plan = planned(spec, [node(f"n{index}", speed=1 + index / 10) for index in range(20)])
    assert [len(positions) for positions in replicas_of(plan.workers)] == [2, 1, 2]
    assert min(int(stage.node[1:]) for stage in plan.workers) >= 15


def test_a_slow_node_that_would_hurt_is_a_spare() -> None:
    """A hundredth of the others' speed: even one group, or the embedding, would take it too long."""
    spec = job(num_blocks=1, microbatches=16, reduction_groups=4)
    plan = planned(spec, [node("a"), node("b"), node("slow", speed=0.001)])
    assert plan.spares == ("slow",)
    assert "Spare: slow." in plan.explanation()


def test_the_depth_of_a_replica_goes_with_its_share() -> None:
    """Half of a depth of 8, and one more; never more than the stage's."""
    assert [replica_depth(8, num_held=held, num_microbatches=16) for held in (4, 8, 16)] == [3, 5, 8]
    assert replica_depth(1, num_held=1, num_microbatches=4) == 1
    plan = replicated((2, 1), speeds=(1.0, 1.0, 1.0), reduction_groups=2, schedule="gpipe")
    assert [stage.depth for stage in plan.workers] == [5, 5, 8]


def test_the_depth_of_a_replica_counts_its_microbatches() -> None:
    """Five microbatches in four groups: the first two groups are three of them, not half."""
    plan = replicated((2,), speeds=(1.0, 1.0), reduction_groups=4, microbatches=5, schedule="gpipe")
    assert [stage.groups for stage in plan.workers] == [(0, 1), (2, 3)]
    assert [stage.depth for stage in plan.workers] == [4, 3]


def test_gradient_sums_are_counted_by_groups_held() -> None:
    """Four groups on one worker are two gradient sets, as one group comes after another. Shared by two, each sums two,
    and has half of the last batch's two on their way to the other, half of the next batch's two from it, and its half
    of the mean. Without delay it has what the other has sent early; at the batch's end, nothing in flight, its sums are
    there twice beside a row."""
    spec = job(num_blocks=4, microbatches=8, reduction_groups=4)
    alone = planned(spec, [node("a")]).estimates[0]
    shared = replicated((2,), speeds=(1.0, 1.0), reduction_groups=4, microbatches=8).estimates[0]
    parameters = sum(cost.num_parameters for cost in layer_costs(spec))
    sets = 2 + 0.5 * (2 + 2 + 1)

    def exchanged(worker: StageEstimate) -> int:
        """What replicas send each other where they share the update."""
        return worker.stage.shares_update * sum(cost.shared_bytes for cost in layer_costs(spec))

    more = shared.device_bytes - alone.device_bytes - exchanged(shared)
    assert more == pytest.approx((sets - 2) * 4 * parameters, rel=1e-6)
    settings = {"reduction_groups": 4, "microbatches": 8, "schedule": "1f1b"}
    alone = planned(job(num_blocks=4, **settings), [node("a")]).estimates[0]  # type: ignore[arg-type]
    shared = replicated((2,), speeds=(1.0, 1.0), **settings).estimates[0]
    costs = StageCosts(spec, [DeviceSlot.of(node("a"), 0)], Profiles(), Links(LinkAssumptions(), Profiles()))
    received = exchanged(shared)
    assert alone.device_bytes < shared.device_bytes - received
    more = shared.device_bytes - alone.device_bytes - received
    assert more == pytest.approx((2 + 0.5 * 2 - 2) * 4 * parameters, rel=1e-6)
    ending, backward = 2 * 2 + 1 + 2 * 0.5 * 2, 2 + 0.5 * (2 + 2 + 1)
    fewer = 4 * parameters + sum(cost.activation_bytes for cost in layer_costs(spec))
    least = max(4 * parameters * (ending - backward) - fewer, 0)
    assert costs.memory.reduction_excess(2, 2, 1)[costs.slices.slice_of[0, costs.num_layers]] <= least


def test_a_reduction_that_does_not_hide_counts() -> None:
    """Over a link of 1 MB/s the sums take longer than a batch: the plan is as slow as that, or has no replicas."""
    slow = LinkAssumptions(site_bytes_per_s=1e6)
    spec = job(num_blocks=4, placement=PlacementSpec(replicas=(2,)), reduction_groups=2)
    plan = planned(spec, [node("a"), node("b")], links=slow)
    [reduction] = plan.reductions
    assert not reduction.is_hidden or reduction.batch_seconds <= plan.predicted_batch_seconds
    assert plan.predicted_batch_seconds == pytest.approx(reduction.batch_seconds)
    assert "The reduction between the replicas of stage 0 sets the pace" in plan.explanation()[0]
    free = job(num_blocks=4, reduction_groups=2)
    assert all(not stage.groups for stage in planned(free, [node("a"), node("b")], links=slow).workers)


def test_a_reduction_without_delay_counts_fully() -> None:
    """1f1b waits for it at the end of every batch."""
    plans = [replicated((2,), speeds=(1.0, 1.0), reduction_groups=2, schedule=name) for name in ("1f1b", "2bw")]
    [flushing], [delayed] = (plan.reductions for plan in plans)
    assert (flushing.is_hidden, delayed.is_hidden) == (False, True)
    computing = [max(estimate.batch_seconds for estimate in plan.estimates) for plan in plans]
    assert plans[0].predicted_batch_seconds == pytest.approx(computing[0] + flushing.batch_seconds)
    assert plans[1].predicted_batch_seconds == pytest.approx(computing[1])


def test_recomputing_a_block_costs_a_forward_and_saves_memory() -> None:
    """Four forwards' worth instead of three; activations shrink to the block's input."""
    kept, again = (layer_costs(job(recompute=name))[1] for name in ("none", "block"))
    assert (kept.forward_flops + kept.backward_flops) * 4 == (again.forward_flops + again.backward_flops) * 3
    assert again.activation_bytes < kept.activation_bytes / 10
    slow, fast = (planned(job(recompute=name), [node("a")]).predicted_batch_seconds for name in ("block", "none"))
    assert 1.2 < slow / fast < 4 / 3


def test_one_block_that_is_computed_again_is_counted_whole() -> None:
    """However many blocks: nothing is saved at one microbatch in flight and one block, and only the inputs of more."""
    kept, again = (layer_costs(job(recompute=name))[1] for name in ("none", "block"))
    assert again.activation_bytes + again.passing_bytes == kept.activation_bytes
    for number in (1, 5):
        spec = job(num_blocks=number, recompute="block")
        costs = layer_costs(spec)
        needed = sum(cost.resident_bytes + cost.group_bytes - cost.backward_bytes for cost in costs)
        assert planned(spec, [node("a")]).estimates[0].device_bytes == needed + backward_moment(costs)


def test_explanation_tells_of_replicas_links_and_reduction() -> None:
    """Who shares what, what each link carries, and what the replicas tell one another."""
    plan = replicated((2, 1), speeds=(1.0, 1.0, 1.0), reduction_groups=4, microbatches=8)
    text = "\n".join(plan.explanation())
    assert "Stage 0 on n0 (replica 1 of 2): " in text
    assert "50% of the microbatches (groups 0 and 2)" in text
    assert "n0 → n2: 512 KiB a microbatch each way, 4 microbatches and " in text
    assert "Replicas of stage 0: " in text
    assert "while the next batch computes" in text


def sharing(
    wish: Literal["auto", "always", "never"], links: LinkAssumptions | None = None, **optim: Any
) -> ClusterPlan:
    """Two replicas of all layers, and their wish to share the update."""
    placement = PlacementSpec(replicas=(2,), share_updates=wish)
    matrices = replace(OptimSpec().matrices, **optim)
    spec = replace(job(num_blocks=4, reduction_groups=2, placement=placement), optim=OptimSpec(matrices=matrices))
    return planned(spec, [node("a"), node("b")], links=links or LinkAssumptions())


def test_replicas_share_an_update_where_that_saves_time() -> None:
    """`auto` takes the faster of both; over a link of 1 MB/s each does its whole update, unless the job says always."""
    plans = {wish: sharing(wish) for wish in ("auto", "always", "never")}
    seconds = {wish: plan.predicted_batch_seconds for wish, plan in plans.items()}
    assert seconds["auto"] == seconds["always"] < seconds["never"]
    assert [stage.shares_update for wish in plans for stage in plans[wish].workers] == [True] * 4 + [False] * 2
    assert "its share of Newton-Schulz" in "\n".join(plans["auto"].explanation())
    slow = LinkAssumptions(site_bytes_per_s=1e6)
    assert [sharing(wish, slow).workers[0].shares_update for wish in ("auto", "always", "never")] == [
        False,
        True,
        False,
    ]


def test_without_newton_schulz_there_is_nothing_to_share() -> None:
    assert not any(stage.shares_update for stage in sharing("always", name="adamw", lr=1e-3).workers)


def test_what_replicas_exchange_is_counted() -> None:
    """Each sends half of the matrices' results; those of a batch are on the device."""
    alone, shared = sharing("never"), sharing("always")
    matrices = sum(cost.shared_bytes for cost in layer_costs(job(num_blocks=4)))
    more = shared.reductions[0].bytes_per_worker - alone.reductions[0].bytes_per_worker
    assert more == pytest.approx(matrices / 2)
    assert shared.estimates[0].device_bytes - alone.estimates[0].device_bytes == matrices


# --- What the simulator says ---------------------------------------------------------------------------------------


def _simulated_over_predicted(seed: int) -> tuple[float, list[int]]:
    """(ratio, workers of each stage) of a plan for unlike nodes, in a network that costs nothing."""
    chance = random.Random(seed)
    num_nodes = chance.randint(5, 16)
    spec = job(
        num_blocks=chance.randint(3, num_nodes + 6),
        microbatches=chance.choice((32, 64)),
        reduction_groups=chance.choice((4, 8, 16, 32)),
    )
    nodes = [node(f"n{index}", speed=chance.uniform(1, 8)) for index in range(num_nodes)]
    free = LinkAssumptions(site_bytes_per_s=1e12, site_round_trip_s=1e-6)
    plan = planned(spec, nodes, links=free)
    seconds = forecast(spec, plan.workers, nodes, links=free).step_seconds
    return seconds / plan.predicted_batch_seconds, [len(positions) for positions in replicas_of(plan.workers)]


@pytest.mark.slow
def test_uneven_replicas_take_as_long_as_predicted() -> None:
    """Ten plans whose stages have unlike numbers of unlike workers: what the simulator sees is what was promised,
    within 4 % on average and 20 % where turns fall worst. With groups that follow one another it was 40 %."""
    ratios = [ratio for ratio, shape in map(_simulated_over_predicted, range(12)) if max(shape) > 1]
    assert len(ratios) >= 10
    assert sum(ratios) / len(ratios) <= 1.04
    assert max(ratios) <= 1.2
    assert min(ratios) >= 0.99, "nobody is faster than the slowest worker"
