"""Plans on machines of cards by chance: what is computed again, and what the links inside a machine carry."""

import random
from dataclasses import replace

import pytest

from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.connections import PCIE_BYTES_PER_S
from headway.daemon.plan.devices import cuda_reserve
from headway.daemon.plan.planner import make_plan
from headway.stages.spec import RECOMPUTES, ModelSpec, TrainSpec
from tests.rigs.clusters import node

GB = 10**9
CARDS = (  # model, memory in GB, speed in float32 and in bfloat16, GB/s
    ("NVIDIA H100 80GB HBM3", 80, 1.5, 2.0, 2800.0),
    ("NVIDIA A100-SXM4-40GB", 40, 0.6, 0.75, 1300.0),
    ("NVIDIA GeForce RTX 4090", 24, 2.0, 0.5, 850.0),
    ("NVIDIA L40S", 48, 2.1, 0.7, 730.0),
)


def machine(name: str, chance: random.Random) -> NodeRecord:
    """One to four cards of one model, some of whose memory others use."""
    model, memory, float32, bfloat16, bandwidth = chance.choice(CARDS)
    size = round(memory * GB * chance.uniform(0.5, 1.0))
    device = Device(
        kind="cuda",
        model=model,
        capability="8.0",
        memory_bytes=size,
        reserve_bytes=cuda_reserve(size),
        speed=float32,
        bfloat16_speed=bfloat16,
        memory_gb_s=bandwidth,
    )
    cards = tuple(replace(device, index=index) for index in range(chance.randint(1, 4)))
    return replace(node(name), devices=cards)


def card_job(chance: random.Random) -> JobSpec:
    """Two to four billion parameters with a large vocabulary, which few of these cards hold alone."""
    width = chance.choice((2048, 3072))
    model = ModelSpec(
        num_hidden_layers=chance.choice((16, 24)),
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 128,
        num_key_value_heads=8,
        vocab_size=chance.choice((32_768, 131_072)),
    )
    train = TrainSpec(
        microbatches=chance.choice((16, 64)),
        microbatch_size=1,
        sequence_length=chance.choice((2048, 8192)),
        dtype="bfloat16",
        attention_backend="flash",
        recompute="auto",
        loss_chunk=chance.choice((512, 2048)),
        reduction_groups=chance.choice((1, 4)),
    )
    return JobSpec(job=JobSection(name="cards"), model=model, train=train)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 24))])
def test_auto_is_never_slower_and_no_machine_waits_for_its_own_links(seed: int) -> None:
    """Machines of unlike cards: auto is as fast as each fixed choice, within memory. If a link between cards of one
    machine takes longer than the slowest stage, it is PCIe at least that it waits for.
    """
    chance = random.Random(seed)
    spec, nodes = card_job(chance), [machine(f"n{index}", chance) for index in range(chance.randint(1, 3))]
    plan = make_plan(spec, nodes)
    fixed = [make_plan(replace(spec, train=replace(spec.train, recompute=again)), nodes) for again in RECOMPUTES]
    fitting = [each.predicted_batch_seconds for each in fixed if isinstance(each, ClusterPlan)]
    if not isinstance(plan, ClusterPlan):
        assert not fitting
        return
    assert plan.predicted_batch_seconds <= min(fitting, default=plan.predicted_batch_seconds) * (1 + 1e-9)
    assert all(each.device_bytes <= each.device_limit_bytes for each in plan.estimates)
    slowest = max(each.batch_seconds for each in plan.estimates)
    for link in plan.connections:
        if link.upper.partition(":")[0] == link.lower.partition(":")[0] and link.batch_seconds > slowest:
            carried = link.num_microbatches * link.bytes_per_microbatch
            assert carried >= 0.99 * PCIE_BYTES_PER_S * link.batch_seconds


@pytest.mark.parametrize("seed", [0, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 112))])
def test_one_more_card_is_never_slower(seed: int) -> None:
    """One more card of a machine's model, or one more machine: at most slower by what a plan may lose for a worker
    less.
    """
    chance = random.Random(seed)
    spec, nodes = card_job(chance), [machine(f"n{index}", chance) for index in range(chance.randint(1, 3))]
    plan = make_plan(spec, nodes)
    if not isinstance(plan, ClusterPlan):
        return
    first = nodes[0]
    larger = replace(first, devices=(*first.devices, replace(first.devices[0], index=len(first.devices))))
    for more in ([larger, *nodes[1:]], [*nodes, machine("more", chance)]):
        found = make_plan(spec, more)
        assert isinstance(found, ClusterPlan)
        assert found.predicted_batch_seconds <= plan.predicted_batch_seconds * 1.01
