"""Jobs that evaluations end: every cut and every interruption ends in the bits of the plain loop, at its boundary."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.daemon.jobs.job import JobSpec
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.early_stop import EvaluationTally, StopRule, stop_lag
from headway.stages.errors import ProtocolError
from headway.stages.ids import Batch
from headway.stages.links.link import FrameKind
from headway.stages.state.journal import Journal
from headway.stages.state.layer_state import LayerState
from tests.rigs.pipeline import (
    Pipeline,
    assert_exact,
    initial_layers,
    load_all,
    make_job,
    oracle_results,
    save_all,
    with_train,
)

FAST = OptimSpec(matrices=GroupSpec(name="muon", lr=1e-2), rest=GroupSpec(name="adamw", lr=1e-2), warmup_batches=2)
JOBS = {
    schedule: make_job(
        with_train(schedule=schedule, eval_every=2, eval_patience=3, batches=24, reduction_groups=2), FAST
    )
    for schedule in ("2bw", "1f1b", "gpipe")
}
"""The held-out loss rises after batch 4."""
SEAMS = {
    f"2bw after {k}": replace(JOBS["2bw"], train=replace(JOBS["2bw"].train, sync_batches=k)) for k in (9, 11, 12, 24)
}
"""The decision falls with the seam, before it and behind it; the lag is that of 2bw in any case."""
EVERY_BATCH = make_job(with_train(eval_every=1, eval_patience=2, batches=20, reduction_groups=2), FAST)
SHAPES = [(1,), (1, 1, 1), (2, 1), (1, 2), (2, 2)]


def end_of(job: JobSpec) -> int:
    """Where the plain loop has stopped."""
    return len(oracle_results(job)[0])


def assert_ended(job: JobSpec, pipeline: Pipeline, layers: dict[str, LayerState], journal: Journal) -> None:
    """Run a pipeline: all workers stop at the plain loop's boundary, know why, and have its bits."""
    assert set(pipeline.run()) == {end_of(job)}
    assert_exact(job, layers, journal)
    decided_at = end_of(job) - stop_lag(job.train.delay)
    losses = {batch: loss for batch, loss in journal.evaluations() if batch <= decided_at}
    (best,) = {loop.executor.best_batch for loop in pipeline.loops}
    assert best is not None
    assert losses[best] == min(losses.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("schedule", JOBS)
def test_a_job_ends_where_the_plain_loop_does(schedule: str, shape: tuple[int, ...]) -> None:
    """The held-out loss falls until batch 4; the evaluations of 6, 8 and 10 end the job, with all bits of the loop."""
    job = JOBS[schedule]
    layers, journal = initial_layers(job), Journal()
    assert end_of(job) == 10 + 2 + job.train.delay
    assert_ended(job, Pipeline(job, layers, journal, num_stages=len(shape), replicas=shape), layers, journal)
    assert len(journal) == end_of(job)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", SEAMS)
def test_a_decision_around_the_seam_ends_a_job_where_the_plain_loop_does(name: str, shape: tuple[int, ...]) -> None:
    """An evaluation that ends the job before, at or after the last batch without delay → the bits of the loop."""
    job = SEAMS[name]
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(job, layers, journal, num_stages=len(shape), replicas=shape, late_seed=1)
    assert 12 < end_of(job) < 24
    assert_ended(job, pipeline, layers, journal)


@pytest.mark.parametrize("late_seed", range(4))
def test_devices_whose_losses_come_late_end_it_at_the_same_boundary(late_seed: int) -> None:
    """Copies to the host take any time → the first stage waits for the judgement rather than beginning too much."""
    job = EVERY_BATCH
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(job, layers, journal, num_stages=2, replicas=(2, 2), late_seed=late_seed)
    assert_ended(job, pipeline, layers, journal)


@pytest.mark.parametrize(
    ("job", "step"),
    [
        pytest.param(JOBS["2bw"], 2, id="2bw"),
        pytest.param(JOBS["2bw"], 1, id="2bw, each boundary", marks=pytest.mark.slow),
        pytest.param(JOBS["1f1b"], 1, id="1f1b", marks=pytest.mark.slow),
        pytest.param(EVERY_BATCH, 1, id="2bw, every batch"),
    ],
)
def test_a_run_may_be_interrupted_before_and_after_the_decision(job: JobSpec, step: int, tmp_path: Path) -> None:
    """Stop at boundaries, also between the decision and the end, and at the end itself; go on with another cut."""
    for stop in range(end_of(job), 0, -step):
        folder = tmp_path / str(stop)
        folder.mkdir()
        layers, journal = initial_layers(job), Journal()
        first = Pipeline(job, layers, journal, num_stages=2)
        first.stop_all_at(stop)
        assert first.run() == [stop, stop]
        assert {loop.executor.best_batch is not None for loop in first.loops} == {stop == end_of(job)}
        boundary = save_all(folder, job, layers, journal)
        layers, journal = load_all(folder, job, boundary)
        assert_ended(job, Pipeline(job, layers, journal, num_stages=3, generation=2), layers, journal)


def test_rows_that_are_dropped_still_count(tmp_path: Path) -> None:
    """Old rows leave the journal before, at and after the decision → what they said is kept, also in files."""
    job = JOBS["2bw"]
    rule = StopRule.of(job.train)
    for stop in (3, 6, 11, 12):
        layers, journal = initial_layers(job), Journal()
        first = Pipeline(job, layers, journal, num_stages=2)
        first.stop_all_at(stop)
        first.run()
        journal.drop_below(Batch(stop), rule)
        assert journal.first_batch == stop - 1
        folder = tmp_path / str(stop)
        folder.mkdir()
        boundary = save_all(folder, job, layers, journal)
        layers, journal = load_all(folder, job, boundary)
        second = Pipeline(job, layers, journal, num_stages=3, generation=2)
        assert second.run() == [end_of(job)] * 3
        assert {loop.executor.best_batch for loop in second.loops} == {4}


def test_evaluations_of_the_job_before_do_not_count(tmp_path: Path) -> None:
    """A job that begins with the files of one that has ended early goes on, and ends by its own evaluations."""
    job = JOBS["2bw"]
    layers, journal = initial_layers(job), Journal()
    Pipeline(job, layers, journal, num_stages=1).run()
    boundary = save_all(tmp_path, job, layers, journal)
    layers, journal = load_all(tmp_path, job, boundary)
    journal.tally = EvaluationTally(below=boundary)
    # Evaluations 14 to 20: the first one is the best so far, whatever it is.
    ended = set(Pipeline(job, layers, journal, num_stages=2, generation=2).run())
    own = dict(journal.evaluations())
    first, *others = (own[batch] for batch in (14, 16, 18, 20))
    assert ended == ({23} if all(loss >= first for loss in others) else {24})


def test_a_journal_without_a_rule_has_no_tally() -> None:
    """A job that no evaluation ends → its journal has columns alone, and none of dropped evaluations."""
    job = replace(JOBS["2bw"], train=replace(JOBS["2bw"].train, eval_patience=0, batches=4))
    journal = Journal()
    Pipeline(job, initial_layers(job), journal, num_stages=1).run()
    journal.drop_below(Batch(3), StopRule.of(job.train))
    columns = {"batch", "generation", "gradient_norm", "losses", "seconds", "tokens", "final_eval_loss"}
    assert journal.tensors().keys() == columns


@pytest.mark.parametrize("changes", [{"shape": 4}, {"dtype": "float32"}])
def test_a_tally_of_another_form_is_refused(changes: Mapping[str, object]) -> None:
    """A damaged file → ValueError, and no guess."""
    journal = Journal()
    journal.tally = EvaluationTally(below=3)
    tensors = journal.tensors()
    tally = tensors["evaluation_tally"]
    tensors["evaluation_tally"] = tally[:4] if "shape" in changes else tally.float()
    with pytest.raises(ValueError, match="another form"):
        Journal.from_tensors(tensors)


def test_a_judgement_that_no_evaluation_has_is_refused() -> None:
    """A neighbour that tells of batch 1, which has no evaluation → an error that names it."""
    job = JOBS["2bw"]
    pipeline = Pipeline(job, initial_layers(job), Journal(), num_stages=2)
    executor = pipeline.loops[0].executor
    frame = executor.context.frame(FrameKind.JOB_END, 1, 0, torch.tensor([8, 0]))
    with pytest.raises(ProtocolError, match="stage 1: sent an unexpected JOB_END of batch 1"):
        executor.accept(frame)
