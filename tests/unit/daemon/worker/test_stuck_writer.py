"""A worker that is asked to write a boundary while an earlier snapshot's writer is stuck."""

from queue import SimpleQueue
from typing import Any, cast

import pytest

from headway.daemon.worker.session import OrderRefusedError
from headway.daemon.worker.stage_records import StageRecords
from headway.daemon.worker.stage_worker import StageWorker
from headway.proto.control_pb2 import Write
from headway.stages.state.snapshot_writer import SnapshotWriter


def test_a_write_is_refused_while_the_snapshot_writer_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the writer continues, it deletes the files of its cancelled snapshot by name."""
    monkeypatch.setattr(SnapshotWriter, "cancel", lambda _self, **_: False)
    nothing = cast(Any, None)
    worker = StageWorker(
        inbox=SimpleQueue(),
        endpoint=nothing,
        collective=nothing,
        device=nothing,
        output=nothing,
        records=StageRecords(None, node="a", incarnation="i"),
    )
    with pytest.raises(OrderRefusedError, match="has not let go"):
        worker._write(Write(job_name="j", generation=1, boundary=4))
