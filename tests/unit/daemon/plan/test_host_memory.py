"""What a machine keeps of a job's boundaries: its workers share the room, and copies of others' layers count."""

import re
from dataclasses import replace

from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.jobs.job import FaultSpec, JobSpec, PlacementSpec
from headway.daemon.plan.cluster_plan import ClusterPlan, PlanRefused
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.plan.planner import make_plan
from tests.rigs.clusters import job, node, planned, refused

COPIES = FaultSpec(snapshot_every=5, copies=2)


def state_of(spec: JobSpec, *layers: str) -> int:
    """Bytes of one boundary state of some layers; none: of all."""
    return sum(cost.state_bytes for cost in layer_costs(spec) if not layers or cost.name in layers)


def uneven(host_bytes: int, *, cards: int = 2) -> NodeRecord:
    """A machine whose first device is four times as fast as the others."""
    devices = tuple(Device(kind="cpu", index=at, speed=1.0 if at else 4.0) for at in range(cards))
    return replace(node("a", host_bytes=host_bytes), devices=devices)


def test_devices_of_one_machine_share_its_memory() -> None:
    """Room for three states and not a byte more: the fast device has most layers, as without a limit."""
    spec = job(num_blocks=8, microbatches=32, fault=replace(COPIES, copies=1))
    free = planned(spec, [uneven(0)])
    assert len(free.workers[0].layers) != len(free.workers[1].layers)
    shared = planned(spec, [uneven(3 * state_of(spec))])
    assert shared.workers == free.workers
    assert {each.host_bytes for each in shared.estimates} == {3 * state_of(spec)}
    assert isinstance(make_plan(spec, [uneven(3 * state_of(spec) - 1)]), PlanRefused)


def test_a_machine_keeps_its_own_layers_and_copies_of_others() -> None:
    """Two machines: each has three states of its own layers, and three of the other's."""
    spec = job(num_blocks=5, microbatches=32, fault=COPIES, placement=PlacementSpec(replicas=(1, 1)))
    plan = planned(spec, [node("a", host_bytes=1 << 50), node("b", speed=3.0, host_bytes=1 << 50)])
    assert [each.host_bytes for each in plan.estimates] == [3 * state_of(spec)] * 2


def test_copies_go_to_the_other_machines_in_equal_parts() -> None:
    """Three machines: each has its own layers three times, and half of what the two others send a copy of."""
    spec = job(num_blocks=7, microbatches=32, fault=COPIES, placement=PlacementSpec(replicas=(1, 1, 1)))
    plan = planned(spec, [node(name, host_bytes=1 << 50) for name in "abc"])
    for each in plan.estimates:
        own = state_of(spec, *each.stage.layers)
        assert abs(each.host_bytes - (3 * own + 3 * (state_of(spec) - own) / 2)) < 3


def test_replicas_hold_the_copies_that_others_would() -> None:
    """Two replicas on two machines: both write all layers, nobody sends a copy; on one machine files count once."""
    spec = job(num_blocks=2, microbatches=8, reduction_groups=2, fault=COPIES, placement=PlacementSpec(replicas=(2,)))
    apart = planned(spec, [node(name, host_bytes=1 << 50) for name in "ab"])
    assert [each.host_bytes for each in apart.estimates] == [3 * state_of(spec)] * 2
    together = planned(replace(spec, fault=replace(COPIES, copies=1)), [node("a", num_devices=2, host_bytes=1 << 50)])
    assert [each.host_bytes for each in together.estimates] == [4 * state_of(spec)] * 2  # each writes a state


def test_cards_pin_a_state_each() -> None:
    """Beside three states in files, every card's worker has its own layers in pinned memory once."""
    spec = job(num_blocks=4, microbatches=32, fault=replace(COPIES, copies=1), placement=PlacementSpec(replicas=(1, 1)))
    cards = tuple(Device(kind="cuda", index=at) for at in range(2))
    plan = planned(spec, [replace(node("a", host_bytes=1 << 50), devices=cards)])
    assert {each.host_bytes for each in plan.estimates} == {4 * state_of(spec)}


def test_devices_that_a_plan_leaves_free_keep_their_part() -> None:
    """Two workers on a machine of four devices: the other two's half of its memory is for another job."""
    spec = job(num_blocks=7, microbatches=32, fault=replace(COPIES, copies=1), placement=PlacementSpec(replicas=(1, 1)))
    kept = 3 * state_of(spec)
    plan = planned(spec, [node("a", num_devices=4, host_bytes=2 * kept)])
    assert {each.host_limit_bytes for each in plan.estimates} == {kept}
    assert "does not fit" in refused(spec, [node("a", num_devices=4, host_bytes=kept)])


def test_a_machine_without_room_for_its_part_gets_fewer_layers() -> None:
    """The fast machine's two devices would keep more than it has: they get fewer layers, and it keeps within."""
    spec = job(num_blocks=12, microbatches=32, fault=COPIES)
    fast = node("a", speed=8.0, num_devices=2, host_bytes=1 << 50)
    others = [node(name, num_devices=2, host_bytes=1 << 50) for name in "bc"]
    free = planned(spec, [fast, *others])
    kept = next(each.host_bytes for each in free.estimates if each.stage.node == "a")
    short = make_plan(spec, [replace(fast, memory_bytes=round(0.8 * kept)), *others])
    assert isinstance(short, ClusterPlan)
    assert short.predicted_batch_seconds > free.predicted_batch_seconds
    assert all(each.host_bytes <= each.host_limit_bytes for each in short.estimates)


def test_a_refusal_says_which_settings_keep_less() -> None:
    """Two machines with a third of the room: one copy or no snapshots would keep so much less."""
    spec = job(num_blocks=4, microbatches=32, fault=COPIES)
    reason = refused(spec, [node(name, host_bytes=state_of(spec)) for name in "ab"])
    assert "; under [fault], copies = 1 keeps " in reason
    assert " and snapshot_every = 0 keeps " in reason


def test_a_refusal_names_the_layer_that_no_machine_has_room_for() -> None:
    """All machines together have more than enough, and none of them enough for the largest layer."""
    spec = job(num_blocks=4, microbatches=32, fault=replace(COPIES, copies=1))
    kept = 3 * max(layer.state_bytes for layer in layer_costs(spec))
    reason = refused(spec, [node(name, host_bytes=kept - 1) for name in "abcdefghij"])
    assert re.search(r"largest, too little for (embed|block\.\d|head) alone, [\d.]+ [KMG]iB; under \[fault\]", reason)
    together = refused(spec, [node(name, host_bytes=kept) for name in "a"])
    assert "too little for" not in together


def test_a_refusal_says_that_the_sum_is_not_the_reason() -> None:
    """Two devices have the memory of the whole together, but a layer would have to be on both."""
    spec = job(num_blocks=3, microbatches=32)
    whole = planned(spec, [node("a")]).estimates[0].device_bytes
    reason = refused(spec, [node(name, memory_bytes=round(0.55 * whole)) for name in "ab"])
    assert "; no cut into whole layers fits, each device with microbatches of its own; " in reason
    reason = refused(spec, [node(name, memory_bytes=round(0.45 * whole)) for name in "ab"])
    assert "no cut" not in reason
