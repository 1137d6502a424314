"""Held-out evaluation beside the training: the reference's figures on every cut, and nothing else moves."""

from dataclasses import replace
from pathlib import Path

from headway.stages.schedule.operations import Forward
from headway.stages.state.journal import Journal
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

JOB = make_job(with_train(eval_every=2, eval_microbatches=3, batches=5), EF)


def test_an_evaluation_moves_no_bit_of_the_training() -> None:
    """With and without: equal losses and equal weights."""
    job = JOB
    plain = replace(job, train=replace(job.train, eval_every=0, eval_microbatches=0))
    (losses, weights), (without, others) = oracle(job), oracle(plain)
    assert losses == without
    assert all(weights[layer][name].equal(tensor) for layer in others for name, tensor in others[layer].items())


def test_an_evaluation_keeps_nothing_in_flight() -> None:
    """Its microbatches wait for no gradient: as many operations as without, and as many microbatches in flight."""
    job, traces = JOB, []
    plain = replace(job, train=replace(job.train, eval_every=0, eval_microbatches=0))
    for each in (job, plain):
        trace = Trace()
        pipeline = Pipeline(each, initial_layers(each), Journal(), num_stages=1, observers=[trace])
        pipeline.run()
        traces.append([op for op, _, _ in trace.ops])
    assert traces[0] == traces[1]
    assert sum(isinstance(op, Forward) for op in traces[0]) == job.train.batches * job.train.microbatches


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
