"""What a worker says of a snapshot that is over."""

from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from headway.daemon.worker.held_layers import SnapshotReports
from headway.daemon.worker.stage_records import StageRecords
from headway.daemon.workers.goal import FromWorker, SnapshotMissed, Spacing, Wrote
from headway.stages.ids import Boundary, Generation, LayerName, Timeline
from headway.stages.state.snapshot_interval import SnapshotInterval
from headway.stages.state.snapshot_writer import SnapshotEnded
from headway.stages.state.state_file import WrittenFile

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
    told: list[FromWorker] = []
    snapshots = SnapshotReports(SimpleQueue(), StageRecords(None, node="a", incarnation="i"), told.append)
    for boundary, factor, trouble in ((20, 1, ""), (40, 2, ""), (80, 2, ""), (120, 2, "disk full")):
        snapshots._snapshots = cast(Any, Spaced(factor))
        snapshots.ended(ended(boundary, trouble=trouble))
    wrote = [message for message in told if isinstance(message, Wrote)]
    late, missed = (message for message in told if isinstance(message, SnapshotMissed))
    assert [message.boundary for message in wrote] == [20, 40, 80]
    assert (late.boundary, late.written, late.factor) == (40, True, 2)
    assert "twice in a row: only every 2. snapshot" in late.reason
    assert (missed.boundary, missed.written, missed.reason, missed.factor) == (120, False, "disk full", 2)
    assert [file.checksum for file in wrote[0].files] == ["sha-head"]
    assert snapshots.spacing == Spacing(2, 40)
