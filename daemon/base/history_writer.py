"""Copies a daemon's chosen log lines into its history file: JSON lines, rotated, bounded."""

import json
import time
from collections.abc import MutableMapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from headway.stages.telemetry.history import FULL, MAX_PENDING_BYTES

DAEMON_EVENTS: Final = frozenset(
    {
        # the node in the cluster
        "node_registered",
        "node_drained",
        "node_left",
        "node_record_written",
        "lease_lost",
        "dead_daemons_lease_revoked",
        "daemon_was_stalled",
        "etcd_lost",
        "etcd_reached",
        "etcd_history_went_back",
        # leader and decisions
        "leadership_won",
        "leadership_ended",
        "decision_written",
        "decision_overtaken",
        "plan_seen",
        "phase_seen",
        # workers
        "goal_set",
        "goal_refused",
        "worker_started",
        "worker_attached",
        "worker_changed",
        "worker_killed",
        "worker_exited",
        "spare_took_over",
        # state
        "record_written",
        "state_fetched",
        "fetch_failed",
        "damaged_file_dropped",
        "snapshot_missed",
        "snapshot_late",
        "manifest_written",
    }
)

WALL: Final = "wall"
"""Seconds since the epoch, by the writer's clock: for people."""
MONOTONIC: Final = "monotonic"
"""Seconds of the machine's monotonic clock. Only processes of one machine can compare them."""
FIELDS: Final = ("event", "node", "incarnation", "job", "generation", "timeline")
"""Fields of every line, if known; the log line's other fields follow."""
DAEMONS_FOLDER: Final = "daemons"
"""Folder below the history folder, with one file per node next to the workers' files."""


def history_line(
    event: dict[str, object], *, incarnation: str, wall: float, monotonic: float
) -> dict[str, object] | None:
    """Return the history's line of a log event; None: the event does not belong to the history."""
    if event.get("event") not in DAEMON_EVENTS:
        return None
    line: dict[str, object] = {WALL: wall, MONOTONIC: monotonic}
    line |= {name: event[name] for name in FIELDS if name in event}
    line.setdefault("incarnation", incarnation)
    return line | {name: value for name, value in event.items() if name not in (*FIELDS, "timestamp")}


MAX_FILE_BYTES = 8 << 20
NUM_OLD_FILES = 3


class HistoryWriter:
    """A structlog processor. Each line reaches the kernel before the log continues, so a killed daemon loses none.

    A history that cannot be written does not end a daemon. Lines that a full disk rejects wait for the next line. After
    any other error the next log line reports it, and the history ends.

    """

    def __init__(
        self, folder: Path, *, node: str, max_file_bytes: int = MAX_FILE_BYTES, num_old_files: int = NUM_OLD_FILES
    ) -> None:
        """folder: the folder of the whole history. Raises OSError when it cannot be written to."""
        self._path = folder / DAEMONS_FOLDER / f"{node}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._max_file_bytes = max_file_bytes
        self._num_old_files = num_old_files
        self._incarnation = ""
        self._trouble = ""
        self._pending = b""

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Write the line's history, if it has one; return the event unchanged."""
        if event.get("event") == "node_registered":
            self._incarnation = str(event.get("incarnation", ""))
        line = history_line(dict(event), incarnation=self._incarnation, wall=time.time(), monotonic=time.monotonic())
        if line is None or self._trouble:
            return event
        try:
            self._write(json.dumps(line, default=str).encode() + b"\n")
        except OSError as error:
            if error.errno in FULL and len(self._pending) <= MAX_PENDING_BYTES:
                return event
            self._trouble = f"{self._path}: {error.strerror or error}"
            event["history_ended"] = self._trouble
        return event

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        self._pending += line
        if self._file.closed:  # the disk was full in the middle of a rotation
            self._file = self._path.open("ab", buffering=0)
        if self._file.tell() + len(self._pending) > self._max_file_bytes:
            self._rotate()
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]

    def _rotate(self) -> None:
        """Rename `x.jsonl` to `x.jsonl.1` and that to `x.jsonl.2`; the oldest is deleted."""
        self._file.close()
        names = [self._path, *(Path(f"{self._path}.{number}") for number in range(1, self._num_old_files + 1))]
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                newer.replace(older)
        self._file = self._path.open("ab", buffering=0)
