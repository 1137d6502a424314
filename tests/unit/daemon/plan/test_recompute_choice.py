"""With `recompute = "auto"` the plan chooses for each stage what its backward computes again."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from headway.daemon.client.plan_simulation import forecast
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.measurements import LayerTime
from headway.daemon.cluster.records import Device, NodeRecord, WorkerPart
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import layer_costs, microbatch_seconds
from headway.daemon.plan.planner import make_plan
from headway.daemon.plan.predicted_time import predict
from headway.daemon.plan.profiles import DeviceClock, Profiles
from headway.daemon.plan.rebalance import is_same
from headway.stages.spec import RECOMPUTES, timed_kind
from tests.rigs.clusters import job, node, planned, refused

WIDE = {"attention_backend": "math", "sequence_length": 512, "microbatch_size": 2}
"""Most of a block's memory are its scores."""


def auto_job(**settings: object) -> JobSpec:
    return job(recompute="auto", **(WIDE | settings))  # type: ignore[arg-type]


def needed(recompute: str, num_blocks: int = 8) -> int:
    """The bytes of the whole model on one device."""
    return planned(job(recompute=recompute, num_blocks=num_blocks, **WIDE), [node("a")]).estimates[0].device_bytes  # type: ignore[arg-type]


def choices(plan: ClusterPlan) -> list[str]:
    return [stage.recompute for stage in plan.workers]


def test_a_device_gets_the_fastest_choice_that_fits() -> None:
    """Room for all that layers keep → none; a byte less → attention; a byte less than that → block; then nothing."""
    sizes = [needed(recompute) for recompute in RECOMPUTES]
    assert sizes == sorted(sizes, reverse=True)
    for recompute, size in zip(RECOMPUTES, sizes, strict=True):
        plan = planned(auto_job(), [node("a", memory_bytes=size)])
        assert choices(plan) == [recompute]
        assert plan.estimates[0].device_bytes == size
    reason = refused(auto_job(), [node("a", memory_bytes=sizes[-1] - 1)])
    assert "does not fit" in reason
    assert "recompute" not in reason


def test_a_refusal_names_auto_as_a_remedy() -> None:
    """A job that keeps everything and does not fit → what would help."""
    reason = refused(job(**WIDE), [node("a", memory_bytes=needed("block"))])  # type: ignore[arg-type]
    assert 'recompute = "auto"' in reason


def test_without_a_limit_nothing_is_computed_again() -> None:
    """A device that takes anything; and a job that chooses itself has no choice in its plan."""
    assert choices(planned(auto_job(), [node("a")])) == ["none"]
    assert choices(planned(job(recompute="block"), [node("a")])) == [""]


def test_each_stage_has_its_own_choice() -> None:
    """A small card beside a large one: the small one computes again what it has no room for, the large one nothing."""
    nodes = [node("large"), node("small", memory_bytes=needed("none", 4) // 2)]
    plan = planned(auto_job(placement=PlacementSpec(min_nodes=2)), nodes)
    by_node = {stage.node: stage.recompute for stage in plan.workers}
    assert by_node["large"] == "none"
    assert by_node["small"] in ("attention", "block")
    assert any("computed again" in line for line in plan.explanation() if by_node["small"] in line)


def test_compiled_blocks_keep_nothing_elementwise() -> None:
    """Where there is room for everything, their code makes norms and the MLP's product again all the same."""
    assert choices(planned(auto_job(compile=True), [node("a")])) == ["elementwise"]
    assert choices(planned(auto_job(compile=True), [node("a", memory_bytes=needed("attention"))])) == ["attention"]
    limit = (needed("attention") + needed("block")) // 2
    assert choices(planned(auto_job(compile=True), [node("a", memory_bytes=limit)])) == ["block"]


def random_cluster(chance: random.Random) -> list[NodeRecord]:
    sizes = [needed(recompute, 4) for recompute in RECOMPUTES]
    return [
        node(
            f"n{index}",
            speed=chance.choice([0.5, 1.0, 2.0]),
            memory_bytes=round(chance.uniform(0.2, 1.1) * chance.choice(sizes)),
        )
        for index in range(chance.choice([2, 3, 10, 14]))
    ]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 12))])
def test_auto_is_never_slower_than_one_choice_for_all(seed: int) -> None:
    """Any cluster of limited devices, few or many: as fast as the best fixed choice, within each device's memory."""
    chance = random.Random(seed)
    nodes, settings = random_cluster(chance), {"num_blocks": 8, "reduction_groups": chance.choice([1, 2])}
    plan = make_plan(auto_job(**settings), nodes)
    fixed = [make_plan(job(recompute=recompute, **(WIDE | settings)), nodes) for recompute in RECOMPUTES]  # type: ignore[arg-type]
    fitting = [each.predicted_batch_seconds for each in fixed if isinstance(each, ClusterPlan)]
    if not isinstance(plan, ClusterPlan):
        assert not fitting
        return
    # The search of many devices is not exact.
    tolerance = 1.011 if len(nodes) <= 3 else 1.1
    assert plan.predicted_batch_seconds <= tolerance * min(fitting, default=plan.predicted_batch_seconds)
    for estimate in plan.estimates:
        assert estimate.device_bytes <= estimate.device_limit_bytes
    for one, other in pairwise(plan.workers):
        assert one.layers != other.layers or one.recompute == other.recompute


def test_the_plan_in_force_is_predicted_by_its_own_choice() -> None:
    """A stage that computes blocks again → predicted and simulated slower than the same stage that keeps all."""
    nodes, spec = [node("a")], auto_job()
    stages = [
        (WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=spec.layers, depth=1, recompute=name),)
        for name in RECOMPUTES
    ]
    seconds = [predict(spec, each, nodes) or 0.0 for each in stages]
    assert seconds == sorted(set(seconds))
    simulated = [forecast(spec, each, nodes).step_seconds for each in stages]
    assert simulated == sorted(set(simulated))
    assert not is_same(stages[0], stages[1])


def test_a_plan_of_an_older_leader_has_no_choice() -> None:
    """Its record lacks the field → the job's own; a newer one keeps it."""
    stage = planned(auto_job(), [node("a")]).workers[0]
    raw = encode(stage)
    assert decode(raw, WorkerPart).recompute == "none"
    assert decode(raw.replace(b',"recompute":"none"', b""), WorkerPart).recompute == ""


# --- Measured times ---------------------------------------------------------------------------------------------------

SPEC = auto_job(num_blocks=4)
COSTS = {timed_kind(cost.name, name): cost for name in RECOMPUTES for cost in layer_costs(SPEC, name)}
DEVICE = Device(kind="cpu")


def seconds_of(profiles: Profiles, name: str = "a") -> dict[str, float]:
    """A microbatch of a block, by choice."""
    clock = DeviceClock(COSTS, SPEC.train, profiles, {("a", 0): DEVICE, ("b", 0): DEVICE})
    return {
        recompute: clock.seconds(name, DEVICE, timed_kind("block.0", recompute)).microbatch_s
        for recompute in RECOMPUTES
    }


def timed(recompute: str, factor: float) -> dict[str, LayerTime]:
    """A block's times, so many times the estimate of its choice."""
    seconds = factor * microbatch_seconds(COSTS[timed_kind("block.0", recompute)], DEVICE, SPEC.train)
    return {timed_kind("block.0", recompute): LayerTime(forward_s=seconds / 4, backward_s=seconds * 3 / 4)}


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_time_counts_for_the_choice_under_which_it_was_measured(recompute: str) -> None:
    """Twice the estimate, measured under one choice: each choice takes twice its own estimate there and elsewhere."""
    profiles = Profiles.of({("a", 0): timed(recompute, 2.0)})
    plain = seconds_of(Profiles())
    for name in ("a", "b"):
        assert seconds_of(profiles, name) == pytest.approx({choice: 2 * plain[choice] for choice in RECOMPUTES})


def test_measurements_never_make_more_work_the_faster_choice() -> None:
    """One device was measured slow while it kept all, another fast while it computed blocks again."""
    profiles = Profiles.of({("a", 0): timed("none", 3.0), ("b", 0): timed("block", 0.5)})
    for name in ("a", "b"):
        found = list(seconds_of(profiles, name).values())
        assert found == sorted(found)


def test_a_device_out_of_memory_gets_another_choice() -> None:
    """The same device with less room than before, as after a shortage → its stage computes blocks again."""
    size = needed("none")
    roomy = DeviceSlot.of(node("a", memory_bytes=size), 0)
    assert roomy.room_bytes == size
    assert choices(planned(auto_job(), [node("a", memory_bytes=size)])) == ["none"]
    assert choices(planned(auto_job(), [node("a", memory_bytes=int(0.9 * size))])) != ["none"]


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))])
def test_auto_is_never_slower_than_a_fixed_choice(seed: int) -> None:
    """On clusters by chance, with memory that is short: also where a stage needs depth, or replicas."""
    chance = random.Random(seed)
    settings = {"microbatches": chance.choice((8, 32)), "reduction_groups": chance.choice((1, 4))}
    spec = job(num_blocks=(number := chance.choice((6, 12))), recompute="auto", **WIDE, **settings)  # type: ignore[arg-type]
    share = needed("block", number) / (count := chance.randint(2, 6))
    nodes = [
        node(f"n{index}", speed=chance.choice((1.0, 2.5)), memory_bytes=round(share * chance.uniform(1.0, 6.0)))
        for index in range(count)
    ]
    links = LinkAssumptions(site_round_trip_s=chance.choice((1e-4, 1.0)))
    fixed = [
        make_plan(replace(spec, train=replace(spec.train, recompute=recompute)), nodes, links=links)
        for recompute in RECOMPUTES
    ]
    known = [plan.predicted_batch_seconds for plan in fixed if isinstance(plan, ClusterPlan)]
    plan = make_plan(spec, nodes, links=links)
    if known:
        assert isinstance(plan, ClusterPlan)
        assert plan.predicted_batch_seconds <= min(known) * (1 + 1e-9)
