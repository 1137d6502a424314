"""A worker that is asked to write a boundary while an earlier snapshot's writer is stuck."""

from queue import SimpleQueue
from typing import Any, cast

import pytest

from headway.daemon.worker.held_layers import Held, RefusedError
from headway.daemon.worker.stage_records import StageRecords
from headway.daemon.worker.stage_worker import StageWorker
from headway.daemon.workers.goal import Action, Actual, Goal, Start
from headway.stages.state.snapshot_writer import SnapshotWriter
from tests.fakes.agent_views import WHOLE
from tests.unit.stages.stage.pipeline import make_job


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
    worker._goal = Goal(job="j", start=Start(plan=WHOLE, position=0), stop_at=4, write=("head",))
    worker._actual, worker._held = Actual(job="j", generation=1, boundary=4), Held(spec=make_job())
    with pytest.raises(RefusedError, match="has not let go"):
        worker._do(Action.WRITE)
