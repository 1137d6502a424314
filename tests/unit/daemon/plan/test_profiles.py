"""What was measured counts; what was not is judged by what was."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.measurements import LayerTime, LinkProbe
from headway.daemon.cluster.records import Device, WorkerPart
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import layer_costs, microbatch_seconds, update_seconds
from headway.daemon.plan.predicted_time import predict
from headway.daemon.plan.profiles import DeviceClock, Profiles
from tests.rigs.clusters import job, node, planned

SPEC = job(num_blocks=10, microbatches=16)
COSTS = {cost.name.partition(".")[0]: cost for cost in layer_costs(SPEC)}
DEVICE = Device(kind="cpu")
ESTIMATE = {kind: microbatch_seconds(cost, DEVICE, SPEC.train) for kind, cost in COSTS.items()}
UPDATE = {kind: update_seconds(cost, DEVICE, SPEC.train) for kind, cost in COSTS.items()}


def measured(kind: str, factor: float) -> LayerTime:
    """So many times the estimate, the update as well."""
    seconds = ESTIMATE[kind] * factor
    return LayerTime(forward_s=seconds / 3, backward_s=seconds * 2 / 3, update_s=UPDATE[kind] * factor)


def clock(profiles: Profiles, *names: str, speed: float = 1.0) -> DeviceClock:
    return DeviceClock(COSTS, SPEC.train, profiles, {(name, 0): Device(kind="cpu", speed=speed) for name in names})


def test_without_measurements_the_estimate_counts() -> None:
    """Divided by the device's speed."""
    seconds = clock(Profiles(), "a").seconds("a", Device(kind="cpu", speed=2.0), "block")
    assert seconds.microbatch_s == pytest.approx(ESTIMATE["block"] / 2)
    assert seconds.update_s == pytest.approx(UPDATE["block"] / 2)


def test_a_measured_device_takes_what_was_measured() -> None:
    """Whatever its speed was said to be."""
    profiles = Profiles.of({("a", 0): {"block": measured("block", 3.0)}})
    seconds = clock(profiles, "a").seconds("a", Device(kind="cpu", speed=5.0), "block")
    assert seconds.microbatch_s == pytest.approx(3 * ESTIMATE["block"])
    assert seconds.update_s == pytest.approx(3 * UPDATE["block"])


@pytest.mark.parametrize("profiles", [Profiles(), Profiles.of({("a", 0): {"block": measured("block", 1.0)}})])
def test_evaluations_take_their_forwards_alone(profiles: Profiles) -> None:
    """6 held-out microbatches every second batch of 16: a forward, a third of all, takes 6 / 32 longer on average."""
    train = replace(SPEC.train, eval_every=2, eval_microbatches=6)
    seconds = DeviceClock(COSTS, train, profiles, {("a", 0): DEVICE}).seconds("a", DEVICE, "block")
    assert seconds.forward_s == pytest.approx(ESTIMATE["block"] / 3 * (1 + 6 / 32))
    assert seconds.backward_s == pytest.approx(ESTIMATE["block"] * 2 / 3)
    assert seconds.update_s == pytest.approx(UPDATE["block"])


def test_evaluations_take_no_gradients_of_a_loss_in_chunks() -> None:
    """Its forward makes them, all but all of what is measured: a third of both goes to each held-out microbatch."""
    train = replace(SPEC.train, eval_every=2, eval_microbatches=6, loss_chunk=64)
    costs = {"head": layer_costs(replace(SPEC, train=train))[-1]}
    whole = LayerTime(forward_s=2.9, backward_s=0.1, update_s=1.0)
    profiles = Profiles.of({("a", 0): {"head": whole}})
    seconds = DeviceClock(costs, train, profiles, {("a", 0): DEVICE}).seconds("a", DEVICE, "head")
    assert seconds.forward_s == pytest.approx(1 + 6 / 32)
    assert seconds.backward_s == pytest.approx(2)


def test_others_are_calibrated_by_the_median_of_the_measured() -> None:
    """1.5, 2 and 9 times the estimate on three devices: the fourth is taken for 2 times, over its own speed."""
    factors = {"a": 1.5, "b": 2.0, "c": 9.0}
    profiles = Profiles.of({(name, 0): {"block": measured("block", by)} for name, by in factors.items()})
    seconds = clock(profiles, *"abcd").seconds("d", Device(kind="cpu", speed=4.0), "block")
    assert seconds.microbatch_s == pytest.approx(2 * ESTIMATE["block"] / 4)


def test_a_slow_device_is_slow_with_every_kind_of_layer() -> None:
    """c has only blocks, three times as slow as elsewhere; the head was measured on a: on c it is three times that."""
    profiles = Profiles.of(
        {
            ("a", 0): {"block": measured("block", 1.0), "head": measured("head", 1.2)},
            ("b", 0): {"block": measured("block", 1.0)},
            ("c", 0): {"block": measured("block", 3.0)},
        }
    )
    assert clock(profiles, *"abc").seconds("c", DEVICE, "head").microbatch_s == pytest.approx(3.6 * ESTIMATE["head"])


def test_measurements_of_nodes_that_are_gone_say_nothing() -> None:
    """z is no device of the cluster any more."""
    profiles = Profiles.of({("z", 0): {"block": measured("block", 7.0)}})
    assert clock(profiles, "a").seconds("a", DEVICE, "block").microbatch_s == pytest.approx(ESTIMATE["block"])


def test_equal_measurements_make_equal_profiles() -> None:
    """In whatever order they were told, and as keys of a cache."""
    one, two = (("a", 0), {"block": measured("block", 1.0)}), (("b", 0), {"head": measured("head", 2.0)})
    assert Profiles.of(dict([one, two])) == Profiles.of(dict([two, one]))
    assert hash(Profiles.of(dict([one, two]))) == hash(Profiles.of(dict([two, one])))


def test_a_plan_goes_by_what_was_measured() -> None:
    """b is said to be as fast as a, and takes three times as long: it gets about a quarter of the blocks."""
    profiles = Profiles.of(
        {(name, 0): {kind: measured(kind, by) for kind in COSTS} for name, by in (("a", 1.0), ("b", 3.0))}
    )
    nodes = [node("a"), node("b")]
    plan = planned(SPEC, nodes, profiles=profiles)
    blocks = {stage.node: sum("block" in layer for layer in stage.layers) for stage in plan.workers}
    assert blocks["b"] in (2, 3)
    equal = planned(SPEC, nodes)
    seconds = predict(SPEC, equal.workers, nodes, profiles=profiles)
    assert seconds is not None
    assert seconds > 1.8 * plan.predicted_batch_seconds


def test_measured_links_override_what_is_assumed() -> None:
    """a–c is slow though they share a site: the pipeline is not cut there."""
    slow = LinkProbe(round_trip_s=0.2, bytes_per_s=1e5)
    profiles = Profiles.of(links={("a", "c"): slow})
    plan = planned(SPEC, [node("a"), node("b"), node("c")], profiles=profiles)
    neighbours = {frozenset((link.upper, link.lower)) for link in plan.connections}
    assert neighbours == {frozenset("ab"), frozenset("bc")}
    two = planned(SPEC, [node("a"), node("c")], profiles=profiles)
    assert all(link.is_measured for link in two.connections)
    pair = [node("a"), node("c")]
    seconds = predict(SPEC, planned(SPEC, pair).workers, pair, profiles=profiles)
    assert seconds is not None
    assert seconds > 10


# --- A placement that exists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_plan_is_predicted_as_it_was_planned(schedule: str, groups: int) -> None:
    """With the same measurements the comparison of a plan with itself is a draw."""
    spec = job(reduction_groups=groups, schedule=schedule)
    nodes = [node(f"n{index}", speed=1 + index / 3, site="xxy"[index]) for index in range(3)]
    plan = planned(spec, nodes)
    assert predict(spec, plan.workers, nodes) == pytest.approx(plan.predicted_batch_seconds, rel=1e-12)


def test_a_placement_without_its_node_has_no_time() -> None:
    """b is gone."""
    nodes = [node("a"), node("b")]
    stages = planned(SPEC, nodes).workers
    assert predict(SPEC, stages, nodes[:1]) is None
    assert predict(SPEC, (), nodes) is None


def test_a_straggler_is_seen_in_the_plan_in_force() -> None:
    """One of two replicas takes three times as long: so does the batch; shared by speed it takes 1.5 times as long."""
    spec = job(num_blocks=1, microbatches=8, reduction_groups=4)
    nodes = [node("a"), node("b")]
    stages = tuple(
        WorkerPart(node=name, node_incarnation=f"{name}-1", device_index=0, layers=spec.layers, depth=1, groups=groups)
        for name, groups in (("a", (0, 1)), ("b", (2, 3)))
    )
    slow = Profiles.of(
        {(name, 0): {kind: measured(kind, by) for kind in COSTS} for name, by in (("a", 1.0), ("b", 3.0))}
    )
    even = predict(spec, stages, nodes, links=LinkAssumptions())
    late = predict(spec, stages, nodes, profiles=slow, links=LinkAssumptions())
    assert even is not None
    assert late is not None
    assert late == pytest.approx(3 * even)
    planned_again = planned(spec, nodes, profiles=slow)
    assert planned_again.predicted_batch_seconds < 0.55 * late


def test_seats_of_one_node_share_its_memory() -> None:
    """Two devices of one machine: each has half of what the machine has for boundary states."""
    machine = node("a", num_devices=2, host_bytes=1000)
    assert [DeviceSlot.of(machine, index).host_memory_bytes for index in range(2)] == [500, 500]
