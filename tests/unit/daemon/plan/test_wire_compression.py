"""What wire compression does to plans: fewer bytes on far links, memory for feedback, and a verdict that says so."""

from dataclasses import replace

from headway.daemon.client.plan_simulation import forecast
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.layer_costs import hidden_bytes, num_hidden
from headway.stages.links.codec import Codec, coded_bytes
from tests.rigs.clusters import job, node, planned

BOTH = PlacementSpec(min_nodes=2)
APART = [node("a"), node("b", site="there")]
TOGETHER = [node("a"), node("b")]


def plan_of(spec: JobSpec, nodes: list[NodeRecord]) -> ClusterPlan:
    return planned(replace(spec, placement=BOTH), nodes)


def test_far_links_carry_coded_bytes_and_near_ones_do_not() -> None:
    """int8 between sites: a quarter of the bytes and seconds over the far link, nothing changed inside a site."""
    plain, coded = job(), job(wire="int8")
    num = num_hidden(coded)
    (far,), (before,) = plan_of(coded, APART).connections, plan_of(plain, APART).connections
    assert (far.codec, far.bytes_per_microbatch) == ("int8", num + num // 64 * 4)
    assert 3.7 < before.bytes_per_microbatch / far.bytes_per_microbatch < 3.8
    assert far.batch_seconds < before.batch_seconds / 3.7
    assert plan_of(coded, TOGETHER).connections == plan_of(plain, TOGETHER).connections
    (near,) = plan_of(job(wire="bf16", wire_between="stages"), TOGETHER).connections
    assert (near.codec, near.bytes_per_microbatch) == ("bf16", hidden_bytes(plain) // 2)


def of_speed(speed: float) -> list[NodeRecord]:
    """Two sites with faster devices, for which the same line is longer."""
    return [replace(each, devices=(Device(kind="cpu", speed=speed),)) for each in APART]


def test_depth_follows_the_coded_bytes() -> None:
    """A far link that frames are under way on for more than two microbatches' time: coded, for less, and fewer
    microbatches hide it."""
    plain, coded = (plan_of(job(microbatches=32, wire=wire), of_speed(3.0)) for wire in ("none", "int8"))
    carried = [plan.connections[0].bytes_per_microbatch for plan in (plain, coded)]
    saved = 2 * (carried[0] - carried[1]) / 12.5e6
    assert abs(plain.distance.on_links_s - coded.distance.on_links_s - saved) < 1e-9
    assert coded.distance.least_microbatches < plain.distance.least_microbatches
    assert coded.workers[0].depth < plain.workers[0].depth


def test_a_link_that_sets_the_pace_is_predicted_faster_when_coded() -> None:
    """Frames that need more than the line: coded they fit, in the prediction and in the simulation alike."""
    specs = [replace(job(microbatches=32, wire=wire), placement=BOTH) for wire in ("none", "int8")]
    nodes = of_speed(8.0)
    plain, coded = (planned(spec, nodes) for spec in specs)
    assert coded.predicted_batch_seconds < 0.6 * plain.predicted_batch_seconds
    simulated = [
        forecast(spec, plan.workers, nodes).step_seconds for spec, plan in zip(specs, (plain, coded), strict=True)
    ]
    assert simulated[1] < 0.6 * simulated[0]


def test_a_plan_says_that_exactness_is_given_up_and_why() -> None:
    """Coded cuts, the same job on one site, and on one site after it was on two."""
    spec = job(wire="int8")
    far = plan_of(spec, APART)
    assert (far.is_exact, far.codecs, far.was_rounded) == (False, ("int8",), True)
    assert "int8 wire compression rounds the frames of the links between sites (stages 0 → 1)" in far.exact_reason
    assert any("as int8" in sentence for sentence in far.explanation())
    near = plan_of(spec, TOGETHER)
    assert (near.is_exact, near.codecs, near.was_rounded) == (True, (), False)
    assert 'wire = "int8" codes no link of this plan: no cut lies between sites' in near.exact_reason
    for where in ("sites", "stages"):
        alone = planned(job(wire="int8", wire_between=where), TOGETHER[:1])
        assert (alone.is_exact, alone.codecs) == (True, ())
        assert 'wire = "int8" codes no link of this plan: the plan has one stage, and so no cut' in alone.exact_reason
    after = planned(spec, TOGETHER, was_rounded=True)
    assert (after.is_exact, after.was_rounded) == (False, True)
    assert "an earlier plan" in after.exact_reason
    mixed = plan_of(spec, [node("a"), node("b", site="there", arithmetic_class="two")])
    assert "int8 wire compression" in mixed.exact_reason
    assert "b has two" in mixed.exact_reason


def test_bf16_takes_nothing_from_a_bfloat16_job() -> None:
    """Its hidden states are bfloat16 anyway → exact, and no codec."""
    plan = plan_of(job(wire="bf16", wire_between="stages", dtype="bfloat16"), APART)
    assert (plan.is_exact, plan.codecs) == (True, ())


def test_a_cut_is_coded_whole() -> None:
    """Two replicas here, one there and the next stage here: every link of the cut has one codec, near ones too, so the
    bits do not depend on which replica holds which group."""
    placement = PlacementSpec(replicas=(2, 1), share_updates="never")
    nodes = [node("a"), node("b", site="there"), node("c", site="there", arithmetic_class="two")]
    spec = replace(job(wire="int8", reduction_groups=2, microbatches=8), placement=placement)
    plan = planned(spec, nodes)
    sites = {record.name: record.site for record in nodes}
    assert len({sites[stage.node] for stage in plan.workers[:2]}) == 2
    assert [connection.codec for connection in plan.connections] == ["int8", "int8"]


def test_feedback_takes_memory() -> None:
    """int8 with feedback: float32 of one gradient for each group, counted where a cut can be coded."""
    with_it, without = job(wire="int8"), job(wire="int8", wire_feedback=False)
    taken = [sum(estimate.device_bytes for estimate in plan_of(spec, APART).estimates) for spec in (with_it, without)]
    depths = [[stage.depth for stage in plan_of(spec, APART).workers] for spec in (with_it, without)]
    assert depths[0] == depths[1]
    assert taken[0] - taken[1] == 2 * 4 * num_hidden(with_it)
    one_site = [plan_of(spec, TOGETHER).estimates for spec in (with_it, without)]
    assert one_site[0] == one_site[1]
    assert coded_bytes(Codec.INT8, 65, 4) == 65 + 2 * 4


def test_evaluations_are_carried_down_uncoded() -> None:
    """A held-out microbatch beside each microbatch: a coded far line carries five times as much, and sets the pace."""
    plain = job(microbatches=32, wire="int8")
    evaluated = replace(plain, train=replace(plain.train, eval_every=1))
    nodes = of_speed(8.0)
    (before,), (after,) = plan_of(plain, nodes).connections, plan_of(evaluated, nodes).connections
    assert after.bytes_per_microbatch == before.bytes_per_microbatch
    held_out_s = 32 * hidden_bytes(plain) / 12.5e6
    assert abs(after.batch_seconds - before.batch_seconds - held_out_s) < 1e-9
    both = planned(replace(evaluated, placement=BOTH), nodes)
    assert both.predicted_batch_seconds >= after.batch_seconds
    assert forecast(replace(evaluated, placement=BOTH), both.workers, nodes).step_seconds >= 0.99 * after.batch_seconds
    rare = replace(plain, train=replace(plain.train, eval_every=50))
    assert abs(plan_of(rare, nodes).connections[0].batch_seconds - before.batch_seconds - held_out_s / 50) < 1e-9
