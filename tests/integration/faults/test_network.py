"""Fault matrix: links are cut, in one direction or both, and a node is cut off until its lease is gone."""

from dataclasses import replace

import pytest

from tests.integration.exactness.training import Oracle
from tests.integration.faults.ground import Ground, at_operation, faulty_job

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("seconds", [1.5, pytest.param(10.0, marks=pytest.mark.slow)])
async def test_link_cut(field: Ground, oracle: Oracle, seconds: float) -> None:
    """The streams of a stage break in the middle of a batch and are resumed: no rollback, no batch again."""
    spec = faulty_job(f"cut-{seconds:.0f}", batches=40)
    outcome = await field.train(spec, at_operation(1, 10, do="cut_links", seconds=seconds))
    outcome.assert_exact(oracle)
    assert outcome.num_rollbacks == 0


async def test_one_way_loss(field: Ground, oracle: Oracle) -> None:
    """One stage hears nothing for three seconds while it is heard: its streams are resumed, without a rollback."""
    spec = faulty_job("one-way", batches=40)
    outcome = await field.train(spec, at_operation(1, 10, do="deafen_links", seconds=3.0))
    outcome.assert_exact(oracle)
    assert outcome.num_rollbacks == 0


async def test_link_stays_cut(field: Ground, oracle: Oracle) -> None:
    """Longer than the job's link_timeout_s: the run goes back to a boundary, on whoever can talk."""
    spec = faulty_job("cut-long", batches=40)
    spec = replace(spec, fault=replace(spec.fault, link_timeout_s=2.0))
    outcome = await field.train(spec, at_operation(1, 10, do="cut_links", seconds=4.0))
    outcome.assert_exact(oracle, hit=frozenset(outcome.pids_before))
    assert outcome.num_rollbacks >= 1
