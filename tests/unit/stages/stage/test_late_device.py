"""On devices whose copies are late, out of order and poison until they are done, every bit is that of the plain loop.

A wait that is missing, and memory that is used again too early, would show here without a card.
"""

from pathlib import Path
from queue import SimpleQueue

import pytest

from headway.stages.device.run_events import DeviceDone, RunEvents
from headway.stages.ids import Boundary, LayerName
from headway.stages.links.codec import Codec
from headway.stages.schedule.operations import Update
from headway.stages.stage.snapshots import Snapshots
from headway.stages.state.host_blocks import HostBlocks
from headway.stages.state.journal import Journal
from headway.stages.state.snapshot_interval import SnapshotInterval
from headway.stages.state.snapshot_writer import Snapshot, SnapshotWriter
from tests.rigs.coded_cuts import assert_equals_reference, run
from tests.rigs.late_streams import late_device
from tests.rigs.pipeline import (
    EF,
    JOBS,
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
from tests.rigs.snapshots import JOBS as SNAPSHOTS_JOBS
from tests.rigs.snapshots import assert_equal_files, assert_snapshots_are_those_of_stops, context_of, until_it_waits

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]


def test_two_stages_of_late_devices_have_the_bits_of_the_plain_loop() -> None:
    """Two stages with clipping, three seeds → the losses and weights of the reference."""
    job = JOBS["2bw, Muon + EF"]
    for seed in (101, 102, 103):
        layers, journal = initial_layers(job), Journal()
        Pipeline(job, layers, journal, num_stages=2, late_seed=seed).run()
        assert_exact(job, layers, journal)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("wire", "codec"), [("int8", Codec.INT8), ("bf16", Codec.BF16)])
def test_late_copies_change_no_bit_of_coded_cuts(wire: str, codec: Codec, seed: int) -> None:
    """Both cuts of three stages coded, with feedback → the bits of the reference with the codec."""
    job = make_job(with_train(batches=3, wire=wire, reduction_groups=2), EF)
    pipeline = run(job, num_stages=3, codecs=[codec] * 2, late_seed=seed)
    assert_equals_reference(job, pipeline, [codec] * 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", list(SNAPSHOTS_JOBS)[:1])
def test_a_snapshot_of_a_late_device_leads_to_the_same_bits(tmp_path: Path, name: str, seed: int) -> None:
    """Snapshots of every boundary of a run on late devices; another run goes on from one → the reference's bits."""
    job = SNAPSHOTS_JOBS[name]
    plan = SnapshotPlan(tmp_path)
    layers, journal = initial_layers(job), Journal()
    Pipeline(job, layers, journal, num_stages=2, snapshots=plan, late_seed=seed).run()
    assert_exact(job, layers, journal)
    layers, journal = load_all(tmp_path / "2", job, Boundary(2))
    Pipeline(job, layers, journal, num_stages=3, generation=2, late_seed=seed).run()
    assert_exact(job, layers, journal)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_of_a_late_device_is_what_a_stop_would_have_written(tmp_path: Path, seed: int) -> None:
    """The copies to the host are late, and the files are written after the next updates → the bytes of a stop."""
    name = list(SNAPSHOTS_JOBS)[seed % len(SNAPSHOTS_JOBS)]
    assert_snapshots_are_those_of_stops(tmp_path, name, num_stages=2, late_seed=seed)


def test_updates_wait_until_a_snapshot_is_copied(tmp_path: Path) -> None:
    """The state is on its way to the host → the tensors are being read, until the copy is heard of."""
    device, inbox = late_device(1), SimpleQueue[DeviceDone]()
    job = make_job(with_train(batches=4), EF)
    layers = list(initial_layers(job).values())
    events = RunEvents(device, inbox)
    snapshots = Snapshots(
        SnapshotWriter(SimpleQueue()),
        SnapshotInterval(1, 0),
        context_of(job),
        folder=tmp_path,
        blocks=HostBlocks(device, block_bytes=5000),
    )
    snapshots.attach(events, lambda: None)
    snapshots.reached(Boundary(3), layers, None)
    assert snapshots.is_reading
    events.heard(inbox.get(timeout=20))
    assert not snapshots.is_reading
    device.close()


def test_updates_run_while_a_snapshot_is_written(tmp_path: Path) -> None:
    """The writer is held at its first file: update 1 runs, the snapshot of boundary 2 waits; both have their bits."""
    job = make_job(with_train(batches=5), EF)
    seen: list[object] = []

    def hold(snapshot: Snapshot, _layer: LayerName) -> None:
        if snapshot.boundary == 1 and not seen:
            until_it_waits(pipeline.loops[0])
            seen.extend(op for op, _, _ in trace.ops)

    layers, journal, trace = initial_layers(job), Journal(), Trace()
    plan = SnapshotPlan(tmp_path / "snapshots", on_file=hold)
    pipeline = Pipeline(job, layers, journal, num_stages=1, observers=[trace], snapshots=plan, late_seed=3)
    pipeline.run()
    assert Update(1) in seen
    assert Update(2) not in seen
    assert_exact(job, layers, journal)
    assert [ended.trouble for ended in pipeline.ended] == [""] * 4
    for boundary in (1, 2):
        layers, journal = initial_layers(job), Journal()
        stopped = Pipeline(job, layers, journal, num_stages=1)
        stopped.stop_all_at(boundary)
        stopped.run()
        (tmp_path / f"stop-{boundary}").mkdir()
        save_all(tmp_path / f"stop-{boundary}", job, layers, journal)
        assert_equal_files(plan.folder / str(boundary), tmp_path / f"stop-{boundary}", job)
