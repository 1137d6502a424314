"""What a plan for cards says of a job that will not run well there."""

from dataclasses import replace

import pytest

from headway.daemon.client.preview import preview
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.devices import cuda_reserve
from headway.daemon.plan.planner import make_plan
from headway.stages.spec import ModelSpec, TrainSpec
from tests.rigs.clusters import node, refused

GB = 10**9


def cards(*cards: Device) -> list[NodeRecord]:
    """Each on a machine of its own."""
    return [replace(node(f"n{index}"), devices=(card,)) for index, card in enumerate(cards)]


def card(model: str = "NVIDIA H100 80GB HBM3", capability: str = "9.0", gigabytes: int = 80) -> Device:
    memory = gigabytes * GB
    return Device(
        kind="cuda",
        model=model,
        capability=capability,
        memory_bytes=memory,
        reserve_bytes=cuda_reserve(memory),
        speed=1.5,
        bfloat16_speed=2.0,
        memory_gb_s=2800.0,
    )


def small_job(**train: object) -> JobSpec:
    model = ModelSpec(num_hidden_layers=8, hidden_size=1024, intermediate_size=4096, num_attention_heads=8)
    return JobSpec(job=JobSection(name="demo"), model=model, train=TrainSpec(**train))  # type: ignore[arg-type]


def told(spec: JobSpec, nodes: list[NodeRecord], *named: str) -> str:
    return " ".join(preview(spec, nodes, named=frozenset(named))[0].hints)


@pytest.mark.parametrize(("size", "share"), [(1, "70%"), (2, "35%"), (3, "23%")])
def test_small_microbatches_are_told_what_adding_gradients_takes(size: int, share: str) -> None:
    """10 bytes a parameter at 2.8 TB/s over 6 operations a parameter and token at 600 TFLOP/s."""
    spec = small_job(microbatch_size=size, sequence_length=512, microbatches=8)
    assert f"{10 / 2.8e12 / (6 * 512 * size / 600e12):.0%}" == share
    found = told(spec, cards(card()))
    assert f"A microbatch has {512 * size:,} tokens: a card adds up its gradients for {share} of the time" in found
    assert "17% or less" in found


def test_large_microbatches_and_cpus_are_told_nothing() -> None:
    assert not told(small_job(microbatch_size=4, sequence_length=512, microbatches=8), cards(card()))
    assert not told(small_job(microbatch_size=1, sequence_length=64), [node("a")])


def test_an_old_card_that_makes_a_job_float32_is_named() -> None:
    """One T4 beside an H100: the whole job is in float32 unless the file says otherwise."""
    spec, old = small_job(microbatch_size=8, sequence_length=512), card("Tesla T4", "7.5", 16)
    why = "float32, because 1 of 2 devices have no products in bfloat16 (compute capability 7.5)"
    assert why in told(spec, cards(card(), old))
    assert not told(spec, cards(card(), card()))
    assert not told(spec, cards(old, old))  # nobody is held back
    assert not told(spec, cards(card(), old), "train.dtype")


def test_a_small_reserve_is_told() -> None:
    spec = small_job(microbatch_size=8, sequence_length=512)
    assert "The reserve of n0 is below 1 GiB a card" in told(spec, cards(replace(card(), reserve_bytes=GB // 2)))


def test_a_loss_too_large_for_small_cards_names_the_chunk_that_fits() -> None:
    """128 k words at 8192 tokens are 12.6 GB of logits, on cards of 12 GB: the named chunk fits, one of twice as many
    rows does not.
    """
    model = ModelSpec(num_hidden_layers=4, hidden_size=1024, num_attention_heads=8, vocab_size=131_072)
    train = TrainSpec(microbatch_size=4, sequence_length=2048, dtype="bfloat16", attention_backend="flash")
    spec, nodes = JobSpec(job=JobSection(name="demo"), model=model, train=train), cards(*[card(gigabytes=12)] * 4)
    reason = refused(spec, nodes)
    assert "the head alone would fit with loss_chunk = " in reason
    rows = int(reason.partition("loss_chunk = ")[2].partition(";")[0])
    assert rows & (rows - 1) == 0
    fitting = make_plan(replace(spec, train=replace(train, loss_chunk=rows)), nodes)
    assert isinstance(fitting, ClusterPlan) or "the head alone" not in fitting.reason
    larger = refused(replace(spec, train=replace(train, loss_chunk=2 * rows)), nodes)
    assert f"the head alone would fit with loss_chunk = {rows}; " in larger
