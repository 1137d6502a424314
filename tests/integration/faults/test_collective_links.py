"""Fault matrix, collective links: on CPUs they are plain, and a break takes no living process with it."""

from dataclasses import replace

import pytest

from headway.daemon.jobs.job import JobSpec
from tests.integration.exactness.training import Oracle
from tests.rigs.fault_harness import ROW_S, FaultHarness, at_operation, faulty_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(ROW_S)]


def collective_job(name: str) -> JobSpec:
    """Three stages with plain links."""
    spec = faulty_job(name, batches=40)
    return replace(spec, train=replace(spec.train, link="collective"))


@pytest.mark.slow
@pytest.mark.parametrize("do", ["kill", "stop"])
async def test_worker_dies_under_collective_links(harness: FaultHarness, oracle: Oracle, do: str) -> None:
    """The middle stage's worker is killed, or stopped and then killed by its daemon: back to a boundary, new links."""
    outcome = await harness.train(collective_job(f"groups-{do}"), at_operation(1, 10, do=do))
    outcome.assert_exact(oracle, hit=frozenset({outcome.struck[0]["node"]}))
    assert outcome.num_rollbacks == 1


@pytest.mark.slow
async def test_plain_links_break_between_living_workers(harness: FaultHarness, oracle: Oracle) -> None:
    """The links of one worker are cut: they resume, and nothing is rolled back."""
    outcome = await harness.train(collective_job("groups-broken"), at_operation(1, 10, do="cut_links", seconds=0.5))
    outcome.assert_exact(oracle)
    assert outcome.num_rollbacks == 0
