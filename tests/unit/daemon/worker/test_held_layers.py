"""A stage loads the files that its start names: of one boundary, one timeline and one job, and no others."""

from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import pytest
import torch

from headway.daemon.worker.goal import FromWorker, SnapshotMissed, Source, SourceKind, Spacing, Start, Wrote
from headway.daemon.worker.held_layers import Held, SnapshotReports, load_stage
from headway.daemon.worker.stage_records import StageRecords
from headway.stages.device.cpu import CpuDevice
from headway.stages.errors import DamagedFileError
from headway.stages.ids import Boundary, Generation, LayerName, Timeline
from headway.stages.state.journal import Journal
from headway.stages.state.layer_file import SUFFIX, write_journal, write_layer
from headway.stages.state.snapshot_interval import SnapshotInterval
from headway.stages.state.snapshot_writer import SnapshotEnded
from headway.stages.state.state_file import WrittenFile
from tests.rigs.agent_views import plan
from tests.rigs.pipeline import Pipeline, initial_layers, make_job, with_train

JOB = make_job(with_train(batches=4))
PARTS = (*JOB.layers, "journal")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Boundary 2 of timelines 1 and 3, which differ: the weights of timeline 3 began with another seed."""
    found = {}
    for timeline, seed in ((1, 7), (3, 8)):
        found[timeline] = tmp_path_factory.mktemp(f"timeline-{timeline}")
        layers, journal = initial_layers(make_job(JOB.train, seed=seed)), Journal()
        pipeline = Pipeline(JOB, layers, journal, num_stages=1, generation=timeline)
        pipeline.stop_all_at(2)
        pipeline.run()
        for name, layer in layers.items():
            path = found[timeline] / f"{name}{SUFFIX}"
            write_layer(path, layer, job="tiny", train=JOB.train, timeline=Timeline(timeline))
        path = found[timeline] / f"journal{SUFFIX}"
        write_journal(path, journal, job="tiny", boundary=Boundary(2), train=JOB.train, timeline=Timeline(timeline))
    return found


def start(paths: dict[str, Path], *, source_timeline: int) -> Start:
    """Generation 4 begins at boundary 2, on a timeline of its own, with one stage."""
    whole = plan(4, ("a", JOB.layers), source="nodes", boundary=2)
    return Start(
        plan=replace(whole, timeline=4, source_timeline=source_timeline),
        position=0,
        sources=tuple(Source(part, SourceKind.FILE, str(path)) for part, path in paths.items()),
    )


def load(order: Start) -> dict[str, torch.Tensor]:
    """Every tensor by layer and name; the journal's losses too."""
    layers, journal = load_stage(order, JOB, held=Held(), device=CpuDevice())
    assert journal is not None
    tensors = {f"{name}/{key}": tensor for name, layer in layers.items() for key, tensor in layer.tensors().items()}
    return tensors | {"losses": journal.tensors()["losses"]}


def test_a_start_never_mixes_two_timelines(folders: dict[int, Path]) -> None:
    """Each timeline's files load as they are, and differ; with any one of the other's among them, none does."""
    whole = {timeline: {part: folders[timeline] / f"{part}{SUFFIX}" for part in PARTS} for timeline in (1, 3)}
    ours, theirs = (load(start(whole[timeline], source_timeline=timeline)) for timeline in (1, 3))
    assert ours.keys() == theirs.keys()
    assert not torch.equal(ours["losses"], theirs["losses"])
    for part in PARTS:
        mixed = whole[1] | {part: whole[3][part]}
        with pytest.raises(DamagedFileError, match="of timeline 3, and timeline 1 was asked for") as caught:
            load(start(mixed, source_timeline=1))
        assert str(whole[3][part]) in str(caught.value)


HEAD = WrittenFile(path=Path("head.safetensors"), size_bytes=5, checksum="sha-head")


class Spaced:
    """Stands for the snapshots of a run."""

    def __init__(self, factor: int) -> None:
        self.interval = SnapshotInterval(20, 0)
        self.interval.space(factor)


def ended(boundary: int, *, trouble: str = "") -> SnapshotEnded:
    about: dict[str, Any] = {"job": "", "generation": Generation(1), "timeline": Timeline(1)}
    files = {} if trouble else {LayerName("head"): HEAD}
    return SnapshotEnded(**about, boundary=Boundary(boundary), files=files, trouble=trouble)


def test_a_late_snapshot_is_not_reported_as_missed() -> None:
    """In time; late, so that later ones are further apart; as before; failed → written, written and late, written, not.

    Who hears that a boundary was missed fetches its layers from a sibling.
    """
    told, spacing = list[FromWorker](), Spacing()
    snapshots = SnapshotReports(SimpleQueue(), StageRecords(None, node="a", incarnation="i"), told.append)
    for boundary, factor, trouble in ((20, 1, ""), (40, 2, ""), (80, 2, ""), (120, 2, "disk full")):
        snapshots._snapshots = cast(Any, Spaced(factor))
        spacing = snapshots.ended(ended(boundary, trouble=trouble), spacing)
    wrote = [message for message in told if isinstance(message, Wrote)]
    late, missed = (message for message in told if isinstance(message, SnapshotMissed))
    assert [message.boundary for message in wrote] == [20, 40, 80]
    assert (late.boundary, late.written, late.factor) == (40, True, 2)
    assert "twice in a row: only every 2. snapshot" in late.reason
    assert (missed.boundary, missed.written, missed.reason, missed.factor) == (120, False, "disk full", 2)
    assert [file.checksum for file in wrote[0].files] == ["sha-head"]
    assert spacing == Spacing(2, 40)
