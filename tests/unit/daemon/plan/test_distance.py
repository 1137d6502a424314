"""What distance costs a plan: depth by round trips and transfers, the m that hides them, what the simulator says."""

from dataclasses import replace

import pytest

from headway.daemon.client.plan_simulation import forecast
from headway.daemon.cluster.measurements import LayerTime, LinkProbe
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.layer_costs import hidden_bytes, layer_costs
from headway.daemon.plan.predicted_time import Distance, lateness_s, predict
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.rebalance import MoveCost, Outlook, is_depth_alone, judge
from tests.rigs.clusters import job, node, planned

BLOCK_S = 10e-3
NUM_BLOCKS = 8


def even(num_nodes: int) -> tuple[tuple[NodeRecord, ...], float]:
    """Nodes of two sites on which every layer but blocks is free; and what each takes for one microbatch."""
    sites = ["x"] * (num_nodes // 2) + ["y"] * (num_nodes - num_nodes // 2)
    return tuple(node(f"n{i}", site=site) for i, site in enumerate(sites)), BLOCK_S * NUM_BLOCKS / num_nodes


def measured(nodes: tuple[NodeRecord, ...]) -> Profiles:
    block = LayerTime(forward_s=BLOCK_S / 3, backward_s=BLOCK_S * 2 / 3, update_s=1e-9)
    free = LayerTime(forward_s=1e-9, backward_s=2e-9, update_s=1e-9)
    return Profiles.of({(each.name, 0): {"block": block, "embed": free, "head": free} for each in nodes})


def spec_for(num_nodes: int, *, m: int, schedule: str = "2bw") -> JobSpec:
    return job(
        num_blocks=NUM_BLOCKS,
        placement=PlacementSpec(min_nodes=num_nodes),
        microbatches=m,
        schedule=schedule,
        clip_norm=1.0,
        microbatch_size=1,
    )


def links_of(spec: JobSpec, pace_s: float, *, round_trip: float, transfer: float) -> LinkAssumptions:
    """Between sites, in microbatches' time: the round trip, and one frame on the line. Inside a site nothing."""
    return LinkAssumptions(
        site_round_trip_s=0.0,
        site_bytes_per_s=1e15,
        far_round_trip_s=round_trip * pace_s,
        far_bytes_per_s=hidden_bytes(spec) / (transfer * pace_s) if transfer else 1e15,
    )


@pytest.mark.parametrize(
    ("round_trip", "transfer", "depths"),
    [(0.0, 0.0, [4, 1]), (3.0, 0.0, [7, 1]), (0.0, 0.5, [5, 1]), (2.5, 0.75, [8, 1]), (99.0, 0.5, [32, 1])],
)
def test_depth_covers_round_trip_and_transfer(round_trip: float, transfer: float, depths: list[int]) -> None:
    """p − s, one more for each microbatch's time on the line, there and back, slack, and never more than 2m."""
    nodes, pace_s = even(2)
    spec = spec_for(2, m=16)
    links = links_of(spec, pace_s, round_trip=round_trip, transfer=transfer)
    plan = planned(spec, nodes, links=links, profiles=measured(nodes))
    assert [stage.depth for stage in plan.workers] == depths


def test_slack_is_the_first_that_memory_cuts_and_hides_no_distance() -> None:
    """Room for what distance needs and one more → that is the depth, and all is hidden; room for one less than needed
    → the plan says so."""
    nodes, pace_s = even(2)
    spec = spec_for(2, m=16)
    links = links_of(spec, pace_s, round_trip=3.0, transfer=0.0)
    free = planned(spec, nodes, links=links, profiles=measured(nodes))
    costs = {cost.name: cost for cost in layer_costs(spec)}
    microbatch_bytes = sum(costs[name].activation_bytes for name in free.workers[0].layers)
    assert free.workers[0].depth == 7
    for missing, depth in ((1, 6), (2, 5), (3, 4)):
        limit = int(free.estimates[0].device_bytes - (missing - 0.5) * microbatch_bytes)
        small = tuple(node(each.name, site=each.site, memory_bytes=limit) for each in nodes)
        plan = planned(spec, small, links=links, profiles=measured(nodes))
        assert plan.workers[0].depth == depth
        assert plan.distance.is_hidden == (depth >= 5)
        assert ("memory allows depth 4, and 5 would hide it" in plan.about_distance[0]) == (depth == 4)


@pytest.mark.parametrize("num_nodes", [2, 4])
@pytest.mark.parametrize("round_trip", [0.0, 1.0, 2.5, 6.0])
@pytest.mark.parametrize("transfer", [0.0, 0.3, 0.7])
def test_the_simulator_agrees_that_the_advised_m_hides_distance(
    num_nodes: int, round_trip: float, transfer: float
) -> None:
    """With the m that the plan advises, the simulated pipeline loses less than 3 % to its links; it says hidden."""
    nodes, pace_s = even(num_nodes)
    few = spec_for(num_nodes, m=num_nodes)
    links = links_of(few, pace_s, round_trip=round_trip, transfer=transfer)
    profiles = measured(nodes)
    told = planned(few, nodes, links=links, profiles=profiles).distance
    assert told is not None
    assert told.is_hidden == (told.least_microbatches <= num_nodes)
    spec = spec_for(num_nodes, m=told.least_microbatches)
    plan = planned(spec, nodes, links=links, profiles=profiles)
    assert plan.distance.is_hidden
    run = forecast(spec, plan.workers, nodes, links=links, profiles=profiles)
    ideal_s = pace_s * spec.train.microbatches
    assert plan.predicted_batch_seconds == pytest.approx(ideal_s, rel=1e-3)
    assert run.step_seconds == pytest.approx(ideal_s, rel=0.03)


@pytest.mark.parametrize("m", [2, 4, 8])
@pytest.mark.parametrize("round_trip", [4.0, 8.0, 16.0])
def test_what_is_predicted_for_too_small_an_m_is_what_is_simulated(m: int, round_trip: float) -> None:
    """Distance that m cannot hide makes batches longer: the prediction is within 15 % of the simulated pipeline."""
    nodes, pace_s = even(2)
    spec = spec_for(2, m=m)
    links = links_of(spec, pace_s, round_trip=round_trip, transfer=0.2)
    plan = planned(spec, nodes, links=links, profiles=measured(nodes))
    run = forecast(spec, plan.workers, nodes, links=links, profiles=measured(nodes))
    assert plan.predicted_batch_seconds == pytest.approx(run.step_seconds, rel=0.15)


def test_the_plan_says_which_m_would_do() -> None:
    """m = 4 over a link of 8 microbatches → one sentence with both numbers; near nodes → none."""
    nodes, pace_s = even(2)
    spec = spec_for(2, m=4)
    links = links_of(spec, pace_s, round_trip=8.0, transfer=0.25)
    plan = planned(spec, nodes, links=links, profiles=measured(nodes))
    assert plan.about_distance == (
        "Distance: a microbatch is on the links for 340 ms there and back, 8.5 microbatches' time: m = 4 is too small "
        f"to hide it, {plan.predicted_batch_seconds:.3g} s a batch instead of 0.16 s; m ≥ 11 would.",
    )
    assert plan.about_distance[0] in plan.explanation()
    flushing = planned(replace(spec, train=replace(spec.train, schedule="1f1b")), nodes, links=links)
    assert "1f1b waits for it in every batch" in flushing.about_distance[0]
    near = planned(spec, nodes, links=links_of(spec, pace_s, round_trip=0.01, transfer=0.01), profiles=measured(nodes))
    assert near.about_distance == ()


def over_a_line(nodes: tuple[NodeRecord, ...], pace_s: float, *, round_trip: float, loss: float) -> Profiles:
    """As measured, between the sites; the round trip in microbatches' time."""
    speed = LinkProbe(round_trip_s=round_trip * pace_s, bytes_per_s=1e15, loss=loss)
    return Profiles(layers=measured(nodes).layers, links=(((nodes[0].name, nodes[1].name), speed),))


@pytest.mark.parametrize(
    ("round_trip", "loss", "depths"),
    [(3.0, 0.0, [7, 1]), (3.0, 1e-2, [15, 1]), (0.5, 1e-2, [8, 1]), (3.0, 1e-5, [7, 1]), (99.0, 1e-2, [32, 1])],
)
def test_depth_covers_frames_that_wait_for_lost_packets(round_trip: float, loss: float, depths: list[int]) -> None:
    """A line that loses packets often makes the activation and its gradient a round trip and a microbatch late each;
    where hardly a frame waits, depth is as without loss."""
    nodes, pace_s = even(2)
    plan = planned(spec_for(2, m=16), nodes, profiles=over_a_line(nodes, pace_s, round_trip=round_trip, loss=loss))
    assert [stage.depth for stage in plan.workers] == depths


def test_a_plan_says_how_late_frames_may_be() -> None:
    """The m that would do counts late frames, and the plan says why, in all and at the link."""
    nodes, pace_s = even(2)
    spec = spec_for(2, m=4)
    sure, lossy = (
        planned(spec, nodes, profiles=over_a_line(nodes, pace_s, round_trip=3.0, loss=loss)) for loss in (0.0, 0.01)
    )
    (said,) = lossy.about_distance
    assert "(packets are lost, and frames arrive up to 160 ms late): m = 4 is too small" in said
    assert "m ≥ 13 would" in said
    assert any("round trip 120 ms measured, frames up to 160 ms late." in line for line in lossy.explanation())
    assert not any("late" in line for line in sure.explanation())


@pytest.mark.parametrize(
    ("loss", "round_trip_s", "frame_bytes", "expected"),
    [
        (0.0, 0.1, 1 << 20, 0.0),
        (1e-3, 0.1, 327_680, 0.14),
        (1e-3, 0.02, 327_680, 0.06),
        (1e-4, 0.02, 327_680, 0.0),
        (1e-4, 0.1, 327_680, 0.14),
        (1e-3, 0.02, 1000, 0.0),
        (1.0, 0.02, 1000, 0.06),
    ],
)
def test_lateness_is_a_round_trip_and_a_frame_where_frames_often_wait(
    loss: float, round_trip_s: float, frame_bytes: int, expected: float
) -> None:
    """By loss, the frame's packets and those under way: a microbatch each 40 ms."""
    assert lateness_s(loss=loss, round_trip_s=round_trip_s, frame_bytes=frame_bytes, pace_s=0.04) == pytest.approx(
        expected
    )


def test_a_distance_that_costs_more_than_it_brings_is_not_taken() -> None:
    """Two sites whose link makes a batch three times as long → one node works, the other is a spare."""
    nodes, pace_s = even(2)
    spec = replace(spec_for(2, m=2), placement=PlacementSpec())
    links = links_of(spec, pace_s, round_trip=12.0, transfer=0.1)
    plan = planned(spec, nodes, links=links, profiles=measured(nodes))
    assert len(plan.workers) == 1
    assert len(plan.spares) == 1
    deep = planned(spec_for(2, m=16), nodes, links=links, profiles=measured(nodes))
    assert len(deep.workers) == 2


def test_a_link_that_grows_longer_is_worth_a_deeper_plan() -> None:
    """The plan in force is too shallow for what is probed now: the best plan differs in depth alone, and is judged
    worth its pause; a link that changed by little is not."""
    nodes, pace_s = even(2)
    spec = spec_for(2, m=16)
    names = (nodes[0].name, nodes[1].name)

    def probed(round_trip: float) -> Profiles:
        speed = LinkProbe(round_trip_s=round_trip * pace_s, bytes_per_s=1e12)
        return Profiles(layers=measured(nodes).layers, links=((names, speed),))

    before = planned(spec, nodes, profiles=probed(0.5))
    assert predict(spec, before.workers, nodes, profiles=probed(0.5)) == pytest.approx(before.predicted_batch_seconds)
    for round_trip, is_worth_it in ((8.0, True), (0.9, False)):
        best = planned(spec, nodes, profiles=probed(round_trip))
        present_s = predict(spec, before.workers, nodes, profiles=probed(round_trip))
        assert present_s is not None
        is_other = is_depth_alone(before.workers, best.workers)
        assert is_other is is_worth_it
        outlook = Outlook(
            present_s=present_s,
            best_s=best.predicted_batch_seconds,
            is_other=is_other,
            batches_left=1000,
            cost=MoveCost(num_bytes=0),
        )
        assert judge(outlook).is_worth_it is is_worth_it


def test_a_cut_depth_that_costs_nothing_says_so() -> None:
    """Memory gives one depth less than the links want, and a batch takes as long: no "7.08 s instead of 7.08 s"."""
    distance = Distance(
        stage_seconds=(1.0, 1.0),
        link_seconds=(0.5,),
        pace_s=1.0,
        hidden_batch_s=8.0,
        num_microbatches=8,
        delay=1,
        depths=(3, 1),
        is_cut_short=True,
    )
    assert f"{distance.batch_s:.3g}" == "8"
    assert distance.sentences("2bw")[0].endswith("time: hidden.")
