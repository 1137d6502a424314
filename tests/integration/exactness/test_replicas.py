"""The promise with several workers of a stage: any number of replicas, their deaths and their changes move no bit."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import job_of, submit
from headway.daemon.client.node_requests import drain, release
from headway.daemon.local.cluster import LocalCluster
from tests.chaos.checker import PlanSeen
from tests.integration.exactness.training import MODEL, Oracle, assert_same_bits, finished
from tests.rigs.fault_harness import FaultHarness, at_operation
from tests.rigs.replicas import replicated_job

pytestmark = pytest.mark.asyncio(loop_scope="session")


def shape_of(plan: PlanSeen) -> tuple[int, ...]:
    """Return the number of workers of each stage."""
    return tuple(sum(other == layers for other in plan.stages) for layers in dict.fromkeys(plan.stages))


# --- Undisturbed ------------------------------------------------------------------------------------------------------


SHAPES_AND_LINKS = [
    pytest.param(shape, link, id=f"{'-'.join(map(str, shape))}-{link}", marks=marks)
    for shape, link, marks in (
        ((1,), "grpc", pytest.mark.slow),
        ((2,), "grpc", pytest.mark.slow),
        ((3,), "grpc", ()),
        ((2, 1, 2), "grpc", ()),
        ((2, 1, 2), "collective", ()),
    )
]


@pytest.mark.parametrize(("shape", "link"), SHAPES_AND_LINKS)
async def test_any_number_of_replicas_gives_the_same_bits(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path, shape: tuple[int, ...], link: str
) -> None:
    """Eight microbatches in four groups, on one worker of a stage, on two, on three and on 2-1-2, linked either way.
    Each of three does its whole update; others share it."""
    share_updates: Literal["always", "never"] = "never" if shape == (3,) else "always"
    name = f"replicas-{'-'.join(map(str, shape))}-{link}"
    spec = replicated_job(name, *shape, link=link, share_updates=share_updates)
    async with ClusterSession(cluster.address) as session:
        await submit(session, spec)
        result = await finished(session, spec.job.name, tmp_path)
        job = job_of(await session.view(), spec.job.name)
    assert_same_bits(result, oracle(spec))
    (began,) = [event.text for event in job.events.values() if event.text.startswith("Training since batch 0")]
    assert ("replicas" in began) == (max(shape) > 1), began
    assert job.plan is None or [stage.shares_update for stage in job.plan.workers] == [
        share_updates == "always" and len(job.plan.replicas[job.plan.stage_index(position)]) > 1
        for position in range(len(job.plan.workers))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (2, 3)], ids=lambda shape: "-".join(map(str, shape)))
async def test_replicas_of_every_schedule_give_the_same_bits(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path, shape: tuple[int, ...], schedule: str
) -> None:
    """Three groups of unequal size (m = 8) on stages of unequal width, without delay."""
    name = f"{schedule}-{'-'.join(map(str, shape))}"
    spec = replicated_job(name, *shape, reduction_groups=3, schedule=schedule)
    async with ClusterSession(cluster.address) as session:
        await submit(session, spec)
        result = await finished(session, name, tmp_path)
    assert_same_bits(result, oracle(spec))


# --- Deaths and changes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "microbatch", "op"),
    [
        pytest.param(0, 3, "backward", id="follower of the first stage", marks=pytest.mark.slow),
        pytest.param(0, None, "orthogonalize", id="one whose share is on its way"),
        pytest.param(2, 0, "forward", id="lead of the last stage", marks=pytest.mark.slow),
        pytest.param(2, 3, "backward", id="follower of the last stage", marks=pytest.mark.slow),
        pytest.param(0, 0, "backward", id="lead of the first stage", marks=pytest.mark.slow),
        pytest.param(1, 3, "backward", id="one between two", marks=pytest.mark.slow),
    ],
)
async def test_a_replica_that_is_killed_in_the_middle_of_a_batch(
    harness: FaultHarness, oracle: Oracle, stage: int, microbatch: int | None, op: str
) -> None:
    """2-1-2: everybody goes back to the newest boundary; the checker finds every microbatch once in the weights."""
    spec = replicated_job(f"killed-{stage}-{microbatch}".lower(), 2, 1, 2, batches=24)
    fault = at_operation(stage, 10, op=op)
    if microbatch is not None:
        fault["when"]["microbatch"] = microbatch
    outcome = await harness.train(spec, fault)
    (struck,) = outcome.struck
    outcome.assert_exact(oracle, hit=frozenset({struck["node"]}))
    assert outcome.num_rollbacks == 1
    plans = harness.history(spec, outcome.struck).plans
    assert {shape_of(plan) for plan in plans} == {(2, 1, 2)}


@pytest.mark.slow  # the planner's own shape follows from speeds that a busy machine measures
async def test_a_planned_change_to_another_shape(harness: FaultHarness, oracle: Oracle) -> None:
    """The planner's own 2-2-1 loses a node to a drain while it trains, and goes on in another shape: the same bits."""
    spec = replicated_job("reshaped", batches=60)
    spec = replace(spec, model=replace(MODEL, num_hidden_layers=2))
    name, away = spec.job.name, ""

    async def leave() -> None:
        nonlocal away
        job = await harness.until_batch(name, 6)
        assert job.plan is not None
        away = job.plan.workers[job.plan.replicas[0][-1]].node
        await drain(harness.session, away)
        generation = job.plan.generation
        await harness.until(lambda _, job: job.plan is not None and job.plan.generation > generation, name)

    await harness.all_nodes_up(5)  # those of the test before may still be starting
    try:
        outcome = await harness.train(spec, during=leave)
    finally:
        if away:
            await release(harness.session, away)
    outcome.assert_exact(oracle, strikes=0, hit=frozenset(outcome.pids_before))
    assert outcome.num_rollbacks == 0
    shapes = [shape_of(plan) for plan in harness.history(spec, []).plans]
    assert len(set(shapes)) > 1, shapes
    assert max(map(max, shapes)) > 1, "no stage ever had replicas"
