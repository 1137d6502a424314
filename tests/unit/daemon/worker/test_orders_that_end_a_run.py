"""Orders that nothing may run beside: each ends the run, and all are obeyed in the order in which they came."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.daemon.worker.inbox import WorkerInbox
from headway.daemon.worker.stage_records import StageRecords
from headway.daemon.worker.stage_worker import StageWorker
from headway.proto.control_pb2 import Order, Quit, Release, Report
from headway.stages.errors import AbortedError


def test_two_orders_that_end_a_run_are_obeyed_in_turn(tmp_path: Path) -> None:
    """Release and Quit arrive while a stage computes → the run ends, the job is released, then the worker ends."""
    nothing, inbox, told = cast(Any, None), WorkerInbox(), list[Report]()
    worker = StageWorker(
        inbox=inbox,
        endpoint=nothing,
        collective=nothing,
        device=cast(Any, SimpleNamespace(is_to_be_measured=False, release_memory=lambda: None)),
        output=cast(Any, SimpleNamespace(restore=lambda: None)),
        records=StageRecords(tmp_path, node="a", incarnation="i"),
    )
    worker._run = cast(Any, object())
    inbox.put(Order(quit=Quit()))
    with pytest.raises(AbortedError, match="order release"):
        worker._take(Order(release=Release(job_name="j")))
    worker._run = None
    worker.serve(cast(Any, SimpleNamespace(report=told.append, flush=lambda: None)))
    assert [report.WhichOneof("report") for report in told] == ["released"]
    assert inbox.empty()
