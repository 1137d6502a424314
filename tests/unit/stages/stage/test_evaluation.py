"""Held-out evaluation beside the training: the reference's figures on every cut, and nothing else moves."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.stages.errors import AbortedError
from headway.stages.ids import Batch, Boundary, Generation
from headway.stages.schedule.operations import Forward, Op
from headway.stages.stage.journal_writer import JournalWriter
from headway.stages.state.journal import Journal, JournalRow
from tests.rigs.pipeline import (
    EF,
    Pipeline,
    Trace,
    assert_exact,
    initial_layers,
    load_all,
    make_job,
    oracle,
    save_all,
    with_train,
)
from tests.rigs.unobserved import Unobserved

JOB = make_job(with_train(eval_every=2, eval_microbatches=3, batches=5), EF)


def test_an_evaluation_moves_no_bit_of_the_training() -> None:
    """With and without: equal losses and equal weights."""
    job = JOB
    plain = replace(job, train=replace(job.train, eval_every=0, eval_microbatches=0))
    (losses, weights), (without, others) = oracle(job), oracle(plain)
    assert losses == without
    assert all(weights[layer][name].equal(tensor) for layer in others for name, tensor in others[layer].items())


def test_an_evaluation_keeps_nothing_in_flight() -> None:
    """Its microbatches wait for no gradient: the operations of the training are those without it. After the last update
    there are the held-out ones alone, each once, on the newest version."""
    job, traces = JOB, []
    plain = replace(job, train=replace(job.train, eval_every=0, eval_microbatches=0))
    for each in (job, plain):
        trace = Trace()
        pipeline = Pipeline(each, initial_layers(each), Journal(), num_stages=1, observers=[trace])
        pipeline.run()
        traces.append([(op, version) for op, version, _ in trace.ops])
    evaluated, without = traces
    assert evaluated[: len(without)] == without
    assert evaluated[len(without) :] == [(Forward(5, i), 5) for i in range(3)]


def test_a_stop_between_evaluations_loses_none(tmp_path: Path) -> None:
    """Stop in the middle and go on from files with another cut: each evaluation is in the journal once."""
    job = make_job(with_train(eval_every=2, eval_microbatches=3, batches=8), EF)
    layers, journal = initial_layers(job), Journal()
    first = Pipeline(job, layers, journal, num_stages=2, stop_after_batch=2)
    (boundary,) = set(first.run())
    save_all(tmp_path, job, layers, journal)
    layers, journal = load_all(tmp_path, job, boundary)
    assert Pipeline(job, layers, journal, num_stages=3, generation=2).run() == [8] * 3
    assert_exact(job, layers, journal)


@dataclass
class StrikesAtTheEnd(Unobserved):
    """An observer of the first stage that puts an order into inboxes while the last weights are evaluated."""

    order: Callable[[], None] = lambda: None

    def ended(self, op: Op, **_: Any) -> None:
        if op == Forward(5, 1):
            self.order()


def test_a_pause_while_the_last_weights_are_evaluated_ends_at_the_end() -> None:
    """The first stage is asked where to stop → at the job's last boundary, with the loss of the last weights."""
    layers, journal = initial_layers(JOB), Journal()
    striking = StrikesAtTheEnd()
    pipeline = Pipeline(JOB, layers, journal, num_stages=2, observers=[striking, Unobserved()])
    striking.order = lambda: pipeline.inboxes[0].put("choose")
    assert pipeline.run() == [5, 5]
    assert pipeline.stop == 5
    assert_exact(JOB, layers, journal)


def test_an_abort_while_the_last_weights_are_evaluated_is_made_good(tmp_path: Path) -> None:
    """All workers are cut off then → from the files of an earlier boundary, another cut ends with the same bits."""
    layers, journal = initial_layers(JOB), Journal()
    first = Pipeline(JOB, layers, journal, num_stages=2)
    first.stop_all_at(3)
    first.run()
    save_all(tmp_path, JOB, layers, journal)
    striking = StrikesAtTheEnd()
    aborted = Pipeline(JOB, layers, journal, num_stages=2, observers=[striking, Unobserved()])

    def abort() -> None:
        for inbox in aborted.inboxes:
            inbox.put("abort")

    striking.order = abort
    with pytest.raises(AbortedError):
        aborted.run()
    layers, journal = load_all(tmp_path, JOB, Boundary(3))
    assert Pipeline(JOB, layers, journal, num_stages=3, generation=2).run() == [5] * 3
    assert_exact(JOB, layers, journal)


@pytest.mark.parametrize("kept", [4, 5])
def test_the_end_is_told_in_the_last_batchs_row_alone(kept: int) -> None:
    """A job that goes on at its end may have lost the newest rows of its journal: an older one stays as it is."""
    row = JournalRow(batch=Batch(0), microbatch_losses=(1.0, 2.0), tokens=8, seconds=1.0, generation=Generation(1))
    ignored: Any = repr
    journal, told = Journal(replace(row, batch=Batch(b)) for b in range(kept)), list[JournalRow]()
    context: Any = SimpleNamespace(train=JOB.train, boundary=Boundary(JOB.train.batches))
    writer = JournalWriter(journal, context, on_judged=ignored, on_losses=ignored, on_batch=told.append)
    m = JOB.train.microbatches
    writer.add(JOB.train.batches, range(m, m + JOB.train.num_evaluated), [0.5] * JOB.train.num_evaluated)
    assert [found.final_eval_loss for found in journal.rows[3:]] == [None, 0.5][: kept - 3]
    assert len(told) == kept - 4


def test_a_job_that_goes_on_has_no_end_in_its_middle() -> None:
    """The last row of the job that it continues had a loss of last weights: here there are more batches."""
    row = JournalRow(batch=Batch(0), microbatch_losses=(1.0, 2.0), tokens=8, seconds=1.0, generation=Generation(1))
    for boundary, final in ((3, None), (JOB.train.batches, 0.5)):
        journal = Journal(replace(row, batch=Batch(b)) for b in range(boundary))
        journal.complete(replace(row, batch=Batch(boundary - 1), final_eval_loss=0.5))
        context: Any = SimpleNamespace(train=JOB.train, boundary=Boundary(boundary))
        ignored: Any = repr
        JournalWriter(journal, context, on_judged=ignored, on_losses=ignored, on_batch=ignored).begin()
        assert [found.final_eval_loss for found in journal.rows] == [None] * (boundary - 1) + [final]
