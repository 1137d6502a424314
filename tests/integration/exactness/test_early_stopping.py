"""Jobs that evaluations end early, on a cluster: the plain loop's last boundary and bits, through kills and a pause."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import job_of, pause, resume, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, JobSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.reports.job_report import report_job
from headway.stages.data.shard_index import read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.early_stop import EvaluationTally, StopRule
from tests.integration.exactness.training import Oracle, assert_same_bits, finished, small_job, train, until_batch
from tests.rigs.fault_harness import FaultHarness, at_operation, faulty_job
from tests.rigs.replicas import replicated_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

BATCHES = 40
LAYER_S = 0.002


def ending_early(spec: JobSpec, folder: Path, schedule: str = "2bw") -> JobSpec:
    """The job on text that can be learned. Half of the held-out tokens are unlike any in it: no loss falls far."""
    counted = np.tile(np.arange(0, 250, 7), 200)
    with writing_shards(folder, DataForm(vocab_size=256)) as writer:
        writer.append(counted)
        writer.validation.append(counted[:2000] + np.arange(2000) % 2)
    fields = {
        "schedule": schedule,
        "batches": BATCHES,
        "eval_every": 2,
        "eval_microbatches": 5,
        "eval_patience": 2,
        "eval_min_delta": 0.02,
    }
    train_spec = replace(spec.train, **fields)  # type: ignore[arg-type]
    return replace(spec, train=train_spec, data=DataSpec(source=str(folder), sha256=read_index(folder).sha256))


def assert_told(job: JobView, end: int, eval_losses: tuple[float, ...]) -> None:
    """The report and the reason say where the job has stopped, and since when the loss has not fallen."""
    report = report_job(job, {})
    assert report.stopped_early_at == end < BATCHES
    assert (report.batch, report.seconds_left) == (end - 1, 0.0)
    assert job.spec is not None
    rule = StopRule.of(job.spec.train)
    assert rule is not None
    best = rule.judge_all(EvaluationTally(), [(2 * i, loss) for i, loss in enumerate(eval_losses)]).best_batch
    assert report.reason == f"Stopped early at batch {end}: the held-out loss has not fallen since batch {best}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "schedule"), [(1, "2bw"), (2, "1f1b"), (3, "2bw"), (2, "2bw"), (3, "1f1b"), (1, "1f1b")]
)
async def test_a_job_ends_where_the_plain_loop_does(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path, nodes: int, schedule: str
) -> None:
    """Any number of nodes: as many batches as the plain loop has, with its bits; the exported model is W_S."""
    spec = ending_early(small_job(f"early-{nodes}-{schedule}"), tmp_path / "data", schedule)
    plain = oracle(spec)
    result = await train(cluster, spec, tmp_path, num_nodes=nodes)
    assert_same_bits(result, plain)
    async with ClusterSession(cluster.address) as session:
        assert_told(job_of(await session.view(), spec.job.name), len(plain.losses), result.eval_losses)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
async def test_a_kill_between_the_decision_and_the_end_changes_nothing(
    harness: FaultHarness, oracle: Oracle, tmp_path: Path, schedule: str
) -> None:
    """The first stage's worker dies in the last batch, and again the last stage's in the one before the decision."""
    spec = ending_early(faulty_job(f"early-kill-{schedule}"), tmp_path / "data", schedule=schedule)
    end = len(oracle(spec).losses)
    outcome = await harness.train(spec, at_operation(0, end - 1), at_operation(2, end - 1, after=0))
    outcome.assert_exact(oracle, strikes=2, hit=frozenset(note["node"] for note in outcome.struck))
    assert outcome.num_rollbacks == 2
    assert outcome.result is not None
    assert_told(outcome.job, end, outcome.result.eval_losses)


@pytest.mark.slow
async def test_replicas_end_together(harness: FaultHarness, oracle: Oracle, tmp_path: Path) -> None:
    """2-1-2, and a replica of the last stage that does not lead dies in the last batch."""
    spec = ending_early(replicated_job("early-replicas", 2, 1, 2), tmp_path / "data")
    end = len(oracle(spec).losses)
    outcome = await harness.train(spec, at_operation(2, end - 1))
    (struck,) = outcome.struck
    outcome.assert_exact(oracle, hit=frozenset({struck["node"]}))
    assert outcome.result is not None
    assert_told(outcome.job, end, outcome.result.eval_losses)


@pytest.mark.slow
async def test_a_pause_before_the_end_loses_no_evaluation(
    cluster: LocalCluster, set_pace: Callable[[float], None], oracle: Oracle, tmp_path: Path
) -> None:
    """The job is paused after some evaluations and resumed by other processes: the failures before it still count."""
    name = "early-pause"
    spec = replace(ending_early(small_job(name), tmp_path / "data"), placement=PlacementSpec(min_nodes=2, max_nodes=2))
    plain = oracle(spec)
    set_pace(LAYER_S)
    async with ClusterSession(cluster.address) as session:
        await submit(session, spec)
        await until_batch(session, name, len(plain.losses) - 9)
        await pause(session, name)
        paused = await wait_for_phase(session, name, frozenset({Phase.PAUSED}), timeout_s=60)
        assert paused.checkpoint is not None
        assert paused.checkpoint.boundary < len(plain.losses)
        set_pace(0)
        await resume(session, name)
        result = await finished(session, name, tmp_path / "out")
        assert_told(job_of(await session.view(), name), len(plain.losses), result.eval_losses)
    assert_same_bits(result, plain)
