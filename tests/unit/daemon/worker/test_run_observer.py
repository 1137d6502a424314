"""Who hears of the moments of a worker's run."""

import json
from pathlib import Path

from headway.daemon.worker.stage_records import RunObserver
from headway.stages.ids import Batch, Generation
from headway.stages.schedule.operations import Backward, Forward, Op, Update
from headway.stages.state.journal import JournalRow
from headway.stages.telemetry.goodput import IDLE, REPLAY, SNAPSHOT, USEFUL, Goodput, RecentOps
from headway.stages.telemetry.history import HistoryFile


def test_every_listener_gets_each_moment_of_a_run(tmp_path: Path) -> None:
    """Three operations, a wait and a batch → goodput, memory, history, test and daemon know what is theirs."""
    goodput, recent, history = Goodput(now=0.0), RecentOps(), HistoryFile(tmp_path, "a")
    goodput.begin_generation(furthest=1)
    struck: list[Op] = []
    rows: list[JournalRow] = []
    observer = RunObserver(goodput, recent, history=history, on_operation=struck.append, on_batch=rows.append)
    ops: list[Op] = [Forward(0, 0), Backward(0, 0), Update(0)]
    for number, op in enumerate(ops):
        began = 1.0 + 10 * number
        observer.begins(op, began)
        assert observer.running is type(op)
        assert observer.expected_s == 0.0, "none of the kind was done"
        observer.ended(op, version=0, num_versions_live=1, started=began, ended=began + 1.0 + number)
    assert observer.running is None
    assert observer.expected_s == 2.0
    observer.waits(SNAPSHOT, 25.0)
    observer.begins(Forward(1, 0), 26.0)
    assert observer.expected_s == 1.0
    row = JournalRow(batch=Batch(0), microbatch_losses=(1.0,), tokens=1, seconds=0.0, generation=Generation(1))
    observer.batch_done(row)
    history.close()
    assert goodput.seconds(27.0) == {IDLE: 1.0, REPLAY: 24.0, SNAPSHOT: 1.0, USEFUL: 1.0}
    assert goodput.num_replayed == 1
    assert [op for op, _, _, _ in recent.newest] == struck == ops
    lines = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert [(line["op"], line["ended"]) for line in lines] == [("forward", 2.0), ("backward", 13.0), ("update", 24.0)]
    assert rows == [row]
