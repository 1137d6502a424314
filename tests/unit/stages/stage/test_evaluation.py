"""Held-out evaluation beside the training: the reference's figures on every cut, and nothing else moves."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.jobs.job import JobSpec
from headway.stages.schedule.operations import Forward
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    CountingTokens,
    Pipeline,
    Trace,
    assert_exact,
    initial_layers,
    load_all,
    make_job,
    oracle,
    oracle_results,
    save_all,
    with_train,
)

JOBS = {
    "2bw, each second batch": make_job(with_train(eval_every=2, eval_microbatches=3, batches=5), EF),
    "2bw, masked, documents, bfloat16": make_job(
        with_train(eval_every=1, dtype="bfloat16", loss_mask="data", documents="separate", loss_chunk=5), EF
    ),
    "1f1b, recomputation, 3 groups": make_job(
        with_train(schedule="1f1b", eval_every=3, microbatches=7, reduction_groups=3, recompute="block"), ADAMW
    ),
    "gpipe, attention again": make_job(with_train(schedule="gpipe", eval_every=2, recompute="attention"), EF),
}
CASES = [
    pytest.param(name, number, marks=() if (j + n) % 2 == 0 else pytest.mark.slow, id=f"{name}-{number}")
    for j, name in enumerate(JOBS)
    for n, number in enumerate((1, 3, 2, 5))
]


def evaluated_batches(job: JobSpec) -> list[int]:
    """The batches of which the reference tells a loss on held-out text."""
    return [result.batch for result in oracle_results(job)[0] if result.eval_loss is not None]


@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_any_cut_evaluates_to_the_bits_of_the_plain_loop(name: str, num_stages: int) -> None:
    """1, 2, 3 and 5 stages → losses, held-out losses and weights of the reference."""
    job = JOBS[name]
    layers, journal = initial_layers(job), Journal()
    assert Pipeline(job, layers, journal, num_stages=num_stages).run() == [job.train.batches] * num_stages
    assert_exact(job, layers, journal)
    assert evaluated_batches(job) == list(range(0, job.train.batches, job.train.eval_every))


@pytest.mark.parametrize(
    ("replicas", "late_seed"),
    [((2, 3), None), ((3, 2), 1), *(pytest.param((2, 2), seed, marks=pytest.mark.slow) for seed in range(2, 22))],
)
def test_replicas_and_late_devices_evaluate_to_the_same_bits(replicas: tuple[int, ...], late_seed: int | None) -> None:
    """Each replica evaluates beside the microbatches of its groups; those of the last stage tell the lead."""
    job = make_job(with_train(eval_every=2, eval_microbatches=5, microbatches=8, reduction_groups=4), EF)
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(job, layers, journal, num_stages=len(replicas), replicas=replicas, late_seed=late_seed)
    assert pipeline.run() == [job.train.batches] * sum(replicas)
    assert_exact(job, layers, journal)


def test_an_evaluation_moves_no_bit_of_the_training() -> None:
    """With and without: equal losses and equal weights."""
    job = JOBS["2bw, each second batch"]
    plain = replace(job, train=replace(job.train, eval_every=0, eval_microbatches=0))
    (losses, weights), (without, others) = oracle(job), oracle(plain)
    assert losses == without
    assert all(weights[layer][name].equal(tensor) for layer in others for name, tensor in others[layer].items())


def test_an_evaluation_keeps_nothing_in_flight() -> None:
    """Its microbatches wait for no gradient: as many operations as without, and as many microbatches in flight."""
    job, traces = JOBS["2bw, each second batch"], []
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


def test_held_out_text_is_no_text_of_the_training() -> None:
    """The fake's own: what the other tests compare would be equal otherwise."""
    train, tokens = JOBS["2bw, each second batch"].train, CountingTokens()
    trained = tokens.microbatch(train, seed=7, batch=0, microbatch=0)
    assert not trained.inputs.equal(tokens.held_out(train, 0).inputs)
