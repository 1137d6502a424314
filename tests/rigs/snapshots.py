"""Parts that tests of snapshots share."""

import time
from pathlib import Path

import torch

from headway.daemon.jobs.job import JobSpec
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.stage.context import StageContext
from headway.stages.stage.loop import StageLoop
from headway.stages.state.journal import Journal
from headway.stages.state.layer_file import SUFFIX
from headway.stages.state.state_file import read_state
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    Item,
    Pipeline,
    SnapshotPlan,
    assert_exact,
    initial_layers,
    make_job,
    save_all,
    with_train,
)

JOBS = {
    "2bw, clip, Muon + EF": make_job(with_train(batches=5), EF),
    "2bw, bfloat16, no clip": make_job(with_train(batches=5, dtype="bfloat16", clip_norm=0.0), EF),
    "1f1b, clip, AdamW": make_job(with_train(batches=5, schedule="1f1b"), ADAMW),
    "gpipe, bfloat16, 3 groups": make_job(
        with_train(batches=5, schedule="gpipe", dtype="bfloat16", microbatches=6, reduction_groups=3), EF
    ),
}


def assert_equal_files(one: Path, other: Path, job: JobSpec) -> None:
    """The same layers to the byte; the same journal but for the seconds that things took."""
    for layer in job.layers:
        assert (one / f"{layer}{SUFFIX}").read_bytes() == (other / f"{layer}{SUFFIX}").read_bytes(), layer
    (header, found), (wanted_header, wanted) = (read_state(folder / f"journal{SUFFIX}") for folder in (one, other))
    assert header == wanted_header
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found.keys() - {"seconds"})


def assert_snapshots_are_those_of_stops(
    tmp_path: Path, name: str, *, num_stages: int, late_seed: int | None = None
) -> None:
    job = JOBS[name]
    layers, journal = initial_layers(job), Journal()
    plan = SnapshotPlan(tmp_path / "snapshots")
    pipeline = Pipeline(job, layers, journal, num_stages=num_stages, snapshots=plan, late_seed=late_seed)
    pipeline.run()
    assert_exact(job, layers, journal)
    assert sorted(path.name for path in plan.folder.iterdir()) == ["1", "2", "3", "4"]
    assert len(pipeline.ended) == 4 * num_stages
    assert not any(ended.trouble for ended in pipeline.ended)
    for boundary in (1, 2, 4):
        layers, journal = initial_layers(job), Journal()
        stopped = Pipeline(job, layers, journal, num_stages=1)
        stopped.stop_all_at(boundary)
        stopped.run()
        (tmp_path / f"stop-{boundary}").mkdir()
        save_all(tmp_path / f"stop-{boundary}", job, layers, journal)
        assert_equal_files(plan.folder / str(boundary), tmp_path / f"stop-{boundary}", job)
        sums = {
            layer: file.checksum
            for ended in pipeline.ended
            if ended.boundary == boundary
            for layer, file in ended.files.items()
        }
        assert sums.keys() == {*job.layers, "journal"}


def until_it_waits(loop: StageLoop[Item]) -> None:
    until = time.monotonic() + 20
    while loop.waiting_for != "the snapshot writer":
        assert time.monotonic() < until, "the stage never waited for the writer"
        time.sleep(0.001)


def context_of(job: JobSpec) -> StageContext:
    """The only stage of a job's second generation."""
    return StageContext(
        model=job.model,
        train=job.train,
        seed=7,
        job="tiny",
        generation=Generation(2),
        timeline=Timeline(1),
        stage_index=StageIndex(0),
        num_stages=1,
        layers=tuple(LayerName(layer) for layer in job.layers),
        depth=1,
        boundary=Boundary(0),
        device=torch.device("cpu"),
    )
