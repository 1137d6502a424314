"""Plans: exact cuts, orders, memory, depth, exactness, and what people are told."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.records import Device, PlanRecord
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec, PlacementSpec
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.plan.planner import ClusterPlan, PlanRefused, make_plan
from headway.daemon.plan.predicted_time import predict
from headway.stages.spec import ModelSpec, TrainSpec
from tests.rigs.clusters import job, node, planned, refused

MIB = 1 << 20


# --- How many, and which --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_nodes", "expected"), [(1, 1), (2, 2), (3, 3), (5, 5), (12, 8)])
def test_as_many_stages_as_help(num_nodes: int, expected: int) -> None:
    """8 blocks: each further node helps until every block has its own; more nodes are spares."""
    plan = planned(job(), [node(f"n{index:02d}") for index in range(num_nodes)])
    assert len(plan.workers) == expected
    assert all(stage.layers for stage in plan.workers)


def test_no_more_stages_than_microbatches() -> None:
    """m = 2: two stages, however many nodes there are."""
    assert len(planned(job(microbatches=2), [node(f"n{index}") for index in range(5)]).workers) == 2


def test_no_more_nodes_than_the_job_wants() -> None:
    """max_nodes = 2 of four."""
    spec = job(placement=PlacementSpec(max_nodes=2))
    assert len({stage.node for stage in planned(spec, [node(f"n{index}") for index in range(4)]).workers}) == 2


def test_as_many_nodes_as_the_job_demands() -> None:
    """One block on three nodes would not be faster, but min_nodes = 3 asks for it."""
    spec = job(num_blocks=1, placement=PlacementSpec(min_nodes=3))
    assert len(planned(spec, [node(f"n{index}") for index in range(4)]).workers) == 3


def test_same_nodes_in_any_order_give_the_same_plan() -> None:
    """The plan depends on what is there, not on how it was listed."""
    nodes = [node(f"n{index}", speed=1 + index % 2) for index in range(4)]
    assert planned(job(), nodes) == planned(job(), nodes[::-1])


def test_faster_device_gets_more_layers() -> None:
    """One node of twice the speed holds about twice the blocks."""
    plan = planned(job(), [node("slow"), node("fast", speed=2.0)])
    num_layers = {stage.node: len([layer for layer in stage.layers if "block" in layer]) for stage in plan.workers}
    assert num_layers["fast"] >= 5


def test_sites_stay_together() -> None:
    """Two nodes here and two far away: one far link, not three."""
    links = LinkAssumptions(far_bytes_per_s=1e9)
    nodes = [node(name, site=site) for name, site in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"))]
    plan = planned(job(), nodes, links=links)
    sites = [{"a": "x", "b": "y", "c": "x", "d": "y"}[stage.node] for stage in plan.workers]
    assert sites in (["x", "x", "y", "y"], ["y", "y", "x", "x"])


def test_unusable_nodes_are_left_out() -> None:
    """Draining, of a site that the job does not want, or busy with another job."""
    spec = job(placement=PlacementSpec(sites=("here",)))
    nodes = [node("a"), node("b", is_draining=True), node("c", site="there"), node("d")]
    plan = planned(spec, nodes, busy=frozenset({("d", 0)}))
    assert [stage.node for stage in plan.workers] == ["a"]


def test_joining_node_leaves_most_layers_where_they_are() -> None:
    """Nodes of the plan in force keep their order, though the newcomer's name sorts first."""
    before = planned(job(), [node("m"), node("n")])
    record = PlanRecord(generation=1, timeline=1, workers=before.workers)
    after = planned(job(), [node("a"), node("m"), node("n")], previous=record)
    assert [stage.node for stage in after.workers] == ["m", "n", "a"]
    assert after.workers[0].layers == before.workers[0].layers[: len(after.workers[0].layers)]


def test_many_unlike_nodes_are_planned_within_reason() -> None:
    """Ten different speeds: too many orders to try all, still a plan that is better than any single node's."""
    nodes = [node(f"n{index}", speed=1 + index / 10) for index in range(10)]
    plan = planned(job(num_blocks=12), nodes)
    alone = planned(job(num_blocks=12), nodes[-1:])
    assert plan.predicted_batch_seconds < alone.predicted_batch_seconds / 3


# --- Memory ---------------------------------------------------------------------------------------------------------


def test_memory_moves_the_cut() -> None:
    """The faster device would hold most blocks, but has room for one or two: the slow one takes the rest."""
    costs = layer_costs(job())
    one_block = costs[1].resident_bytes + 3 * costs[1].activation_bytes
    free = planned(job(), [node("slow"), node("fast", speed=4.0)])
    plan = planned(job(), [node("slow"), node("fast", speed=4.0, memory_bytes=int(one_block * 1.5))])
    blocks = [
        sum("block" in layer for stage in made.workers if stage.node == "fast" for layer in stage.layers)
        for made in (free, plan)
    ]
    assert blocks[0] >= 6
    assert blocks[1] <= 2
    assert all(
        not estimate.device_limit_bytes or estimate.device_bytes <= estimate.device_limit_bytes
        for estimate in plan.estimates
    )


def test_memory_cuts_the_extra_depth_but_not_the_pipeline() -> None:
    """Latency asks for more in flight than memory allows: what the schedule needs stays."""
    links = LinkAssumptions(site_round_trip_s=10.0)
    both = job(placement=PlacementSpec(min_nodes=2))
    free = planned(both, [node("a"), node("b")], links=links)
    assert free.workers[0].depth == 16
    limit = free.estimates[0].device_bytes - 10 * sum(cost.activation_bytes for cost in layer_costs(job())[:5])
    tight = planned(both, [node("a", memory_bytes=limit), node("b", memory_bytes=limit)], links=links)
    assert len(tight.workers) == 2
    assert all(estimate.device_bytes <= limit for estimate in tight.estimates)
    assert tight.predicted_batch_seconds >= free.predicted_batch_seconds


def test_impossible_memory_is_refused_with_the_arithmetic() -> None:
    """Devices of 1 MiB: the sentence has what is needed and what is there."""
    reason = refused(job(), [node("a", memory_bytes=MIB), node("b", memory_bytes=MIB)])
    assert "2 free devices have 2 MiB together, 1 MiB the largest" in reason
    assert "block.0 alone" in reason


def test_host_memory_counts_the_states_that_are_kept() -> None:
    """A host without room for two boundary states is refused; snapshots need room for three of each copy."""
    state = sum(cost.state_bytes for cost in layer_costs(job()))
    never = JobSpec(job=JobSection(name="demo"), fault=FaultSpec(snapshot_every=0))
    assert isinstance(make_plan(never, [node("a", host_bytes=state)]), PlanRefused)
    assert isinstance(make_plan(never, [node("a", host_bytes=2 * state)]), ClusterPlan)
    often = JobSpec(job=JobSection(name="demo"), fault=FaultSpec(snapshot_every=5))
    assert isinstance(make_plan(often, [node("a", host_bytes=3 * state - 1)]), PlanRefused)
    assert planned(often, [node("a", host_bytes=3 * state)]).estimates[0].host_bytes == 3 * state
    busy = replace(node("b"), is_draining=True)
    for copies in (1, 2, 3):
        several = replace(often, fault=FaultSpec(snapshot_every=5, copies=copies))
        states = planned(several, [node("a", host_bytes=60 * state), busy]).estimates[0].host_bytes / state
        assert states == (3, 6, 6)[copies - 1]


def test_short_host_memory_is_blamed_where_devices_have_room() -> None:
    """Together the machines have memory enough, yet none for the largest parts: no word of the devices."""
    spec = job(fault=FaultSpec(snapshot_every=5), placement=PlacementSpec(replicas=(1, 1)), num_blocks=1)
    whole = 6 * sum(cost.state_bytes for cost in layer_costs(spec))
    nodes = [node(name, memory_bytes=1 << 40, host_bytes=round(whole * 0.45)) for name in "ab"]
    reason = refused(spec, [*nodes, node("c", memory_bytes=1 << 40, host_bytes=round(whole * 0.45))])
    assert "boundary states" in reason
    assert "and a, b and c have " in reason
    assert "devices need" not in reason
    roomy = node("b", memory_bytes=1 << 40, host_bytes=2 * whole)
    assert refused(spec, [replace(nodes[0], memory_bytes=1 << 20), roomy]).endswith("a has too little for its part")


def test_nodes_of_one_machine_share_its_memory() -> None:
    """Room for the states of a whole job, said by two nodes on one host: together they have it once."""
    state = 2 * sum(cost.state_bytes for cost in layer_costs(job()))
    spec = JobSpec(job=JobSection(name="demo"), fault=FaultSpec(snapshot_every=0))
    nodes = [replace(node(name, host_bytes=2 * state), host="box") for name in "ab"]
    assert {estimate.host_limit_bytes for estimate in planned(spec, nodes).estimates} == {2 * state}


def test_nodes_of_one_machine_share_its_cores() -> None:
    """One core between two workers takes twice as long as one each; of eight, each worker uses one."""

    def batch_s(num_cores: float, host: str) -> float:
        cpu = Device(kind="cpu", num_cores=num_cores)
        nodes = [replace(node(name), host=host or name, devices=(cpu,)) for name in "ab"]
        return sum(estimate.batch_seconds for estimate in planned(job(), nodes).estimates)

    assert batch_s(1.0, "box") > 1.9 * batch_s(1.0, "")
    assert batch_s(8.0, "box") == batch_s(1.0, "")


def test_a_running_plan_is_timed_on_the_cores_that_it_was_planned_for() -> None:
    """Three nodes share two cores, and one of them drains: what is predicted of the plan is what the planner said."""
    cpu = Device(kind="cpu", num_cores=2.0)
    nodes = [replace(node(name), host="box", devices=(cpu,)) for name in "abc"]
    nodes[2] = replace(nodes[2], is_draining=True)
    plan = planned(job(), nodes)
    assert predict(job(), plan.workers, nodes) == pytest.approx(plan.predicted_batch_seconds)


def test_frames_of_small_layers_take_time_on_counted_cores() -> None:
    """A second worker on a core of its own brings less than a half: each microbatch crosses the cut and comes back."""
    model = ModelSpec(num_hidden_layers=4, hidden_size=32, intermediate_size=64, num_attention_heads=2)
    tiny = replace(job(), model=model, train=TrainSpec(microbatch_size=1, sequence_length=8))

    def gain(num_cores: float) -> float:
        cpu = Device(kind="cpu", num_cores=num_cores)
        nodes = [replace(node(name), devices=(cpu,)) for name in "ab"]
        return planned(tiny, nodes[:1]).predicted_batch_seconds / planned(tiny, nodes).predicted_batch_seconds

    assert gain(1.0) < 0.9 * gain(0.0)


def test_host_memory_counts_the_pinned_copy_of_a_cards_snapshots() -> None:
    """Three boundary states fit beside a CPU; beside a card there is one more, unless the job takes no snapshots."""
    state = sum(cost.state_bytes for cost in layer_costs(job()))
    often = JobSpec(job=JobSection(name="demo"), fault=FaultSpec(snapshot_every=5))
    cpu = node("a", host_bytes=3 * state)
    card = replace(cpu, devices=(Device(kind="cuda"),))
    assert planned(often, [cpu]).estimates[0].host_bytes == 3 * state
    assert isinstance(make_plan(often, [card]), PlanRefused)
    assert planned(often, [replace(card, memory_bytes=4 * state)]).estimates[0].host_bytes == 4 * state
    never = replace(often, fault=FaultSpec(snapshot_every=0))
    assert planned(never, [card]).estimates[0].host_bytes == 2 * state


def test_a_plan_without_replicas_counts_two_sums_whatever_the_groups() -> None:
    """Room for two sums beside a pipeline of eight groups, not for eight: as fast as one group, and within its memory.

    The run adds group by group where no stage has replicas.
    """
    one, many = job(microbatches=32, reduction_groups=1), job(microbatches=32, reduction_groups=8)
    fixed = replace(many, placement=PlacementSpec(replicas=(1,)))
    limit = planned(fixed, [node("a")]).estimates[0].device_bytes
    nodes = [node("a", memory_bytes=limit)]
    plan = planned(many, nodes)
    assert plan.estimates[0].device_bytes == limit
    assert plan.estimates[0].memory.beyond == 0
    assert plan.predicted_batch_seconds == pytest.approx(planned(one, [node("a")]).predicted_batch_seconds)
    assert isinstance(make_plan(many, [node("a", memory_bytes=limit - 1)]), PlanRefused)


# --- Depth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "depths"), [("gpipe", [8, 8, 8]), ("1f1b", [3, 2, 1])])
def test_depths_of_flushing_schedules(schedule: str, depths: list[int]) -> None:
    """gpipe has a whole batch in flight, 1f1b what is left of the pipeline."""
    plan = planned(job(schedule=schedule), [node("a"), node("b"), node("c")])
    assert [stage.depth for stage in plan.workers] == depths


def test_depth_of_2bw_hides_the_round_trips() -> None:
    """Without latency p − s and as much slack; with it, one more for each microbatch that fits into the round trips
    downstream, as far as m + 1 allows both."""
    nodes = [node("a"), node("b"), node("c")]
    still = planned(job(), nodes, links=LinkAssumptions(site_round_trip_s=0.0, site_bytes_per_s=1e15))
    assert [stage.depth for stage in still.workers] == [6, 4, 1]
    near = planned(job(), nodes)
    assert [stage.depth for stage in near.workers] == [7, 5, 1]
    three = job(placement=PlacementSpec(min_nodes=3))
    far = planned(three, nodes, links=LinkAssumptions(site_round_trip_s=100.0))
    assert [stage.depth for stage in far.workers] == [16, 16, 1]


# --- Exactness ------------------------------------------------------------------------------------------------------


def test_one_class_is_exact_and_two_are_not() -> None:
    """The verdict names who has what."""
    assert planned(job(), [node("a"), node("b")]).is_exact
    mixed = planned(job(), [node("a"), node("b", arithmetic_class="two")])
    assert not mixed.is_exact
    assert "a has one, b has two" in mixed.exact_reason


def test_unlike_cards_of_one_node_are_not_exact() -> None:
    """The verdict names each device by its class; a node that does not say its devices' classes has one for all."""
    unlike = planned(job(placement=PlacementSpec(replicas=(1, 1))), [node("a", device_classes=("one", "two"))])
    assert not unlike.is_exact
    assert "a:0 has one, a:1 has two" in unlike.exact_reason
    assert unlike.arithmetic_classes == ("one", "two")
    older = planned(job(placement=PlacementSpec(replicas=(1, 1))), [node("a", num_devices=2)])
    assert older.is_exact
    assert older.arithmetic_classes == ("one",)


def test_required_exactness_uses_one_model_of_a_nodes_cards() -> None:
    """Three cards, two of them alike: the job runs on those two."""
    unlike = node("a", device_classes=("one", "two", "one"))
    plan = planned(job(exactness="required", placement=PlacementSpec(replicas=(1, 1))), [unlike])
    assert sorted(stage.device_index for stage in plan.workers) == [0, 2]


def test_history_counts_for_exactness() -> None:
    """All workers are of one class now, but the job began on another."""
    plan = planned(job(), [node("a")], history=("zero",))
    assert not plan.is_exact
    assert plan.arithmetic_classes == ("one", "zero")


def test_required_exactness_takes_the_class_with_the_best_plan() -> None:
    """Two slow nodes of one class lose against one fast node of another; mixed they never run."""
    nodes = [node("a"), node("b"), node("c", speed=9.0, arithmetic_class="two")]
    plan = planned(job(exactness="required"), nodes)
    assert [stage.node for stage in plan.workers] == ["c"]
    assert plan.is_exact


def test_required_exactness_keeps_to_the_class_that_the_job_began_on() -> None:
    """Its own class, though another would be faster; and a refusal where it is not there."""
    nodes = [node("a"), node("c", speed=9.0, arithmetic_class="two")]
    plan = planned(job(exactness="required"), nodes, history=("one",))
    assert [stage.node for stage in plan.workers] == ["a"]
    assert "zero" in refused(job(exactness="required"), nodes, history=("zero",))


# --- Words ----------------------------------------------------------------------------------------------------------


def test_explanation_names_bottleneck_memory_and_links() -> None:
    """What `headway plan` prints."""
    text = "\n".join(planned(job(), [node("a"), node("b")]).explanation())
    assert "sets the pace" in text
    assert "on the device at depth" in text
    assert "a → b: 512 KiB a microbatch each way" in text
    assert "Exact: yes, because" in text


def test_no_node_is_said_plainly() -> None:
    """Nothing there, or not enough."""
    assert refused(job(), []) == "waits for 1 node"
    spec = job(placement=PlacementSpec(min_nodes=3))
    assert refused(spec, [node("a")]) == "waits for 2 more nodes (min_nodes = 3, 1 free)"
    far = job(placement=PlacementSpec(sites=("moon",)))
    assert refused(far, [node("a")]) == "waits for 1 node of moon"


def test_costs_count_parameters_as_the_model_has_them() -> None:
    """Embed and head: vocabulary × hidden; a block: its seven matrices and two norms."""
    costs = {cost.name: cost for cost in layer_costs(job())}
    assert costs["embed"].num_parameters == 256 * 256
    assert costs["head"].num_parameters == 256 * 256 + 256
    assert costs["block.0"].num_parameters == 2 * 256 * 256 + 2 * 128 * 256 + 3 * 688 * 256 + 2 * 256


def test_state_is_two_versions_and_the_optimizers_buffers() -> None:
    """2bw, fp32, Error Feedback: muon's matrices have 4 buffers' worth of state, adamw's rest 5; 1f1b has 2 and 3."""
    spec = job(num_blocks=1)
    block = layer_costs(spec)[1]
    num_rest = 2 * 256
    assert block.state_bytes == 4 * (4 * (block.num_parameters - num_rest) + 5 * num_rest)
    flushing = layer_costs(job(num_blocks=1, schedule="1f1b"))[1]
    assert flushing.state_bytes == 4 * (2 * (block.num_parameters - num_rest) + 3 * num_rest)


# --- Nodes that failed ----------------------------------------------------------------------------------------------


def test_devices_without_the_jobs_kernel_of_attention_are_left_out() -> None:
    """A card that came after the job was submitted, or a CPU: the plan goes without it, and a refusal says why."""
    card = node("b")
    card = replace(card, devices=(replace(card.devices[0], kind="cuda", capability="9.0"),))
    spec = job(attention_backend="efficient")
    assert {stage.node for stage in planned(spec, [node("a"), card]).workers} == {"b"}
    assert refused(spec, [node("a")]) == (
        'waits for 1 node; node a has no attention_backend = "efficient": a CPU has no memory-efficient kernel'
    )
    assert {stage.node for stage in planned(job(), [node("a"), card]).workers} <= {"a", "b"}


def test_nodes_in_quarantine_and_devices_without_a_worker_are_left_out() -> None:
    """b failed too often and c's only worker is gone: a plan on a; without a, the reason names both."""
    crippled = replace(node("c"), down_devices=(0,))
    nodes = [node("a"), node("b"), crippled]
    assert {stage.node for stage in planned(job(), nodes, quarantined=frozenset({"b"})).workers} == {"a"}
    reason = refused(job(), nodes[1:], quarantined=frozenset({"b"}))
    assert reason == "waits for 1 node; node b is in quarantine; c has no worker on device 0"


def test_names_sort_by_their_numbers() -> None:
    """Alike nodes stand in the pipeline in the order that people count: node-2 before node-10."""
    plan = planned(job(), [node(f"node-{number}") for number in (10, 2, 1)])
    assert [stage.node for stage in plan.workers] == ["node-1", "node-2", "node-10"]


def test_among_equals_layers_stay_where_their_files_are() -> None:
    """Two cuts of the same speed: the one that needs no fetching wins."""
    nodes = [node("a", site="x"), node("b", site="y")]
    [first, second] = planned(job(), nodes).workers
    held = {first.node: second.layers, second.node: first.layers}
    assert [stage.node for stage in planned(job(), nodes, held=held).workers] == [second.node, first.node]
