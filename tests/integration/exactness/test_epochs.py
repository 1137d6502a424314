"""A job that sees each row once an epoch: the plain loop's bits, also after a kill and a pause in the middle."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.daemon.client.job_requests import job_of, pause, resume
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Device, Phase
from headway.daemon.jobs.job import DataSpec, JobSpec, PlacementSpec
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.reports.job_report import progress_text, report_job
from headway.stages.data.shard_writer import DataForm, writing_shards
from tests.integration.exactness.training import TIMEOUT_S, Oracle, small_job
from tests.rigs.fault_harness import FaultHarness, at_operation, faulty_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(180)]

EPOCHS = 2
NUM_ROWS = 250
"""Of 16 tokens: no whole number of batches of 16 rows, so one batch sees rows of two epochs."""


def job_in_epochs(folder: Path) -> JobSpec:
    """A job of 32 short batches on two nodes."""
    with writing_shards(folder, DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(NUM_ROWS * 16 + 1) ** 2 % 251)
    spec = small_job("epochs", epochs=EPOCHS)
    spec = replace(spec, data=DataSpec(source=str(folder)), fault=faulty_job("epochs").fault)
    spec = replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=2, recut=False))
    devices = (Device(kind="cpu"),)
    return resolve_job(spec, job_file=folder / "job.toml", devices=devices, cache_dir=default_cache_dir(), named=())


async def test_epochs_go_on_after_a_kill_and_a_pause(harness: FaultHarness, oracle: Oracle, tmp_path: Path) -> None:
    """Paused and resumed in the first epoch, a worker killed in the second: no row is lost or seen twice."""
    spec = job_in_epochs(tmp_path / "data")
    assert spec.train.batches == -(-EPOCHS * NUM_ROWS // 16)

    async def stop_and_go() -> None:
        await harness.until_batch("epochs", 4)
        await pause(harness.session, "epochs")
        await wait_for_phase(harness.session, "epochs", frozenset({Phase.PAUSED}), timeout_s=TIMEOUT_S)
        await resume(harness.session, "epochs")

    outcome = await harness.train(spec, at_operation(1, 22), during=stop_and_go)
    (struck,) = outcome.struck
    outcome.assert_exact(oracle, hit=frozenset({struck["node"]}))
    assert outcome.num_rollbacks == 1
    view = await harness.session.view()
    report = report_job(job_of(view, "epochs"), view.nodes)
    assert progress_text(report) == "batch 32/32 (epoch 2 of 2)"
