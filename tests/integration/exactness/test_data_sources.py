"""A job of two data sources with a mask and packed rows: the plain loop's bits through a kill, a pause and a resume."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.daemon.client.job_requests import job_of, pause, resume
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Device, Phase
from headway.daemon.jobs.job import DataSpec, JobSpec, PlacementSpec, SourceSpec
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.reports.job_report import report_job
from headway.stages.data.shard_writer import DataForm, writing_shards
from tests.integration.exactness.training import TIMEOUT_S, Oracle, small_job
from tests.rigs.fault_harness import FaultHarness, at_operation, faulty_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


def packed(folder: Path, *, seed: int) -> SourceSpec:
    """Rows of documents for sequences of 16 tokens, of which some targets count, with some rows held out."""
    random = np.random.default_rng(seed)
    with writing_shards(folder, DataForm(vocab_size=256, has_flags=True, row_tokens=17)) as writer:
        writer.append(np.arange(17 * 60) * seed % 251, random.integers(0, 4, 17 * 60))
        writer.validation.append(np.arange(17 * 40) * seed % 251, random.integers(0, 4, 17 * 40))
    return SourceSpec(source=str(folder), weight=float(seed))


def job_of_two_sources(folder: Path) -> JobSpec:
    """A job of 32 short batches on two nodes, with an evaluation before every eighth."""
    sources = tuple(packed(folder / str(seed), seed=seed) for seed in (1, 3))
    spec = small_job("sources", batches=32)
    train = replace(spec.train, loss_mask="auto", documents="auto", eval_every=8, eval_microbatches=2)
    spec = replace(spec, train=train, data=DataSpec(source="", sources=sources), fault=faulty_job("sources").fault)
    spec = replace(spec, placement=PlacementSpec(min_nodes=2, max_nodes=2, recut=False))
    devices = (Device(kind="cpu"),)
    return resolve_job(spec, job_file=folder / "job.toml", devices=devices, cache_dir=default_cache_dir(), named=())


@pytest.mark.slow
async def test_two_sources_go_on_after_a_kill_and_a_pause(
    harness: FaultHarness, oracle: Oracle, tmp_path: Path
) -> None:
    """Paused and resumed, then a worker is killed: losses, evaluations and weights of the plain loop; `status` has the
    shares."""
    spec = job_of_two_sources(tmp_path)
    assert (spec.train.loss_mask, spec.train.documents) == ("data", "separate")

    async def stop_and_go() -> None:
        await harness.until_batch("sources", 4)
        await pause(harness.session, "sources")
        await wait_for_phase(harness.session, "sources", frozenset({Phase.PAUSED}), timeout_s=TIMEOUT_S)
        await resume(harness.session, "sources")

    outcome = await harness.train(spec, at_operation(1, 22), during=stop_and_go)
    (struck,) = outcome.struck
    outcome.assert_exact(oracle, hit=frozenset({struck["node"]}))
    assert outcome.num_rollbacks == 1
    assert outcome.result is not None
    assert len(outcome.result.eval_losses) == 4
    view = await harness.session.view()
    report = report_job(job_of(view, "sources"), view.nodes)
    assert report.data == f"25 % {tmp_path}/1, 75 % {tmp_path}/3"
