"""A job with held-out evaluations on a cluster: the reference's figures, also when a worker dies on the way."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.daemon.client.job_requests import job_of
from headway.daemon.jobs.job import DataSpec, JobSpec
from headway.daemon.reports.job_report import evaluation_text, report_job
from headway.stages.data.shard_index import read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from tests.integration.exactness.training import Oracle, small_job
from tests.rigs.fault_harness import FaultHarness, at_operation
from tests.rigs.replicas import replicated_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


def with_held_out_text(spec: JobSpec, folder: Path) -> JobSpec:
    """The job on text that can be learned, a part of which is held out."""
    pattern = np.tile(np.arange(0, 250, 7), 200)
    with writing_shards(folder, DataForm(vocab_size=256)) as writer:
        writer.append(pattern[:5000])
        writer.validation.append(pattern[5000:])
    return replace(spec, data=DataSpec(source=str(folder), sha256=read_index(folder).sha256))


@pytest.mark.slow
async def test_evaluations_survive_a_kill(harness: FaultHarness, oracle: Oracle, tmp_path: Path) -> None:
    """2-1-2, an evaluation with every third batch, and a worker that dies within one: each is told once, to the bit,
    and `status` has the newest and that of the end."""
    spec = with_held_out_text(replicated_job("evaluated", 2, 1, 2, batches=24), tmp_path / "data")
    spec = replace(spec, train=replace(spec.train, eval_every=3, eval_microbatches=5))
    outcome = await harness.train(spec, at_operation(2, 12))
    (struck,) = outcome.struck
    outcome.assert_exact(oracle, hit=frozenset({struck["node"]}))
    assert outcome.result is not None
    assert len(outcome.result.eval_losses) == 8
    assert outcome.result.eval_losses[-1] < outcome.result.eval_losses[0]
    view = await harness.session.view()
    report = report_job(job_of(view, spec.job.name), view.nodes)
    assert (report.eval_batch, report.eval_loss) == (21, outcome.result.eval_losses[-1])
    assert report.final_eval_loss == outcome.result.final_eval_loss != report.eval_loss
    assert re.fullmatch(r"held-out loss .* \(perplexity .*\) after the last update", evaluation_text(report))


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_the_last_weights_are_evaluated_in_spite_of_a_kill(
    harness: FaultHarness, oracle: Oracle, tmp_path: Path, stage: int
) -> None:
    """A worker dies while the last weights are evaluated, the first, the middle or the last stage's: the job goes back
    and does it again, with the loss of the plain loop."""
    spec = with_held_out_text(small_job(f"end-of-{stage}", batches=6), tmp_path / "data")
    spec = replace(spec, train=replace(spec.train, eval_every=4))
    outcome = await harness.train(spec, at_operation(stage, 6, op="forward"))
    (struck,) = outcome.struck
    outcome.assert_exact(oracle, hit=frozenset({struck["node"]}))
    assert outcome.result is not None
    assert outcome.result.final_eval_loss is not None
