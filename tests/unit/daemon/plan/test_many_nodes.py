"""Plans of many nodes: near the bound, within memory and the job's wishes, the same every time."""

import importlib.util
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from headway.daemon.client.plan_simulation import forecast
from headway.daemon.cluster.records import NodeRecord, replicas_of
from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.plan import planner
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.devices import DeviceSlot, Kind, Kinds
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.plan.planner import ClusterPlan, make_plan
from headway.stages.schedule.stage_schedule import schedule_depth
from tests.rigs.clusters import job, node, planned, refused

BENCH = Path(__file__).resolve().parents[4] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/planner.py, with its clusters and its bound."""
    if not BENCH.exists():
        pytest.skip("the benches are in a checkout only")
    monkeypatch.syspath_prepend(str(BENCH))
    specification = importlib.util.spec_from_file_location("bench_planner", BENCH / "planner.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def some_nodes(number: int, seed: int = 0, **kwargs: object) -> list[NodeRecord]:
    """Speeds and sites by chance."""
    chance = random.Random(seed)
    return [
        node(f"n{index}", speed=chance.uniform(1, 8), site=chance.choice("xyz"), **kwargs)  # type: ignore[arg-type]
        for index in range(number)
    ]


def check(plan: ClusterPlan, num_layers: int, num_groups: int) -> None:
    """Every layer once, every group once, every device once."""
    stages = [plan.workers[positions[0]] for positions in replicas_of(plan.workers)]
    assert sum(len(stage.layers) for stage in stages) == num_layers
    assert len({layer for stage in stages for layer in stage.layers}) == num_layers
    for positions in replicas_of(plan.workers):
        if len(positions) > 1:
            held = [plan.workers[position].groups for position in positions]
            assert sorted(group for groups in held for group in groups) == list(range(num_groups))
            assert held == sorted(held)
    assert len({(stage.node, stage.device_index) for stage in plan.workers}) == len(plan.workers)
    for estimate in plan.estimates:
        assert not estimate.device_limit_bytes or estimate.device_bytes <= estimate.device_limit_bytes
        assert not estimate.host_limit_bytes or estimate.host_bytes <= estimate.host_limit_bytes


@pytest.mark.parametrize("seed", [0, 1])
def test_sixty_four_nodes_are_near_the_bound(bench: ModuleType, seed: int) -> None:
    """200 layers in 20 sites: no plan is below the bound, and ours is not 5 % over it."""
    nodes = bench.cluster(64, seed)
    plan = planned(bench.JOB, nodes, links=bench.LINKS)
    check(plan, 200, 64)
    assert 1 <= plan.predicted_batch_seconds / bench.bound(bench.JOB, nodes) <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_sixty_four_nodes_take_as_long_as_predicted(bench: ModuleType, seed: int) -> None:
    """Stages of two to seven unlike replicas each: the simulated schedule loses no more than 7 % to their turns."""
    nodes = bench.cluster(64, seed)
    plan = planned(bench.JOB, nodes, links=bench.LINKS)
    run = forecast(bench.JOB, plan.workers, nodes, links=bench.LINKS)
    assert run.step_seconds <= 1.07 * plan.predicted_batch_seconds


@pytest.mark.slow
def test_a_thousand_nodes_are_near_the_bound(bench: ModuleType) -> None:
    """Five nodes for each layer: most stages are one layer with replicas. The bound knows nothing of the way through so
    long a pipe, which 256 microbatches do not hide; the prediction does, and says how many would."""
    nodes = bench.cluster(1000, 0)
    plan = planned(bench.JOB, nodes, links=bench.LINKS)
    check(plan, 200, 64)
    assert 1 <= plan.distance.hidden_batch_s / bench.bound(bench.JOB, nodes) <= 1.15
    assert plan.distance.least_microbatches > bench.JOB.train.microbatches
    assert plan.predicted_batch_seconds > plan.distance.hidden_batch_s


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe"])
@pytest.mark.parametrize(("m", "groups"), [(8, 1), (16, 4), (10, 4)])
def test_all_schedules_and_groups_make_valid_plans(schedule: str, m: int, groups: int) -> None:
    """Twenty unlike nodes, groups that divide the batch and groups that do not."""
    spec = job(num_blocks=14, schedule=schedule, microbatches=m, reduction_groups=groups)
    nodes = some_nodes(20)
    plan = planned(spec, nodes)
    check(plan, 16, groups)
    assert len(replicas_of(plan.workers)) <= m
    fastest = max(nodes, key=lambda each: each.devices[0].speed)
    assert plan.predicted_batch_seconds < planned(spec, [fastest]).predicted_batch_seconds / 1.4


def test_many_nodes_within_memory() -> None:
    """Room for three blocks each, more in flight the earlier the stage: every worker keeps to it."""
    spec = job(num_blocks=30, microbatches=32, reduction_groups=4)
    block = layer_costs(spec)[1]
    depth = schedule_depth("2bw", 32, 20, 0)
    limit = 3 * (block.resident_bytes + 4 * block.group_bytes) + 3 * depth * block.activation_bytes
    plan = planned(spec, some_nodes(20, memory_bytes=limit))
    check(plan, 32, 4)
    assert refused(spec, some_nodes(20, memory_bytes=limit // 20)).startswith("does not fit: its layers need ")


def test_many_nodes_within_host_memory() -> None:
    """Six boundary states of four blocks at most."""
    spec = job(num_blocks=30, microbatches=32)
    kept = 6 * layer_costs(spec)[1].state_bytes
    plan = planned(spec, some_nodes(20, host_bytes=4 * kept))
    check(plan, 32, 1)
    reason = refused(spec, some_nodes(20, host_bytes=kept))
    assert reason.startswith("does not fit: the boundary states that nodes keep of it need ")
    assert " and 16 more nodes have " in reason


def test_a_small_folder_of_layer_files_is_named() -> None:
    """One node has room for nothing in /dev/shm: the refusal names that folder, its room, and what is needed."""
    spec = job(num_blocks=30, microbatches=32)
    node = replace(some_nodes(1, host_bytes=64 << 20)[0], layer_folder="/dev/shm/headway")
    assert (
        f"64 MiB the largest: /dev/shm/headway of {node.name} has 64 MiB; "
        "more room there, or another store_dir, would help; under [fault], snapshot_every = 0 keeps "
    ) in refused(spec, [node])


@pytest.mark.parametrize(("least", "most"), [(0, 5), (18, 0), (20, 20)])
def test_many_nodes_as_the_job_wishes(least: int, most: int) -> None:
    """max_nodes of twenty; min_nodes though fewer would be as fast."""
    spec = job(num_blocks=8, reduction_groups=4, placement=PlacementSpec(min_nodes=max(1, least), max_nodes=most))
    plan = planned(spec, [node(f"n{index}", speed=1 + index / 7) for index in range(20)])
    check(plan, 10, 4)
    used = len({stage.node for stage in plan.workers})
    assert used >= least
    assert not most or used <= most


def test_slow_links_decide_where_stages_part() -> None:
    """Three sites behind 100 kB/s: one site alone is better than any pipeline across."""
    nodes = some_nodes(18)
    plan = planned(job(num_blocks=14, reduction_groups=2), nodes, links=LinkAssumptions(far_bytes_per_s=1e5))
    sites = {each.name: each.site for each in nodes}
    assert len({sites[stage.node] for stage in plan.workers}) == 1


def test_many_nodes_in_any_order_give_the_same_plan() -> None:
    """What is there decides, not how it was listed; and asking again changes nothing."""
    spec = job(num_blocks=20, microbatches=32, reduction_groups=4)
    nodes = some_nodes(24)
    plan = make_plan(spec, nodes)
    assert plan == make_plan(spec, nodes[::-1]) == make_plan(spec, [*nodes[5:], *nodes[:5]])


def test_many_nodes_of_two_classes_share_no_stage() -> None:
    """Every second one has another arithmetic."""
    spec = job(num_blocks=14, microbatches=16, reduction_groups=4)
    nodes = [node(f"n{index}", speed=1 + index / 9, arithmetic_class="ab"[index % 2]) for index in range(20)]
    plan = planned(spec, nodes)
    classes = {each.name: each.arithmetic_class for each in nodes}
    for positions in replicas_of(plan.workers):
        assert len({classes[plan.workers[position].node] for position in positions}) == 1


def test_many_equal_nodes_are_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty equal nodes, twelve layers: no two of them change places, so each is looked at a few times, and not once
    for each pair of the others.
    """
    looks: list[str] = []
    kind_of = Kinds.of

    def counted(kinds: Kinds, slot: DeviceSlot) -> Kind:
        looks.append(slot.node)
        return kind_of(kinds, slot)

    monkeypatch.setattr(Kinds, "of", counted)
    plan = planned(job(num_blocks=10), [node(f"n{index}") for index in range(60)])
    assert len(plan.workers) <= 12
    assert len(looks) <= 100 * 60


def test_a_layer_that_fits_nowhere_is_refused_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred unlike nodes, each with room for a hundredth of a layer: no order of them is tried."""
    monkeypatch.setattr(planner, "Search", None)
    assert "layers need" in refused(job(), some_nodes(200, memory_bytes=10_000))


def test_one_node_with_room_has_what_fits_on_no_other() -> None:
    plan = planned(job(), [*some_nodes(20, memory_bytes=10_000), node("large", memory_bytes=1 << 40)])
    assert {worker.node for worker in plan.workers} == {"large"}
