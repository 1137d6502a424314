"""However many workers hold a stage, the losses and weights are bit for bit those of the plain loop."""

from itertools import pairwise
from pathlib import Path

import pytest

from headway.stages.ids import LayerName
from headway.stages.links.link import Frame, FrameKind
from headway.stages.schedule.operations import Backward, Forward, Update
from headway.stages.spec import weight_version
from headway.stages.state.journal import Journal
from headway.stages.telemetry.goodput import Goodput
from tests.rigs.local_link import LocalLink
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    Pipeline,
    SnapshotPlan,
    Trace,
    initial_layers,
    make_job,
    timed,
    with_train,
)


def test_each_microbatch_is_computed_by_one_replica_on_the_version_before() -> None:
    """2bw, stages of three and two workers → each stage computes each microbatch once, all of them update."""
    job = make_job(with_train(batches=5, microbatches=7, reduction_groups=4), EF)
    traces = [Trace() for _ in range(5)]
    pipeline = Pipeline(job, initial_layers(job), Journal(), num_stages=2, replicas=(3, 2), observers=traces)
    pipeline.run()
    every = sorted((b, i) for b in range(5) for i in range(7))
    for stage in (0, 1):
        of_stage = [trace for place, trace in zip(pipeline.places, traces, strict=True) if place.stage == stage]
        for kind in (Forward, Backward):
            done = [(op.batch, op.microbatch) for trace in of_stage for op, _, _ in trace.ops if isinstance(op, kind)]
            assert sorted(done) == every
    for trace in traces:
        assert [op.batch for op, _, _ in trace.ops if isinstance(op, Update)] == list(range(5))
        for op, version, num_versions_live in trace.ops:
            assert version == (op.batch if isinstance(op, Update) else weight_version(op.batch, 1))
            assert num_versions_live <= 2


def test_each_replica_writes_the_same_snapshots_and_the_lead_alone_the_journal(tmp_path: Path) -> None:
    """Two workers write every boundary → equal files; the journal is in the lead's folder only."""
    job = make_job(with_train(reduction_groups=2, batches=5), EF)
    pipeline = Pipeline(
        job, initial_layers(job), Journal(), num_stages=1, replicas=(2,), snapshots=SnapshotPlan(tmp_path)
    )
    pipeline.run()
    files = [
        {layer: file.checksum for layer, file in item.files.items()} for item in pipeline.ended if item.boundary == 4
    ]
    with_journal, without = sorted(files, key=len, reverse=True)
    assert with_journal.pop(LayerName("journal"))
    assert with_journal == without
    assert len(without) == len(job.layers)


def test_norms_and_sums_go_only_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares go up and totals down between leads; each lead tells its siblings; slices meet at their owners."""
    job = make_job(with_train(batches=1, microbatches=8, reduction_groups=4), ADAMW)
    sent: list[tuple[str, FrameKind, int]] = []
    send = LocalLink.send

    def record(link: LocalLink, frame: Frame) -> None:
        sent.append((link.peer, frame.kind, frame.microbatch))
        if frame.kind is FrameKind.SUMS:
            assert frame.tensors[0].shape[0] == 2
        send(link, frame)

    monkeypatch.setattr(LocalLink, "send", record)
    Pipeline(job, initial_layers(job), Journal(), num_stages=2, replicas=(2, 2)).run()
    of_kind = {kind: sorted((peer, i) for peer, k, i in sent if k is kind) for kind in FrameKind}
    leads, others = ["stage 0", "stage 1"], ["stage 0 worker 1", "stage 1 worker 1"]
    assert of_kind[FrameKind.NORM_SQUARES] == [("stage 0", 0)]
    assert of_kind[FrameKind.NORM_TOTAL] == sorted([("stage 1", 0), *((peer, 0) for peer in others)])
    for kind in (FrameKind.SUMS, FrameKind.REDUCED):
        assert of_kind[kind] == sorted([*((peer, 1) for peer in leads), *((peer, 0) for peer in others)])
    assert of_kind[FrameKind.LOSSES] == [("stage 1", 1)]
    holders = {"stage 1": (0, 2), "stage 1 worker 1": (1, 3)}
    assert all(i % 4 in holders[peer] for peer, i in of_kind[FrameKind.ACTIVATION])


def test_a_replica_that_waits_for_another_names_it() -> None:
    """Synchronous batches on two workers, the second of which is slow to hand over → the lead waits for it by name."""
    job = make_job(with_train(schedule="1f1b", batches=3, reduction_groups=2), ADAMW)
    goodputs = [Goodput(), Goodput()]
    pipeline = Pipeline(
        job, initial_layers(job), Journal(), num_stages=1, replicas=(2,), observers=[*map(timed, goodputs)]
    )
    pipeline.run()
    waited = {what for goodput in goodputs for what in goodput.seconds(1e9) if what.startswith("waiting:")}
    assert waited
    assert waited <= {"waiting:stage 0", "waiting:stage 0 worker 1"}


def test_losses_are_folded_in_order_of_the_microbatch() -> None:
    """Two workers whose microbatches alternate → the row has them in order, not by worker."""
    job = make_job(with_train(batches=2, microbatches=6, reduction_groups=3), ADAMW)
    alone, shared = Journal(), Journal()
    Pipeline(job, initial_layers(job), alone, num_stages=2).run()
    Pipeline(job, initial_layers(job), shared, num_stages=2, replicas=(1, 3)).run()
    assert [row.microbatch_losses for row in shared.rows] == [row.microbatch_losses for row in alone.rows]
    assert all(one != other for row in shared.rows for one, other in pairwise(row.microbatch_losses))
