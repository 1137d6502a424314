"""Fault matrix: a worker dies, hangs, stops or raises."""

import os
import signal

import pytest

from headway.daemon.client.job_requests import resume
from headway.daemon.cluster.records import Phase
from headway.daemon.worker.out_of_memory import CUDA_FAULT
from tests.integration.exactness.training import Oracle
from tests.rigs.fault_harness import ROW_S, FaultHarness, at_operation, faulty_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(ROW_S)]


@pytest.mark.parametrize(
    ("stage", "op"),
    [
        pytest.param(stage, op, marks=[] if (stage, op) == (1, "backward") else [pytest.mark.slow])
        for stage in range(3)
        for op in ("forward", "backward", "update")
    ],
)
async def test_worker_sigkill(harness: FaultHarness, oracle: Oracle, stage: int, op: str) -> None:
    """Killed in the middle of a batch: its node's spare goes on with the node's own files."""
    spec = faulty_job(f"kill-{stage}-{op}")
    outcome = await harness.train(spec, at_operation(stage, 10, op=op))
    (struck,) = outcome.struck
    outcome.assert_exact(oracle, hit=frozenset({struck["node"]}))
    assert outcome.num_rollbacks == 1


@pytest.mark.slow
async def test_worker_sigstop_under_a_healthy_daemon(harness: FaultHarness, oracle: Oracle) -> None:
    """It says nothing any more: its daemon kills it."""
    outcome = await harness.train(faulty_job("stop"), at_operation(1, 10, do="stop"))
    outcome.assert_exact(oracle, hit=frozenset({outcome.struck[0]["node"]}))


@pytest.mark.slow
async def test_worker_hangs_with_a_living_heartbeat(harness: FaultHarness, oracle: Oracle) -> None:
    """Its operation counter stands still though there is work: its daemon kills it."""
    outcome = await harness.train(faulty_job("hang"), at_operation(1, 10, do="hang"))
    outcome.assert_exact(oracle, hit=frozenset({outcome.struck[0]["node"]}))


@pytest.mark.slow
@pytest.mark.parametrize("do", ["raise", "out_of_memory"])
async def test_worker_raises(harness: FaultHarness, oracle: Oracle, do: str) -> None:
    """Once: the same batch goes well the second time."""
    outcome = await harness.train(faulty_job(f"once-{do.replace('_', '-')}"), at_operation(2, 10, do=do))
    outcome.assert_exact(oracle, hit=frozenset({outcome.struck[0]["node"]}))


async def test_a_device_out_of_memory(harness: FaultHarness, oracle: Oracle) -> None:
    """The process lives on, the next plan asks less of that device, and neither node nor job has failed."""
    spec = faulty_job("short")
    outcome = await harness.train(spec, at_operation(1, 10, do=CUDA_FAULT))
    outcome.assert_exact(oracle)
    (struck,) = outcome.struck
    (shortage,) = outcome.job.phase.shortages
    assert shortage.node == struck["node"]
    assert outcome.job.phase.failures.num_deaths == 0
    assert outcome.num_rollbacks == 1
    assert any(
        "ran out of memory (it wanted 2 MiB beside 6.5 MiB, of 8 MiB)" in event.text
        for event in outcome.job.events.values()
    )


@pytest.mark.slow
async def test_the_same_error_on_every_retry(harness: FaultHarness, oracle: Oracle) -> None:
    """The budget ends it with its traceback; the state is kept, and a resume after the cure ends in the same bits."""
    spec = faulty_job("poison")
    outcome = await harness.train(spec, at_operation(1, 10, do="raise", times=99), expect=Phase.FAILED)
    assert "InjectedFaultError" in outcome.job.phase.error
    assert 2 <= len(outcome.struck) <= 3
    assert outcome.job.phase.lineage is not None, "its state was not kept"
    generation = outcome.job.phase.generation
    await resume(harness.session, spec.job.name)
    plan = (await harness.until(lambda _, job: job.plan is not None, spec.job.name)).plan
    assert plan is not None
    assert plan.generation > generation
    assert plan.boundary == 8, "it did not go on from its newest boundary"
    cured = await harness.wait(spec)
    cured.assert_exact(oracle, strikes=0, hit=frozenset(cured.pids_before))


@pytest.mark.slow
async def test_frozen_node_comes_back_after_it_was_replaced(harness: FaultHarness, oracle: Oracle) -> None:
    """Daemon and worker stop for longer than the lease, the others go on; back again, its old frames move nothing."""
    spec = faulty_job("frozen", batches=60)

    async def freeze() -> None:
        job = await harness.until_batch(spec.job.name, 12)
        assert job.plan is not None
        node = job.plan.workers[1].node
        pids = [harness.cluster.node_pids[node], job.workers_of(job.plan)[1].pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            generation = job.plan.generation
            await harness.until(lambda _, job: job.plan is not None and job.plan.generation > generation, spec.job.name)
        finally:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)

    outcome = await harness.train(spec, during=freeze)
    outcome.assert_exact(oracle, strikes=0)
    assert outcome.num_rollbacks >= 1


async def test_second_failure_during_recovery(harness: FaultHarness, oracle: Oracle) -> None:
    """The worker that takes over dies while it loads."""
    load = {"at": "load", "when": {"stage": 1}, "do": "kill"}
    outcome = await harness.train(
        faulty_job("twice"), at_operation(1, 10), {**load, "when": {"stage": 1, "boundary": 8}}
    )
    outcome.assert_exact(oracle, strikes=2, hit=frozenset(outcome.pids_before))


@pytest.mark.slow
async def test_node_joins_during_a_recovery(harness: FaultHarness, oracle: Oracle) -> None:
    """A fifth node comes while the rest goes back."""
    spec = faulty_job("join-recovery", batches=40)

    async def join() -> None:
        await harness.until_struck()
        await harness.cluster.add_node()

    outcome = await harness.train(spec, at_operation(1, 10), during=join)
    outcome.assert_exact(oracle, hit=frozenset(outcome.pids_before))
