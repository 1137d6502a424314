"""Fault matrix: etcd stops, loses a member, compacts, or comes back from an older backup."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.job_requests import cancel, submit
from headway.daemon.jobs.job import FaultSpec
from headway.daemon.reports.node_list import vanished_jobs
from tests.integration.exactness.training import Oracle
from tests.machines import page
from tests.rigs.backup import copy_data, put_data_back
from tests.rigs.fault_harness import (
    LEASE_TTL_S,
    ROW_S,
    TIMEOUT_S,
    FaultHarness,
    at_operation,
    fault_harness,
    faulty_job,
)
from tests.rigs.members_cluster import MembersCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(ROW_S)]


@pytest.mark.slow  # tests/integration/etcd has outages of etcd alone
@pytest.mark.parametrize("away_s", [4.0, 30.0])
async def test_etcd_stopped_and_restarted_with_its_data(harness: FaultHarness, oracle: Oracle, away_s: float) -> None:
    """Longer than every lease: nobody is taken for dead, nothing is planned anew, training never stops."""
    spec = faulty_job(f"away-{away_s:.0f}", batches=int(20 + away_s * 4))

    async def outage() -> None:
        await harness.until_batch(spec.job.name, 5)
        await harness.cluster.stop_etcd()
        await asyncio.sleep(away_s)
        await harness.cluster.start_etcd()

    outcome = await harness.train(spec, during=outage, timeout_s=TIMEOUT_S + 4 * away_s)
    outcome.assert_exact(oracle, strikes=0)
    assert outcome.num_rollbacks == 0
    assert outcome.result is not None
    assert len(set(outcome.result.generations)) == 1, "somebody was planned anew"


@pytest.mark.slow
async def test_etcd_away_while_a_worker_dies(harness: FaultHarness, oracle: Oracle) -> None:
    """Nothing can be decided; the others keep their state, and all goes on when etcd is back."""
    spec = faulty_job("away-death", batches=40)

    async def outage() -> None:
        await harness.until_batch(spec.job.name, 5)
        await harness.cluster.stop_etcd()
        harness.arm(*(at_operation(1, batch) for batch in range(6, 40)))
        await harness.until_struck()
        harness.arm()
        await asyncio.sleep(2 * LEASE_TTL_S)
        await harness.cluster.start_etcd()

    outcome = await harness.train(spec, during=outage)
    outcome.assert_exact(oracle, hit=frozenset(outcome.pids_before))


@pytest.mark.slow
async def test_etcd_away_while_a_daemon_dies(harness: FaultHarness, oracle: Oracle) -> None:
    """Its lease lapses with the outage."""
    spec = faulty_job("away-daemon", batches=40)

    async def outage() -> None:
        job = await harness.until_batch(spec.job.name, 5)
        assert job.plan is not None
        node = job.plan.workers[1].node
        await harness.cluster.stop_etcd()
        harness.cluster.kill_node(node, signal.SIGKILL)
        await asyncio.sleep(3)
        await harness.cluster.start_etcd()

    outcome = await harness.train(spec, during=outage)
    outcome.assert_exact(oracle, strikes=0, hit=frozenset(outcome.pids_before))


@pytest.mark.slow
async def test_etcd_restored_from_an_older_backup(tmp_path: Path, oracle: Oracle) -> None:
    """Its revisions and its plan go backwards; the nodes know better, and the coordinator starts above all of them."""
    spec = faulty_job("restored", batches=60, num_nodes=2)
    async with fault_harness(tmp_path, num_nodes=2) as harness:

        async def restore() -> None:
            await harness.until_batch("restored", 5)
            await copy_data(harness.cluster, tmp_path / "backup")
            job = await harness.until_batch("restored", 10)
            assert job.plan is not None
            generation = job.plan.generation
            harness.arm(*(at_operation(1, batch) for batch in range(11, spec.train.batches)))
            await harness.until(lambda _, job: job.plan is not None and job.plan.generation > generation, "restored")
            harness.arm()
            await harness.cluster.stop_etcd()
            await put_data_back(harness.cluster, tmp_path / "backup")

        outcome = await harness.train(spec, during=restore)
    outcome.assert_exact(oracle, hit=frozenset(outcome.pids_before))


@pytest.mark.slow
async def test_etcd_restored_from_before_a_job_names_the_checkpoint_that_brings_it_back(tmp_path: Path) -> None:
    """A job was submitted after the copy was made: its nodes say within seconds how it comes back, and are left alone.

    The other job, which the copy knows, trains on.
    """
    fault = FaultSpec(snapshot_every=10, checkpoint_every=10, checkpoint_dir=str(tmp_path / "kept"))
    old, young = (replace(faulty_job(name, batches=100_000, num_nodes=1), fault=fault) for name in ("old", "young"))
    async with fault_harness(tmp_path, num_nodes=2) as harness:
        await submit(harness.session, old)
        await harness.until_batch("old", 5)
        await copy_data(harness.cluster, tmp_path / "backup")
        await submit(harness.session, young)
        await harness.until(lambda _, job: job.checkpoint is not None, "young")
        pids = harness.cluster.node_pids
        await put_data_back(harness.cluster, tmp_path / "backup")
        async with asyncio.timeout(TIMEOUT_S):
            while "young" not in (told := vanished_jobs(await harness.session.view())):
                await asyncio.sleep(0.1)
        assert f"`headway submit --from {tmp_path}/kept/young/" in told["young"]
        assert told.keys() == {"young"}
        before = await harness.until_batch("old", 5)
        assert before.progress is not None
        await harness.until_batch("old", before.progress.batch + 20)
        assert harness.cluster.node_pids == pids
        await cancel(harness.session, "old")


@pytest.mark.slow
async def test_one_of_three_members_is_killed(tmp_path: Path, oracle: Oracle) -> None:
    """The one that leads, for good: the other two elect; daemons and clients change over, and training never stops."""
    spec = faulty_job("member", batches=40, num_nodes=2)
    async with fault_harness(tmp_path, num_nodes=2, kind=MembersCluster) as harness:
        cluster = harness.cluster
        assert isinstance(cluster, MembersCluster)

        async def kill() -> None:
            await harness.until_batch("member", 5)
            await cluster.kill_leading_member()

        outcome = await harness.train(spec, during=kill)
    outcome.assert_exact(oracle, strikes=0)
    assert outcome.num_rollbacks == 0


@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_two_of_three_members_are_lost_for_good(tmp_path: Path, oracle: Oracle) -> None:
    """With their data. By the page's commands the third one goes on alone, and two new ones join it; then that one is
    lost too. Training never stops, and what was decided before is still there.
    """
    spec = faulty_job("lost", batches=90, num_nodes=2)
    async with fault_harness(tmp_path, num_nodes=2, kind=MembersCluster, layer_s=0.02) as harness:
        cluster = harness.cluster
        assert isinstance(cluster, MembersCluster)

        async def lose_and_replace() -> None:
            await harness.until_batch("lost", 5)
            for number in (1, 2):
                await cluster.lose_member(number)
            await asyncio.sleep(3 * LEASE_TTL_S)
            await cluster.stop_etcd()
            await cluster.start_alone(page.flags(page.command("etcd …", "--force-new-cluster")))
            await harness.all_nodes_up(2)
            await cluster.start_alone({})
            joins = page.flags(page.command("etcd …", "--initial-cluster-state"))
            added = page.command("$E member add")
            for number in (1, 2):
                await cluster.add_member(number, added, joins)
            await cluster.lose_member(0)
            seen = (await harness.until_batch("lost", 6)).progress
            assert seen is not None
            await harness.until_batch("lost", seen.batch + 1)

        outcome = await harness.train(spec, during=lose_and_replace, timeout_s=240.0)
    outcome.assert_exact(oracle, strikes=0)
    assert outcome.num_rollbacks == 0
    assert outcome.result is not None
    assert len(set(outcome.result.generations)) == 1, "somebody was planned anew"


@pytest.mark.slow
async def test_compaction_while_a_watcher_is_behind(harness: FaultHarness, oracle: Oracle) -> None:
    """A daemon sleeps through many changes and a compaction: it lists again and goes on."""
    spec = faulty_job("compaction", batches=40)

    async def compact() -> None:
        job = await harness.until_batch(spec.job.name, 5)
        assert job.plan is not None
        pid = harness.cluster.node_pids[job.plan.workers[2].node]
        os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(50):
                await harness.session.client.put("/elsewhere", str(number).encode())
            await harness.session.client.compact((await harness.session.client.status()).revision)
        finally:
            os.kill(pid, signal.SIGCONT)

    outcome = await harness.train(spec, during=compact)
    outcome.assert_exact(oracle, strikes=0, hit=frozenset(outcome.pids_before))
