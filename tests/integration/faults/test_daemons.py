"""Fault matrix: a daemon, or a whole machine, dies, hangs, flaps or comes back."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.node_requests import drain, release
from headway.daemon.cluster.records import PlanRecord
from headway.daemon.jobs.job import FaultSpec
from tests.integration.exactness.training import Oracle
from tests.rigs.fault_harness import (
    ROW_S,
    SNAPSHOT_EVERY,
    FaultHarness,
    at_operation,
    fault_harness,
    faulty_job,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(ROW_S)]


@pytest.mark.parametrize(
    "stage",
    [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)],
    ids=["first", "middle", "last"],
)
async def test_daemon_sigkill(harness: FaultHarness, oracle: Oracle, stage: int) -> None:
    """Daemon, worker and files of a node are gone at once: the copies on other nodes serve."""
    outcome = await harness.train(faulty_job(f"daemon-{stage}"), at_operation(stage, 10, do="kill_parent"))
    outcome.assert_exact(oracle, hit=frozenset({outcome.struck[0]["node"]}))


@pytest.mark.slow  # the short soak kills leaders too
async def test_leaders_daemon_killed(harness: FaultHarness, oracle: Oracle) -> None:
    """Whoever decides is the one that dies, in the middle of a batch that it computes a stage of."""
    spec = faulty_job("leader", num_nodes=4, batches=40)
    leader = ""

    async def strike() -> None:
        nonlocal leader
        job = await harness.until_batch("leader", 5)
        assert job.plan is not None
        leader = await harness.leader_among(_nodes_of(job.plan))
        when = {"node": leader, "op": "backward", "microbatch": 3}
        harness.arm({"at": "operation", "when": when, "do": "kill_parent"})
        await harness.until_struck()

    outcome = await harness.train(spec, during=strike)
    outcome.assert_exact(oracle, hit=frozenset({leader}))
    assert outcome.struck[0]["node"] == leader


@pytest.mark.slow
async def test_daemon_sigstop(harness: FaultHarness, oracle: Oracle) -> None:
    """A daemon that hangs loses its lease; its worker, alive, is replaced with it, and both come back harmless."""
    spec = faulty_job("daemon-stop", batches=40)

    async def thaw() -> None:
        struck = await harness.until_struck()
        generation = struck["generation"]
        try:
            await harness.until(lambda _, job: job.plan is not None and job.plan.generation > generation, spec.job.name)
        finally:
            os.kill(harness.cluster.node_pids[struck["node"]], signal.SIGCONT)

    outcome = await harness.train(spec, at_operation(1, 10, do="stop_parent"), during=thaw)
    outcome.assert_exact(oracle)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [2, 3])
async def test_two_machines_at_once(harness: FaultHarness, oracle: Oracle, copies: int) -> None:
    """With two copies the checkpoint serves, with three a buddy does."""
    spec = faulty_job(f"two-{copies}")
    spec = replace(
        spec, fault=FaultSpec(snapshot_every=SNAPSHOT_EVERY, copies=copies, checkpoint_every=8, link_timeout_s=20.0)
    )
    outcome = await harness.train(
        spec, at_operation(0, 14, op="forward", do="kill_parent"), at_operation(1, 14, op="forward", do="kill_parent")
    )
    outcome.assert_exact(oracle, strikes=2, hit=frozenset(note["node"] for note in outcome.struck))


@pytest.mark.slow
async def test_donor_dies_in_the_middle_of_a_transfer(harness: FaultHarness, oracle: Oracle) -> None:
    """The node that hands over a lost node's layers is killed while it does."""
    spec = faulty_job("donor")
    spec = replace(spec, fault=replace(spec.fault, copies=3))
    transfer = {"at": "transfer.chunk", "when": {"boundary": 8}, "do": "kill", "after": 0}
    outcome = await harness.train(spec, at_operation(1, 10, do="kill_parent"), transfer)
    outcome.assert_exact(oracle, strikes=2, hit=frozenset(outcome.pids_before))


@pytest.mark.slow
async def test_coordinator_dies_between_a_plan_and_its_start(harness: FaultHarness, oracle: Oracle) -> None:
    """The leader is killed right after it has written the recovery's plan."""
    wrote = {"at": "leader.wrote", "when": {"phase": "recovering"}, "do": "kill"}
    outcome = await harness.train(faulty_job("between"), at_operation(1, 10), wrote)
    outcome.assert_exact(oracle, strikes=2, hit=frozenset(outcome.pids_before))


@pytest.mark.slow
async def test_coordinator_dies_before_it_writes_a_plan(harness: FaultHarness, oracle: Oracle) -> None:
    """The leader is killed when it has decided and not written."""
    before = {"at": "leader.before_write", "when": {"phase": "recovering"}, "do": "kill"}
    outcome = await harness.train(faulty_job("before"), at_operation(1, 10), before)
    outcome.assert_exact(oracle, strikes=2, hit=frozenset(outcome.pids_before))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["preparing", "running", "stopping", "finished"])
async def test_leader_is_killed_in_each_phase(harness: FaultHarness, oracle: Oracle, phase: str) -> None:
    """Right after it has written that the job is in this phase: the next leader goes on from there."""
    spec = faulty_job(f"phase-{phase}")

    async def strike() -> None:
        await harness.until_struck()

    wrote = {"at": "leader.wrote", "when": {"job": spec.job.name, "phase": phase}, "do": "kill"}
    outcome = await harness.train(spec, wrote, during=strike)
    outcome.assert_exact(oracle, hit=frozenset(note["node"] for note in outcome.struck))


@pytest.mark.slow
async def test_leader_is_killed_in_a_planned_change(harness: FaultHarness, oracle: Oracle) -> None:
    """A node of the plan drains; the leader dies when it has written that its layers are to be moved."""
    spec = faulty_job("phase-changing", batches=40)
    changing = {"at": "leader.wrote", "when": {"job": spec.job.name, "phase": "changing"}, "do": "kill"}

    async def drain_one() -> None:
        job = await harness.until_batch(spec.job.name, 5)
        assert job.plan is not None
        node = job.plan.workers[1].node
        await drain(harness.session, node)
        try:
            await harness.until(lambda _, job: job.plan is not None and node not in _nodes_of(job.plan), spec.job.name)
        finally:
            await harness.until(lambda view, _: node in view.nodes, spec.job.name)
            await release(harness.session, node)

    outcome = await harness.train(spec, changing, during=drain_one)
    outcome.assert_exact(oracle, hit=frozenset(note["node"] for note in outcome.struck))


@pytest.mark.slow
async def test_node_flaps(harness: FaultHarness, oracle: Oracle) -> None:
    """The same node dies three times as soon as it is back."""
    spec = faulty_job("flap", batches=80)
    num_nodes = len(harness.cluster.nodes)

    async def flap() -> None:
        job = await harness.until_batch(spec.job.name, 5)
        assert job.plan is not None
        node = job.plan.workers[1].node
        for _ in range(3):
            harness.cluster.kill_node(node, signal.SIGKILL)
            await asyncio.sleep(0.3)
            await harness.all_nodes_up(num_nodes)

    outcome = await harness.train(spec, during=flap)
    outcome.assert_exact(oracle, strikes=0, hit=frozenset(outcome.pids_before))


@pytest.mark.slow
async def test_all_nodes_killed_at_once(harness: FaultHarness, oracle: Oracle) -> None:
    """Nothing is left but the checkpoint; the daemons come back, and the job goes on by itself."""
    spec = faulty_job("all", batches=40)
    spec = replace(spec, fault=replace(spec.fault, checkpoint_every=8))

    async def kill_all() -> None:
        await harness.until(lambda _, job: job.checkpoint is not None, spec.job.name)
        for node in harness.cluster.nodes:
            harness.cluster.kill_node(node.name, signal.SIGKILL)

    outcome = await harness.train(spec, during=kill_all)
    outcome.assert_exact(oracle, strikes=0, hit=frozenset(outcome.pids_before))
    assert any("checkpoint" in event.text for event in outcome.job.events.values())


@pytest.mark.slow
async def test_too_few_nodes_wait_and_go_on(tmp_path: Path, oracle: Oracle) -> None:
    """The only other node dies and stays away: the job says what it waits for, and goes on when one comes."""
    spec = faulty_job("wait", batches=40, num_nodes=2)
    spec = replace(spec, placement=replace(spec.placement, min_nodes=2))
    async with fault_harness(tmp_path, num_nodes=2) as harness:

        async def lose_and_join() -> None:
            await harness.until_batch("wait", 10)
            harness.cluster.remove_node("node-2")
            job = await harness.until(lambda _, job: job.phase.phase == "recovering" and job.next is None, "wait")
            assert "1" in job.phase.reason, job.phase.reason
            await harness.cluster.add_node()

        outcome = await harness.train(spec, during=lose_and_join)
    outcome.assert_exact(oracle, strikes=0, hit=frozenset({"node-2"}))


@pytest.mark.slow
async def test_a_clock_an_hour_off(tmp_path: Path, oracle: Oracle) -> None:
    """Times in records are for people: a node whose clock is wrong trains, leads, fails and recovers like any other."""
    folder = tmp_path / "an-hour-ahead"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import time\n_now = time.time\ntime.time = lambda: _now() + 3600.0\n")
    spec = faulty_job("clock", num_nodes=2)
    async with fault_harness(tmp_path, num_nodes=1) as harness:
        await harness.cluster.add_node(environment={"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"})
        outcome = await harness.train(spec, at_operation(1, 10), at_operation(0, 14))
    outcome.assert_exact(oracle, strikes=2, hit=frozenset(outcome.pids_before))


def _nodes_of(plan: PlanRecord) -> set[str]:
    return {stage.node for stage in plan.workers}
