"""The trace on disk."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headway.stages.schedule.operations import Backward, Op, Update
from headway.stages.telemetry import history as history_module
from headway.stages.telemetry.history import MAX_PENDING_BYTES, HistoryFile

ABOUT = {"job": "a", "timeline": 2, "generation": 3, "stage": 1, "worker": 2}


def record(history: HistoryFile, *ops: Op) -> None:
    for op in ops:
        history.record(op, version=1, num_versions_live=2, started=1.0, ended=1.5)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_a_history_has_one_line_per_operation_and_event(tmp_path: Path) -> None:
    """Two operations and an event, and nothing is closed: each line is there already, and says what and whose it is."""
    history = HistoryFile(tmp_path / "history", "a-x", node="n", incarnation="x")
    history.begin(**ABOUT)  # type: ignore[arg-type]
    record(history, Backward(2, 1), Update(2))
    history.event("stopped", boundary=3, layers=['the "head"'])
    lines = lines_of(tmp_path / "history")
    common = ABOUT | {"node": "n", "incarnation": "x"}
    assert all(common.items() <= line.items() for line in lines)
    times = {"version": 1, "versions_live": 2, "started": 1.0, "ended": 1.5}
    assert {"op": "backward", "batch": 2, "microbatch": 1, **times}.items() <= lines[0].items()
    assert {"op": "update", "batch": 2, "microbatch": None, **times}.items() <= lines[1].items()
    assert {"event": "stopped", "boundary": 3}.items() <= lines[2].items()
    assert lines[2]["layers"] == ['the "head"']
    assert lines[2]["at"] > 0


def test_a_history_does_not_outgrow_its_bounds(tmp_path: Path) -> None:
    """Files of 1 kB in a folder of 4 kB → whole lines, the newest of them all, in a few files."""
    history = HistoryFile(tmp_path, "a", max_file_bytes=1000, max_folder_bytes=4000)
    history.begin(**ABOUT)  # type: ignore[arg-type]
    record(history, *(Update(batch) for batch in range(200)))
    history.close()
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    batches = [line["batch"] for line in lines_of(tmp_path)]
    assert batches == list(range(batches[0], 200))
    assert batches[0] > 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000


def test_a_history_that_cannot_be_written_ends_quietly(tmp_path: Path) -> None:
    """The folder vanishes under a full file → the reason is kept, and nothing is raised; no folder at all is told."""
    history = HistoryFile(tmp_path / "gone", "a", max_file_bytes=10)
    record(history, Update(0))
    for path in (tmp_path / "gone").iterdir():
        path.unlink()
    (tmp_path / "gone").rmdir()
    record(history, Update(1), Update(2))
    assert "No such file" in history.trouble
    with pytest.raises(OSError, match="Not a directory"):
        HistoryFile(Path("/dev/null/history"), "a")


class FullDisk:
    """Takes some more bytes, then none, then all again; counts what it is asked to write."""

    def __init__(self) -> None:
        self.write = os.write
        self.free_bytes: int | None = None
        self.asked_bytes = 0

    def __call__(self, descriptor: int, data: bytes) -> int:
        self.asked_bytes += len(data)
        if self.free_bytes is None:
            return self.write(descriptor, data)
        if self.free_bytes == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_written = self.write(descriptor, data[: self.free_bytes])
        self.free_bytes -= num_written
        return num_written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    found = FullDisk()
    monkeypatch.setattr(os, "write", found)
    return found


def test_lines_wait_for_a_full_disk(tmp_path: Path, disk: FullDisk) -> None:
    """The disk is full in the middle of a line, for 2,000 lines → all are there afterwards, whole and in order.

    Meanwhile each line costs one attempt of its own size, however many wait.
    """
    history = HistoryFile(tmp_path, "a", max_file_bytes=100_000)
    history.begin(**ABOUT)  # type: ignore[arg-type]
    record(history, Update(0))
    disk.free_bytes, disk.asked_bytes = 10, 0
    record(history, *(Update(batch) for batch in range(1, 2001)))
    assert disk.asked_bytes < 2000 * 500
    disk.free_bytes = None
    record(history, Update(2001))
    assert [line["batch"] for line in lines_of(tmp_path)] == list(range(2002))
    assert all(path.stat().st_size <= 100_000 for path in tmp_path.iterdir())
    assert not history.trouble


def test_a_history_ends_when_too_much_waits(tmp_path: Path, disk: FullDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk stays full: with 10 kB waiting, the history ends and says why."""
    monkeypatch.setattr(history_module, "MAX_PENDING_BYTES", 10_000)
    assert MAX_PENDING_BYTES > 10_000
    history = HistoryFile(tmp_path, "a")
    disk.free_bytes = 0
    record(history, *(Update(batch) for batch in range(20)))
    assert not history.trouble
    record(history, *(Update(batch) for batch in range(200)))
    assert "No space left" in history.trouble
