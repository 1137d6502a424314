"""Fault matrix: an S3 server that goes away, and a node without credentials for it. `make s3` installs what they need.

The server is moto's, a process of its own; daemons reach it through a proxy that can be cut.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, socket

import pytest

from headway.daemon.client.job_requests import job_of, pause, resume, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSpec
from tests.integration.exactness.training import Oracle
from tests.rigs.fault_harness import FaultHarness, fault_harness, faulty_job
from tests.rigs.tcp_proxy import TcpProxy

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    pytest.mark.timeout(520),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("moto", "s3fs")),
        reason="`make s3` installs its packages",
    ),
]

AWAY_S = float(os.environ.get("HEADWAY_S3_AWAY_S", "60"))
END_S = 240.0
LEASE_TTL_S = 10
"""A busy machine is no fault here."""
LAYER_S = 0.004
"""The forward of a layer: the plain loop computes in seconds what the cluster trains in an outage."""
BATCH_S = 0.3
"""Of two stages with such layers, at least."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
NOBODYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of an S3 server with one bucket."""
    with closing(socket(AF_INET, SOCK_STREAM)) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        bucket = urllib.request.Request(
            f"http://127.0.0.1:{port}/headway",
            method="PUT",
            headers={"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"},
        )
        for _ in range(300):
            try:
                urllib.request.urlopen(bucket, timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                asyncio.run(asyncio.sleep(0.1))
        yield port
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def cluster(folder: Path, server: int, *, num_nodes: int = 2) -> AsyncIterator[tuple[FaultHarness, TcpProxy]]:
    """A cluster whose daemons know an S3 server behind a proxy."""
    with TcpProxy(server) as proxy:
        environment = CREDENTIALS | {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        old = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            async with fault_harness(folder, num_nodes=num_nodes, lease_ttl_s=LEASE_TTL_S, layer_s=LAYER_S) as harness:
                yield harness, proxy
        finally:
            for name, value in old.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def s3_job(name: str, *, batches: int, every: int = 8) -> JobSpec:
    spec = faulty_job(name, num_nodes=2, batches=batches)
    return replace(
        spec, fault=replace(spec.fault, checkpoint_every=every, checkpoint_dir=f"s3://headway/{name}", copies=2)
    )


async def killed(harness: FaultHarness) -> dict[str, int]:
    """All daemons are killed, and others come; returns their processes."""
    before = harness.cluster.node_pids
    for name in before:
        harness.cluster.kill_node(name)
    async with asyncio.timeout(60.0):
        while any(harness.cluster.node_pids.get(name) in (None, pid) for name, pid in before.items()):
            await asyncio.sleep(0.1)
    await harness.all_nodes_up(len(before))
    return harness.cluster.node_pids


def batch_of(job: JobView) -> int:
    """The last batch that is known to be done."""
    return job.progress.batch if job.progress is not None else -1


def boundary_of(job: JobView) -> int:
    """The newest checkpoint's."""
    return job.checkpoint.boundary if job.checkpoint is not None else -1


def is_told(job: JobView) -> bool:
    """Whether somebody said that the checkpoint folder cannot be written, with its URL."""
    told = [record.trouble for records in job.state.values() for record in records.values()]
    return any("s3://headway/" in trouble for trouble in told)


def assert_nothing_was_lost(harness: FaultHarness, pids: dict[str, int], job: JobView) -> None:
    assert harness.cluster.node_pids == pids, "a daemon ended"
    assert not any("goes back to" in event.text for event in job.events.values())


async def test_s3_is_away_from_the_start_and_at_periodic_checkpoints(
    tmp_path: Path, server: int, oracle: Oracle
) -> None:
    """Away when the job starts: it trains, says so, and writes checkpoints once the server is back."""
    spec = s3_job("start", batches=120)
    async with cluster(tmp_path, server) as (harness, proxy):
        pids = harness.cluster.node_pids

        async def during() -> None:
            job = await harness.until(lambda _, job: is_told(job), "start", timeout_s=END_S)
            assert job.progress is not None, "no batch while the server is away"
            await asyncio.sleep(AWAY_S)
            proxy.heal()

        proxy.cut()
        await submit(harness.session, spec)
        task = asyncio.create_task(during())
        outcome = await harness.wait(spec, timeout_s=END_S)
        await task
        outcome.assert_exact(oracle, strikes=0)
        assert_nothing_was_lost(harness, pids, outcome.job)
        assert outcome.job.checkpoint is not None
        assert outcome.job.checkpoint.boundary == 120


async def test_s3_goes_away_between_periodic_checkpoints(tmp_path: Path, server: int, oracle: Oracle) -> None:
    """Checkpoints are written, then it is away: the job trains on, and its checkpoints go on when it is back."""
    async with cluster(tmp_path, server) as (harness, proxy):
        pids = harness.cluster.node_pids
        spec = s3_job("periodic", batches=int((AWAY_S + 40) / BATCH_S))
        await submit(harness.session, spec)
        job = await harness.until(lambda _, job: boundary_of(job) >= 8, "periodic", timeout_s=END_S)
        proxy.cut()
        job = await harness.until(lambda _, job: is_told(job), "periodic", timeout_s=END_S)
        before = batch_of(job)
        await asyncio.sleep(AWAY_S)
        job = job_of(await harness.session.view(), "periodic")
        assert job.phase.phase is Phase.RUNNING, "the outage lasted beyond the training"
        assert batch_of(job) - before > AWAY_S / BATCH_S / 10
        checkpointed = boundary_of(job)
        proxy.heal()
        job = await harness.until(lambda _, job: boundary_of(job) > checkpointed, "periodic", timeout_s=END_S)
        assert job.phase.phase is Phase.RUNNING, "the next checkpoint came at the end"
        outcome = await harness.wait(spec, timeout_s=END_S)
        outcome.assert_exact(oracle, strikes=0)
        assert_nothing_was_lost(harness, pids, outcome.job)
        assert boundary_of(outcome.job) == spec.train.batches


async def test_s3_is_away_at_the_end(tmp_path: Path, server: int, oracle: Oracle) -> None:
    """The last batch is done and its checkpoint cannot be written: the job waits, and finishes when it can."""
    spec = s3_job("end", batches=40, every=0)
    async with cluster(tmp_path, server) as (harness, proxy):
        pids = harness.cluster.node_pids
        proxy.cut()

        async def during() -> None:
            await harness.until(
                lambda _, job: job.phase.phase is Phase.STOPPING and is_told(job), "end", timeout_s=END_S
            )
            await asyncio.sleep(AWAY_S)
            proxy.heal()

        await submit(harness.session, spec)
        task = asyncio.create_task(during())
        outcome = await harness.wait(spec, timeout_s=END_S)
        await task
        outcome.assert_exact(oracle, strikes=0)
        assert_nothing_was_lost(harness, pids, outcome.job)


async def test_s3_is_away_at_a_pause_and_at_the_return_from_it(tmp_path: Path, server: int, oracle: Oracle) -> None:
    """Paused while it is away: saved when it is back. All daemons are replaced, and it is away again: the job waits for
    its checkpoint and goes on from there.
    """
    spec = s3_job("pause", batches=200, every=0)
    async with cluster(tmp_path, server) as (harness, proxy):
        pids = harness.cluster.node_pids
        await submit(harness.session, spec)
        await harness.until_batch("pause", 20, timeout_s=END_S)
        proxy.cut()
        await pause(harness.session, "pause")
        await harness.until(lambda _, job: job.phase.phase is Phase.STOPPING and is_told(job), "pause", timeout_s=END_S)
        await asyncio.sleep(AWAY_S)
        proxy.heal()
        paused = await wait_for_phase(
            harness.session, "pause", frozenset({Phase.PAUSED, Phase.FAILED}), timeout_s=END_S
        )
        assert paused.phase.phase is Phase.PAUSED, paused.phase.reason
        assert_nothing_was_lost(harness, pids, paused)
        assert paused.checkpoint is not None
        pids = await killed(harness)
        proxy.cut()
        await resume(harness.session, "pause")
        asyncio.get_running_loop().call_later(AWAY_S, proxy.heal)
        outcome = await harness.wait(spec, timeout_s=END_S)
        outcome.assert_exact(oracle, strikes=0, hit=frozenset(pids))
        assert harness.cluster.node_pids == pids, "a daemon ended"
        texts = [event.text for event in outcome.job.events.values()]
        assert not any("goes back to the beginning" in text or "boundary 0" in text for text in texts), texts


async def test_one_node_has_no_credentials(tmp_path: Path, server: int, oracle: Oracle) -> None:
    """It computes as the others do; they write and read checkpoints in its stead, and the job says who and why."""
    spec = s3_job("poor", batches=160)
    async with cluster(tmp_path, server, num_nodes=1) as (harness, _):
        poor = await harness.cluster.add_node(environment=NOBODYS)
        pids = harness.cluster.node_pids
        await submit(harness.session, spec)
        job = await harness.until(lambda _, job: boundary_of(job) >= 8, "poor", timeout_s=END_S)
        await harness.until(
            lambda _, job: f"{poor}" in str(job.goodput) and "no credentials" in str(job.goodput),
            "poor",
            timeout_s=END_S,
        )
        await pause(harness.session, "poor")
        job = await wait_for_phase(harness.session, "poor", frozenset({Phase.PAUSED, Phase.FAILED}), timeout_s=END_S)
        assert job.phase.phase is Phase.PAUSED, job.phase.reason
        assert_nothing_was_lost(harness, pids, job)
        await killed(harness)
        await resume(harness.session, "poor")
        outcome = await harness.wait(spec, timeout_s=END_S)
        outcome.assert_exact(oracle, strikes=0, hit=frozenset(pids))
        assert outcome.num_rollbacks == 0
