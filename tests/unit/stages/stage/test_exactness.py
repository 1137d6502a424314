"""However the model is cut, the losses and weights are bit for bit those of the plain loop."""

from pathlib import Path

import pytest
import torch

from headway.optim.spec import OptimSpec
from headway.stages.ids import Boundary
from headway.stages.schedule.operations import Backward, Forward, Update
from headway.stages.spec import ScheduleName, weight_version
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    JOBS,
    NARROW,
    Pipeline,
    Trace,
    assert_exact,
    initial_layers,
    load_all,
    make_job,
    save_all,
    with_train,
)


def cuts() -> list[object]:
    """Every job on every cut; half of them in a quick run."""
    return [
        pytest.param(name, number, marks=() if (j + n) % 2 == 0 else pytest.mark.slow, id=f"{name}-{number}")
        for j, name in enumerate(JOBS)
        for n, number in enumerate((1, 3, 2, 5))
    ]


@pytest.mark.parametrize(("name", "num_stages"), cuts())
def test_any_cut_gives_the_bits_of_the_plain_loop(name: str, num_stages: int) -> None:
    """A job on 1, 2, 3 and 5 stages → the losses and weights of the reference."""
    job = JOBS[name]
    layers, journal = initial_layers(job), Journal()
    assert Pipeline(job, layers, journal, num_stages=num_stages).run() == [job.train.batches] * num_stages
    assert_exact(job, layers, journal)


@pytest.mark.parametrize(
    ("schedule", "dtype", "optim", "before", "after"),
    [
        ("2bw", "float32", EF, 3, 2),
        ("2bw", "bfloat16", EF, 1, 5),
        ("2bw", "bfloat16", NARROW, 2, 3),
        ("2bw", "float32", ADAMW, 2, 3),
        ("1f1b", "float32", ADAMW, 5, 1),
    ],
)
@pytest.mark.parametrize("through_files", [True, False])
def test_a_stop_and_a_new_cut_lose_nothing(
    tmp_path: Path,
    schedule: ScheduleName,
    dtype: str,
    optim: OptimSpec,
    before: int,
    after: int,
    through_files: bool,
) -> None:
    """Stop in the middle, cut anew, from files or from the live state → the bits of a run that nobody disturbed."""
    job = make_job(with_train(schedule=schedule, dtype=dtype, batches=8), optim)
    layers, journal = initial_layers(job), Journal()
    first = Pipeline(job, layers, journal, num_stages=before, stop_after_batch=2)
    boundaries = set(first.run())
    assert boundaries == {first.stop}
    boundary = boundaries.pop()
    assert 3 <= boundary < 8
    assert journal.rows[-1].batch + 1 == boundary
    if through_files:
        save_all(tmp_path, job, layers, journal)
        layers, journal = load_all(tmp_path, job, boundary)
    Pipeline(job, layers, journal, num_stages=after, generation=2).run()
    assert_exact(job, layers, journal)
    assert [row.generation for row in journal.rows] == [1] * boundary + [2] * (8 - boundary)


def test_stopping_at_every_batch_loses_nothing(tmp_path: Path) -> None:
    """A stop after each batch, each time another cut from files, boundary 0 included → the same bits."""
    job = make_job(with_train(batches=4), EF)
    layers, journal = initial_layers(job), Journal()
    boundary = save_all(tmp_path, job, layers, journal)
    num_stages = 0
    while boundary < 4:
        layers, journal = load_all(tmp_path, job, boundary)
        num_stages = num_stages % 5 + 1
        Pipeline(job, layers, journal, num_stages=num_stages, stop_after_batch=boundary).run()
        reached = save_all(tmp_path, job, layers, journal)
        assert reached > boundary
        boundary = reached
    assert_exact(job, layers, journal)


def test_a_trace_shows_a_delay_of_exactly_one() -> None:
    """2bw on three stages: each microbatch once forward and once backward on W_v(b), at most two versions alive."""
    job = make_job(with_train(batches=5), EF)
    traces = [Trace() for _ in range(3)]
    Pipeline(job, initial_layers(job), Journal(), num_stages=3, observers=traces).run()
    every = {(b, i) for b in range(5) for i in range(job.train.microbatches)}
    for trace in traces:
        for kind in (Forward, Backward):
            done = [(op.batch, op.microbatch) for op, _, _ in trace.ops if isinstance(op, kind)]
            assert sorted(done) == sorted(every)
        for op, version, num_versions_live in trace.ops:
            assert version == (op.batch if isinstance(op, Update) else weight_version(op.batch, 1))
            assert num_versions_live <= 2
    # A stage that has done a batch before it hears the norm of the one before never holds both versions.
    assert max(alive for trace in traces for _, _, alive in trace.ops) == 2


def test_stages_report_the_boundary_they_started_from_when_stopped_at_once() -> None:
    """A stop is asked for before anything has run → boundary 0, and nothing has changed."""
    job = make_job(with_train(), EF)
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(job, layers, journal, num_stages=2)
    pipeline.inboxes[0].put("choose")
    assert pipeline.run() == [Boundary(0)] * 2
    assert len(journal) == 0
    again = initial_layers(job)
    for name, layer in layers.items():
        for parameter, tensor in again[name].weights().items():
            assert torch.equal(layer.weights()[parameter], tensor)
