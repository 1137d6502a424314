"""What a worker says of a snapshot that is over."""

from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from headway.daemon.worker.snapshot_reports import SnapshotReports
from headway.daemon.worker.stage_records import StageRecords
from headway.proto.control_pb2 import Report
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
    told: list[Report] = []
    snapshots = SnapshotReports(SimpleQueue(), StageRecords(None, node="a", incarnation="i"), told.append)
    for boundary, factor, trouble in ((20, 1, ""), (40, 2, ""), (80, 2, ""), (120, 2, "disk full")):
        snapshots._snapshots = cast(Any, Spaced(factor))
        snapshots.ended(ended(boundary, trouble=trouble))
    said = []
    for report in told:
        kind = report.WhichOneof("report")
        assert kind is not None
        message = getattr(report, kind)
        said.append((kind, message.boundary, getattr(message, "written", None)))
    assert said == [
        ("wrote", 20, None),
        ("wrote", 40, None),
        ("snapshot_missed", 40, True),
        ("wrote", 80, None),
        ("snapshot_missed", 120, False),
    ]
    late, missed = (report.snapshot_missed for report in told if report.HasField("snapshot_missed"))
    assert "twice in a row: only every 2. snapshot" in late.reason
    assert (missed.reason, missed.factor) == ("disk full", 2)
    assert [file.checksum for file in told[0].wrote.files] == ["sha-head"]
