"""Snapshots that a stage writes while it computes: their content, who waits for them, and a rollback to them."""

import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest
import torch

from headway.optim.spec import OptimSpec
from headway.stages.errors import AbortedError
from headway.stages.ids import Boundary, Generation, LayerName, Timeline
from headway.stages.schedule.operations import Backward, Update
from headway.stages.stage import snapshots
from headway.stages.stage.snapshots import Snapshots
from headway.stages.state.journal import Journal
from headway.stages.state.layer_file import SUFFIX
from headway.stages.state.snapshot_interval import LATE_S, SnapshotInterval
from headway.stages.state.snapshot_writer import Snapshot, SnapshotEnded, SnapshotWriter
from headway.stages.state.state_file import StateHeader
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    Pipeline,
    SnapshotPlan,
    Trace,
    assert_exact,
    initial_layers,
    load_all,
    make_job,
    save_all,
    with_train,
)
from tests.rigs.snapshots import (
    JOBS,
    assert_snapshots_are_those_of_stops,
    context_of,
    until_it_waits,
)


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("name", JOBS)
def test_a_snapshot_is_what_a_stop_would_have_written(tmp_path: Path, name: str, num_stages: int) -> None:
    """A snapshot of every boundary, while the run goes on → the bytes of a run that stopped there."""
    assert_snapshots_are_those_of_stops(tmp_path, name, num_stages=num_stages)


@pytest.mark.parametrize(
    ("schedule", "dtype", "clip_norm", "optim", "before", "after"),
    [
        ("2bw", "float32", 1.0, EF, 3, 2),
        ("2bw", "bfloat16", 0.0, EF, 1, 3),
        ("1f1b", "float32", 0.05, ADAMW, 2, 5),
        ("gpipe", "bfloat16", 1.0, EF, 3, 1),
    ],
)
def test_a_rollback_gives_the_bits_of_an_undisturbed_run(
    tmp_path: Path, schedule: str, dtype: str, clip_norm: float, optim: OptimSpec, before: int, after: int
) -> None:
    """Aborted in batch 4, back to the snapshot of boundary 2 in the same process, cut anew → the same bits."""
    job = make_job(with_train(schedule=schedule, dtype=dtype, clip_norm=clip_norm, batches=7), optim)
    layers, journal = initial_layers(job), Journal()
    snapshots = SnapshotPlan(tmp_path, every=2)
    pipeline = Pipeline(job, layers, journal, num_stages=before, snapshots=snapshots, abort_after_batch=4)
    with pytest.raises(AbortedError):
        pipeline.run()
    assert (tmp_path / "2").is_dir()
    layers, journal = load_all(tmp_path / "2", job, Boundary(2))
    Pipeline(job, layers, journal, num_stages=after, generation=2).run()
    assert_exact(job, layers, journal)
    assert [row.generation for row in journal.rows] == [1, 1, 2, 2, 2, 2, 2]


def test_a_late_writer_holds_the_update_and_nothing_else(tmp_path: Path) -> None:
    """The file of boundary 1 takes long: batches 1 and 2 are computed meanwhile, update 1 waits, the bits stay."""
    job = JOBS["2bw, clip, Muon + EF"]
    layers, journal, trace = initial_layers(job), Journal(), Trace()
    seen: list[object] = []

    def hold(snapshot: Snapshot, layer: LayerName) -> None:
        if snapshot.boundary == 1 and not seen:
            until_it_waits(pipeline.loops[0])
            seen.extend(op for op, _, _ in trace.ops)

    pipeline = Pipeline(
        job, layers, journal, num_stages=1, observers=[trace], snapshots=SnapshotPlan(tmp_path, on_file=hold)
    )
    pipeline.run()
    assert Update(1) not in seen
    assert {Backward(2, i) for i in range(job.train.microbatches)} <= set(seen)
    assert_exact(job, layers, journal)


def test_a_writer_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of boundary 1 is never done → update 1 runs when the patience ends, the bits stay, no file is left."""
    job = JOBS["2bw, clip, Muon + EF"]
    layers, journal, trace = initial_layers(job), Journal(), Trace()
    monkeypatch.setattr(snapshots, "PATIENCE_S", 0.05)

    def hold(snapshot: Snapshot, layer: LayerName) -> None:
        until = time.monotonic() + 20
        while snapshot.boundary == 1 and Update(1) not in {op for op, _, _ in list(trace.ops)}:
            assert time.monotonic() < until, "the update never ran"
            time.sleep(0.001)

    pipeline = Pipeline(
        job, layers, journal, num_stages=1, observers=[trace], snapshots=SnapshotPlan(tmp_path, on_file=hold)
    )
    pipeline.run()
    assert_exact(job, layers, journal)
    assert "not written within 0 s" in {ended.boundary: ended.trouble for ended in pipeline.ended}[Boundary(1)]
    assert not (tmp_path / "1").exists()


def test_the_patience_follows_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update waits 60 s and the bytes over the lowest rate, and never so long that its neighbours give up."""
    job = make_job(with_train(batches=4), EF)
    context = context_of(job)
    layers = list(initial_layers(job).values())
    num_bytes = sum(tensor.nbytes for layer in layers for tensor in layer.tensors().values())
    held = Snapshots(SnapshotWriter(SimpleQueue()), SnapshotInterval(1, 0), context, folder=tmp_path)
    assert held.patience_s == 60
    held.reached(Boundary(3), layers, None)
    monkeypatch.setattr(snapshots, "LEAST_BYTES_PER_S", num_bytes / 100)
    assert held.patience_s == 160
    monkeypatch.setattr(snapshots, "LEAST_BYTES_PER_S", num_bytes / 1e6)
    assert held.patience_s == context.patience_s / 2


def test_layers_that_stayed_live_are_written_at_the_start(tmp_path: Path) -> None:
    """A planned change at boundary 2 leaves two layers and the journal → just these are written."""
    job = make_job(with_train(batches=4), EF)
    layers, journal = initial_layers(job), Journal()
    first = Pipeline(job, layers, journal, num_stages=2)
    first.stop_all_at(2)
    first.run()
    save_all(tmp_path, job, layers, journal)
    live = (LayerName("block.0"), LayerName("head"), LayerName("journal"))
    plan = SnapshotPlan(tmp_path / "snapshots", every=0, live=live)
    Pipeline(job, layers, journal, num_stages=3, generation=2, snapshots=plan).run()
    assert_exact(job, layers, journal)
    assert {path.stem for path in (plan.folder / "2").iterdir()} == set(live)
    for layer in live:
        name = f"{layer}{SUFFIX}"
        assert (plan.folder / "2" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("is_folder_bad", [True, False])
def test_a_snapshot_that_cannot_be_written_harms_nobody(tmp_path: Path, is_folder_bad: bool) -> None:
    """No folder, or no room for the third file → told with the reason; no file of it is left; the bits stay."""
    job = make_job(with_train(batches=3), EF)
    layers, journal = initial_layers(job), Journal()
    folder = tmp_path / "snapshots"
    if is_folder_bad:
        folder.write_text("a file")
    else:
        (folder / "1" / f"block.1{SUFFIX}").mkdir(parents=True)
    pipeline = Pipeline(job, layers, journal, num_stages=1, snapshots=SnapshotPlan(folder))
    pipeline.run()
    assert_exact(job, layers, journal)
    reasons = {ended.boundary: ended.trouble for ended in pipeline.ended}
    if is_folder_bad:
        assert {1, 2} == reasons.keys()
        assert all("Not a directory" in reason for reason in reasons.values())
    else:
        assert "Is a directory" in reasons[Boundary(1)]
        assert reasons[Boundary(2)] == ""
        assert [path.name for path in (folder / "1").iterdir()] == [f"block.1{SUFFIX}"]


def snapshot_of(folder: Path, *layers: str) -> Snapshot:
    names = [LayerName(layer) for layer in layers]
    return Snapshot(
        folder=folder,
        headers={n: StateHeader(job="j", layer=n, boundary=3, timeline=1, dtype="float32") for n in names},
        tensors={name: {"a": torch.ones(3)} for name in names},
        job="j",
        generation=Generation(1),
        timeline=Timeline(1),
        boundary=Boundary(3),
    )


def test_a_cancelled_snapshot_leaves_nothing(tmp_path: Path) -> None:
    """Cancelled between two files → no file, no report; a second one meanwhile is refused, one after it is written."""
    inbox: SimpleQueue[object] = SimpleQueue()
    is_written, may_go_on = Event(), Event()

    def hold(_snapshot: Snapshot, _layer: LayerName) -> None:
        is_written.set()
        assert may_go_on.wait(20)

    writer = SnapshotWriter(inbox, on_file=hold)
    assert writer.begin(snapshot_of(tmp_path / "3", "a", "b"))
    assert is_written.wait(20)
    assert not writer.begin(snapshot_of(tmp_path / "4", "a"))
    assert not writer.cancel(timeout_s=0.01)
    may_go_on.set()
    assert writer.cancel(timeout_s=20)
    assert not list(tmp_path.iterdir())
    assert inbox.empty()
    assert writer.begin(snapshot_of(tmp_path / "5", "a", "b"))
    ended = inbox.get(timeout=20)
    assert isinstance(ended, SnapshotEnded)
    assert sorted(path.name for path in (tmp_path / "5").iterdir()) == [f"a{SUFFIX}", f"b{SUFFIX}"]


def test_only_its_own_snapshot_frees_an_update(tmp_path: Path) -> None:
    """The end of a snapshot of the generation before, at the same boundary, arrives late: the update is held on."""
    job = make_job(with_train(batches=4), EF)
    context = context_of(job)
    held = Snapshots(SnapshotWriter(SimpleQueue()), SnapshotInterval(1, 0), context, folder=tmp_path)
    layers = list(initial_layers(job).values())
    held.reached(Boundary(3), layers, None)
    assert held.is_reading
    before = SnapshotEnded(job="tiny", generation=Generation(1), timeline=Timeline(1), boundary=Boundary(3))
    held.ended(before)
    assert held.is_reading
    held.ended(replace(before, generation=Generation(2)))
    assert not held.is_reading


def test_a_file_that_was_there_before_stays(tmp_path: Path) -> None:
    """A stop has written one of the files already, then a snapshot of the same boundary fails → that file stays."""
    (tmp_path / "3" / f"b{SUFFIX}").mkdir(parents=True)
    (tmp_path / "3" / f"a{SUFFIX}").write_text("written and told of")
    inbox: SimpleQueue[object] = SimpleQueue()
    assert SnapshotWriter(inbox).begin(snapshot_of(tmp_path / "3", "a", "b"))
    ended = inbox.get(timeout=20)
    assert isinstance(ended, SnapshotEnded)
    assert "Is a directory" in ended.trouble
    assert (tmp_path / "3" / f"a{SUFFIX}").is_file()


def test_a_bug_in_the_writer_reaches_the_stage(tmp_path: Path) -> None:
    """What is no failure of the disk → the exception itself is put into the inbox, and no file is left."""

    def fail(_snapshot: Snapshot, _layer: LayerName) -> None:
        raise ZeroDivisionError

    inbox: SimpleQueue[object] = SimpleQueue()
    writer = SnapshotWriter(inbox, on_file=fail)
    assert writer.begin(snapshot_of(tmp_path / "3", "a"))
    assert isinstance(inbox.get(timeout=20), ZeroDivisionError)


def test_boundaries_are_due_by_both_numbers_and_the_factor() -> None:
    """Every 20th and every 50th, then half of them; boundary 0 never; 0 turns a number off."""
    interval = SnapshotInterval(20, 50)
    assert [b for b in range(121) if interval.is_due(b)] == [20, 40, 50, 60, 80, 100, 120]
    interval.space(2)
    assert [b for b in range(121) if interval.is_due(b)] == [40, 50, 80, 100, 120]
    assert not any(SnapshotInterval(0, 0).is_due(b) for b in range(100))
    for factor in (0, 3, -2):
        with pytest.raises(ValueError, match="power of two"):
            interval.space(factor)


def test_checkpoints_do_not_drift_when_snapshots_are_spaced() -> None:
    """Every 20 and every 100 batches: four times as few snapshots leave each checkpoint where it is.

    Only where checkpoints would come more often than the spaced snapshots are they spaced, too.
    """
    interval = SnapshotInterval(20, 100)
    interval.space(4)
    assert [b for b in range(401) if interval.is_due(b)] == [80, 100, 160, 200, 240, 300, 320, 400]
    interval.space(16)
    assert [b for b in range(1601) if interval.is_due(b)] == [320, 400, 640, 800, 960, 1200, 1280, 1600]
    alone = SnapshotInterval(0, 10)
    alone.space(2)
    assert [b for b in range(61) if alone.is_due(b)] == [20, 40, 60]


def test_the_interval_doubles_when_a_snapshot_is_late_twice_in_a_row() -> None:
    """Late, in time, late: nothing; late once more → twice as far apart. A small share of the interval is not late."""
    interval = SnapshotInterval(20, 0)
    late, in_time = {"waited_s": 2.0, "since_last_s": 10.0}, {"waited_s": 0.0, "since_last_s": 10.0}
    assert [interval.ended(**times) for times in (late, in_time, late)] == [False] * 3
    assert interval.ended(**late)
    assert interval.factor == 2
    assert [interval.ended(**late), interval.ended(**late), interval.factor] == [False, True, 4]
    for _ in range(3):
        assert not interval.ended(waited_s=0.9 * LATE_S, since_last_s=0.1)
        assert not interval.ended(waited_s=2.0, since_last_s=100.0)
