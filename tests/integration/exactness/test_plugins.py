"""Code of a job's own, as docs/plugins.md has it: the bits of `headway reference` through a kill and a join."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.client.submission import read_draft
from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import FaultSpec, JobSpec, PlacementSpec
from headway.daemon.jobs.plugins import import_plugins
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.reports.job_report import report_in
from tests.integration.exactness.training import (
    Oracle,
    assert_same_bits,
    finished,
    train,
    until,
    until_batch,
)
from tests.rigs.hub_to_adapter import workers_of
from tests.rigs.paces import paced_layers
from tests.rigs.plugins_page import write_files

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

LAYER_S = 0.01


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    """The job of the page, resolved; its code is imported here, for the plain loop."""
    draft = read_draft(write_files(tmp_path_factory.mktemp("page")))
    spec = draft.resolved((Device(kind="cpu"),))
    import_plugins(spec, Path(spec.plugins.data.source))
    return replace(spec, fault=FaultSpec(snapshot_every=3))


async def test_the_code_of_the_page_gives_the_bits_of_the_plain_loop(
    cluster: LocalCluster, job: JobSpec, tmp_path: Path, oracle: Oracle
) -> None:
    """One node."""
    assert_same_bits(await train(cluster, job, tmp_path, num_nodes=1), oracle(job))


async def test_a_kill_and_a_join_change_no_bit(job: JobSpec, tmp_path: Path, oracle: Oracle) -> None:
    """Two nodes; a worker is killed and its layers come from files, then a third node joins: what is kept moves."""
    spec = replace(job, job=replace(job.job, name="moved"), train=replace(job.train, batches=80))
    spec = replace(spec, placement=PlacementSpec(min_nodes=2))
    environment = paced_layers(tmp_path, LAYER_S)
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, environment=environment) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        first = await until_batch(session, "moved", 7)
        os.kill(workers_of(first)[-1].pid, signal.SIGKILL)
        second = await until_batch(session, "moved", 8, generation=first.phase.generation + 1)
        assert second.plan is not None
        assert second.plan.boundary > 0, "it began from files"
        await cluster.add_node()
        await until(session, lambda _, job: job.plan is not None and len(job.plan.workers) == 3, "moved")
        paced_layers(tmp_path, 0)
        result = await finished(session, "moved", tmp_path / "out")
    assert_same_bits(result, oracle(spec))


LACKS = """
import os

if os.environ.get("LACKS_A_PACKAGE"):
    import no_such_package
"""


async def test_nodes_that_lack_a_package_are_left_out_and_named(job: JobSpec, tmp_path: Path, oracle: Oracle) -> None:
    """One is there at the start, one joins: the job trains to its end on the only node that has the package."""
    file = write_files(tmp_path)
    module = file.parent / "my_things.py"
    module.write_text(LACKS + module.read_text())
    other = read_draft(file).resolved((Device(kind="cpu"),)).plugins
    spec = replace(job, job=replace(job.job, name="lacks"), train=replace(job.train, batches=40), plugins=other)
    paced, lacks = paced_layers(tmp_path, LAYER_S), {"LACKS_A_PACKAGE": "1"}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=1, environment=paced) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await cluster.add_node(environment=paced | lacks)
        await submit(session, spec)
        await until_batch(session, "lacks", 3)
        await cluster.add_node(environment=paced | lacks)
        what = "cannot import the plug-ins of my_things.py: "
        await until(session, lambda view, _: sum(bool(n.ailments) for n in view.nodes.values()) == 2, "lacks")
        view = await session.view()
        told = [line for line in report_in(view, view.jobs["lacks"]).ailments if "needs no_such_package" in line]
        assert [line.partition(what)[0] for line in told] == ["node node-2 ", "node node-3 "]
        paced_layers(tmp_path, 0)
        result = await finished(session, "lacks", tmp_path / "out")
        view = await session.view()
        assert (view.jobs["lacks"].phase.failures.num_deaths, view.failures) == (0, {})
    assert_same_bits(result, oracle(spec))


async def test_a_node_that_does_not_allow_it_is_named(job: JobSpec, tmp_path: Path) -> None:
    """Its only node allows another wheel: the job waits, and says which node and which hash."""
    settings: dict[str, object] = {"allow_plugins": "0" * 64, "num_spares": 0}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=1, node_settings=settings) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, replace(job, job=replace(job.job, name="waits")))
        told = f"node node-1 does not allow the plug-ins of my_things.py: its allow_plugins lacks {job.plugins.sha256}"
        await until(session, lambda _, job: told in job.phase.reason, "waits")
