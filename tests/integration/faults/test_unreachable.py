"""Fault matrix: two nodes reach etcd and not each other. The job goes on over what can talk, or says who cannot."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client.job_requests import submit
from tests.integration.exactness.training import Oracle
from tests.rigs.fault_harness import ROW_S, TIMEOUT_S, Fault, FaultHarness, fault_harness, faulty_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(ROW_S)]


def unreachable(node: str, peer: str) -> Fault:
    """The one does not reach the other's workers; the other way is open."""
    return {
        "at": "reach.dial",
        "when": {"node": node, "peer": peer, "port": "worker"},
        "do": "raise",
        "times": 10_000,
    }


async def names_of(harness: FaultHarness) -> list[str]:
    return sorted((await harness.session.view()).nodes)


async def until_found(harness: FaultHarness, one: str, other: str) -> None:
    """Have one node dial the other, as `headway doctor` does: from then on it is a fact that it does not reach it."""
    assert harness.session.identity is not None
    client = NodeClient(harness.session.identity)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while (one, other) not in (view := await harness.session.view()).blocked.pairs:
                await client.dial_peers(view.nodes[one].endpoint, [other])  # again, until its worker is up
                await asyncio.sleep(0.02)
    finally:
        await client.close()


@pytest.mark.slow
async def test_a_pair_that_cannot_talk_is_planned_around(tmp_path: Path, oracle: Oracle) -> None:
    """One direction between two of three nodes is blocked: they are no neighbours, nobody is blamed, bits are equal."""
    spec = faulty_job("planned-around")
    spec = replace(spec, placement=replace(spec.placement, min_nodes=3))
    async with fault_harness(tmp_path, num_nodes=3, num_spares=0) as harness:
        one, other, third = await names_of(harness)
        harness.arm(unreachable(one, other))
        await until_found(harness, one, other)
        await submit(harness.session, spec)
        job = await harness.until(lambda _, job: job.plan is not None, "planned-around")
        outcome = await harness.wait(spec, armed_before=0)
        view = await harness.session.view()
    outcome.assert_exact(oracle)
    assert job.plan is not None
    assert [stage.node for stage in job.plan.workers][1] == third, "the two are no neighbours"
    assert outcome.job.phase.generation == 1, "no other order was tried"
    assert outcome.job.phase.failures.num_deaths == 0
    assert not view.failures


@pytest.mark.slow
async def test_a_job_without_an_order_says_which_way_is_blocked_and_goes_on_when_it_is_open(
    tmp_path: Path, oracle: Oracle
) -> None:
    """One of three nodes reaches neither of the others, and the job demands all three."""
    spec = faulty_job("says-which")
    spec = replace(spec, placement=replace(spec.placement, min_nodes=3))
    async with fault_harness(tmp_path, num_nodes=3) as harness:
        lonely, *others = await names_of(harness)
        harness.arm(*(unreachable(lonely, other) for other in others))
        await submit(harness.session, spec)
        told = await harness.until(lambda _, job: "docs/deployment.md" in job.phase.reason, "says-which")
        assert f"{lonely} cannot reach the worker port of {others[0]}" in told.phase.reason
        harness.arm()
        outcome = await harness.wait(spec, armed_before=0)
        view = await harness.session.view()
    outcome.assert_exact(oracle)
    assert not view.failures
