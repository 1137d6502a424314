"""What a worker says of a snapshot that is over, with a control stream that keeps what it is told."""

from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from headway.daemon.worker.stage_records import StageRecords
from headway.daemon.worker.stage_worker import StageWorker
from headway.proto.control_pb2 import Report
from headway.stages.ids import Boundary, Generation, LayerName, Timeline
from headway.stages.stage.snapshot_interval import SnapshotInterval
from headway.stages.state.snapshot_writer import SnapshotEnded
from headway.stages.state.state_file import WrittenFile

HEAD = WrittenFile(path=Path("head.safetensors"), size_bytes=5, checksum="sha-head")


class Told:
    """Stands for the control stream."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def report(self, report: Report) -> None:
        """Keep it."""
        self.reports.append(report)


class Spaced:
    """Stands for the snapshots of a run."""

    def __init__(self, factor: int) -> None:
        self.interval = SnapshotInterval(20, 0)
        self.interval.space(factor)


def ended(boundary: int, *, trouble: str = "") -> SnapshotEnded:
    about: dict[str, Any] = {"job": "", "generation": Generation(1), "timeline": Timeline(1)}
    files = {} if trouble else {LayerName("head"): HEAD}
    return SnapshotEnded(**about, boundary=Boundary(boundary), files=files, trouble=trouble)


def test_a_late_snapshot_is_not_told_as_one_that_is_not_there() -> None:
    """In time; late, so that later ones are further apart; as before; failed → written, written and late, written, not.

    Who hears that a boundary was missed fetches its layers from a sibling.
    """
    nothing, told = cast(Any, None), Told()
    worker = StageWorker(
        inbox=SimpleQueue(),
        endpoint=nothing,
        collective=nothing,
        device=nothing,
        output=nothing,
        records=StageRecords(None, node="a", incarnation="i"),
    )
    worker._control = cast(Any, told)
    for boundary, factor, trouble in ((20, 1, ""), (40, 2, ""), (80, 2, ""), (120, 2, "disk full")):
        worker._snapshots = cast(Any, Spaced(factor))
        worker._take(ended(boundary, trouble=trouble))
    said = []
    for report in told.reports:
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
    late, missed = (report.snapshot_missed for report in told.reports if report.HasField("snapshot_missed"))
    assert "twice in a row: only every 2. snapshot" in late.reason
    assert (missed.reason, missed.factor) == ("disk full", 2)
    assert [file.checksum for file in told.reports[0].wrote.files] == ["sha-head"]
