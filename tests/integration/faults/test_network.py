"""Fault matrix: links are cut, in one direction or both, and a node is cut off until its lease is gone."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.exactness.training import Oracle
from tests.rigs.fault_harness import ROW_S, FaultHarness, at_operation, fault_harness, faulty_job
from tests.rigs.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(ROW_S)]


@pytest.mark.parametrize(
    "seconds", [pytest.param(1.5, marks=pytest.mark.slow), pytest.param(10.0, marks=pytest.mark.slow)]
)
async def test_link_cut(harness: FaultHarness, oracle: Oracle, seconds: float) -> None:
    """The streams of a stage break in the middle of a batch and are resumed: no rollback, no batch again."""
    spec = faulty_job(f"cut-{seconds:.0f}", batches=40)
    outcome = await harness.train(spec, at_operation(1, 10, do="cut_links", seconds=seconds))
    outcome.assert_exact(oracle)
    assert outcome.num_rollbacks == 0


@pytest.mark.slow
async def test_one_way_loss(harness: FaultHarness, oracle: Oracle) -> None:
    """One stage hears nothing for three seconds while it is heard: its streams are resumed, without a rollback."""
    spec = faulty_job("one-way", batches=40)
    outcome = await harness.train(spec, at_operation(1, 10, do="deafen_links", seconds=3.0))
    outcome.assert_exact(oracle)
    assert outcome.num_rollbacks == 0


@pytest.mark.slow
async def test_link_stays_cut(harness: FaultHarness, oracle: Oracle) -> None:
    """Longer than the job's link_timeout_s: the run goes back to a boundary, on whoever can talk."""
    spec = faulty_job("cut-long", batches=40)
    spec = replace(spec, fault=replace(spec.fault, link_timeout_s=2.0))
    outcome = await harness.train(spec, at_operation(1, 10, do="cut_links", seconds=4.0))
    outcome.assert_exact(oracle, hit=frozenset(outcome.pids_before))
    assert outcome.num_rollbacks >= 1


@pytest.mark.slow
async def test_node_is_cut_off_until_its_lease_is_gone(tmp_path: Path, oracle: Oracle) -> None:
    """Neither etcd nor its neighbours reach it: the others go on without; healed, it joins again as the same process
    with the same worker, and what it had to say meanwhile moves nothing."""
    spec = faulty_job("cut-off", batches=60)
    async with fault_harness(tmp_path, num_nodes=2) as harness:
        etcd_port = int(harness.cluster.address.etcd[0].rpartition(":")[2])
        with TcpProxy(etcd_port) as proxy:
            node = await harness.cluster.add_node(settings={"etcd": f"127.0.0.1:{proxy.port}"})
            before = (await harness.session.view()).nodes[node].incarnation

            async def part() -> None:
                job = await harness.until_batch("cut-off", 8)
                assert job.plan is not None
                generation = job.plan.generation
                here = next(index for index, stage in enumerate(job.plan.workers) if stage.node == node)
                proxy.cut()
                harness.arm(
                    {"at": "operation", "when": {"stage": here, "node": node}, "do": "cut_links", "seconds": 8.0}
                )
                try:
                    await harness.until(
                        lambda view, job: node not in view.nodes and job.plan is not None
                        and job.plan.generation > generation,
                        "cut-off",
                    )  # fmt: skip
                finally:
                    proxy.heal()
                await harness.until(lambda view, _: node in view.nodes, "cut-off")

            outcome = await harness.train(spec, during=part)
            assert (await harness.session.view()).nodes[node].incarnation == before
            harness.cluster.remove_node(node)  # it could not leave in good order without the proxy
    outcome.assert_exact(oracle)
    assert outcome.num_rollbacks == 1
