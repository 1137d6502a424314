"""The trace on disk."""

import json
from pathlib import Path

from headway.stages.history import HistoryFile
from headway.stages.ids import Generation, StageIndex
from headway.stages.schedule import Backward, Update


def test_a_history_has_one_line_per_operation(tmp_path: Path) -> None:
    """Two operations recorded, the file closed and opened again for a third → three lines that say what and on what."""
    for ops in ((Backward(2, 1), Update(2)), (Update(3),)):
        with HistoryFile(tmp_path / "x", generation=Generation(3), stage_index=StageIndex(1)) as history:
            for op in ops:
                history.record(op, version=1, num_versions_live=2, started=1.0, ended=1.5)
    lines = [json.loads(line) for line in (tmp_path / "x").read_text().splitlines()]
    assert [(line["op"], line["batch"], line["microbatch"]) for line in lines] == [
        ("backward", 2, 1),
        ("update", 2, None),
        ("update", 3, None),
    ]
    common = {"generation": 3, "stage": 1, "version": 1, "versions_live": 2, "started": 1.0, "ended": 1.5}
    assert all(common.items() <= line.items() for line in lines)
