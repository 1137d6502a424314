"""The promise of a lossy wire: the bits are a function of the job and the cuts, and the plain loop has them too."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.cluster.format import decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import PlanRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import (
    TIMEOUT_S,
    Oracle,
    Result,
    assert_same_bits,
    finished,
    small_job,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def run(cluster: LocalCluster, spec: JobSpec, out: Path) -> tuple[PlanRecord, JobView, Result]:
    """A job to its end: the one plan that it ran under, what its records say afterwards, and what it leaves."""
    async with ClusterSession(cluster.address) as session:
        before = (await session.client.status()).revision
        await submit(session, spec)
        result = await finished(session, spec.job.name, out)
        after = (await session.view()).jobs[spec.job.name]
        plan = await first_plan(session, spec.job.name, from_revision=before)
    assert set(result.generations) == {plan.generation}
    return plan, after, result


async def first_plan(session: ClusterSession, name: str, *, from_revision: int) -> PlanRecord:
    """The first plan in force, out of etcd's history: so short a job may end before a watcher has seen it run."""
    async with asyncio.timeout(TIMEOUT_S):
        async for changes in session.client.watch(Keys.of(name, "plan"), from_revision=from_revision):
            for event in changes.events:
                if event.value is not None:
                    return decode(event.value, PlanRecord)
    raise AssertionError("a watch never ends")


@pytest.mark.parametrize(
    ("wire", "groups", "shape", "link"),
    [
        pytest.param("int8", 2, (1, 2, 1), "grpc", id="int8-replicas-grpc"),
        pytest.param("int8", 1, (1, 1, 1), "collective", id="int8-collective", marks=pytest.mark.slow),
        pytest.param("bf16", 1, (1, 1), "grpc", id="bf16-grpc", marks=pytest.mark.slow),
    ],
)
async def test_a_coded_run_has_the_bits_of_the_loop_with_the_same_cuts(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path, wire: str, groups: int, shape: tuple[int, ...], link: str
) -> None:
    """Every cut coded, gradients fed back → the losses and weights of the reference that codes at the plan's cuts, and
    of no other; the plan, and the job when it is over, say that they are not those of the plain loop."""
    spec = small_job(f"coded-{wire}-{link}", wire=wire, wire_between="stages", reduction_groups=groups, link=link)
    spec = replace(spec, placement=PlacementSpec(replicas=shape))
    plan, after, result = await run(cluster, spec, tmp_path)
    assert plan.codecs == (wire,) * (len(shape) - 1)
    assert not plan.is_exact
    assert f"{wire} wire compression" in plan.exact_reason
    assert_same_bits(result, oracle(spec, coded_cuts=plan.coded_cuts))
    assert result.losses != oracle(replace(spec, train=replace(spec.train, wire="none"))).losses
    assert after.checkpoint is not None
    assert after.checkpoint.was_rounded


async def test_the_same_plan_twice_gives_the_same_bits(cluster: LocalCluster, tmp_path: Path) -> None:
    """One job under two names over real processes, each under one plan with the same cuts → bit for bit the same."""
    results = []
    for name in ("once", "twice"):
        spec = small_job(f"coded-{name}", wire="int8", wire_between="stages", batches=6)
        spec = replace(spec, placement=PlacementSpec(replicas=(1, 1, 1)))
        results.append(await run(cluster, spec, tmp_path / name))
    (first, _, one), (second, _, other) = results
    assert first.coded_cuts == second.coded_cuts
    assert_same_bits(one, other)


async def test_between_sites_means_that_one_site_stays_exact(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path
) -> None:
    """All nodes on one site, int8 between sites alone → no codec, and the bits of the plain loop."""
    spec = small_job("coded-nowhere", wire="int8", batches=4)
    spec = replace(spec, placement=PlacementSpec(replicas=(1, 1)))
    plan, _, result = await run(cluster, spec, tmp_path)
    assert (plan.is_exact, plan.codecs) == (True, ())
    assert_same_bits(result, oracle(replace(spec, train=replace(spec.train, wire="none"))))
