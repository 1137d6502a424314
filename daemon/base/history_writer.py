"""Copies a daemon's chosen log lines into its history: JSON lines, in files as those of workers."""

import json
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final

from headway.stages.telemetry.history import HistoryFile

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
"""Folder below the history folder, with the files of nodes; next to it are those of workers."""


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


class HistoryWriter:
    """A structlog processor. If a history cannot be written, the next log line says why, and the daemon goes on.

    Each line reaches the kernel before the log continues, so a killed daemon loses none.
    """

    def __init__(self, folder: Path, *, node: str) -> None:
        """folder: the folder of the whole history. Raises OSError when it cannot be written to."""
        self.file = HistoryFile(folder / DAEMONS_FOLDER, node)
        self._incarnation = ""
        self._is_over = False

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Write the line's history, if it has one; return the event."""
        if event.get("event") == "node_registered":
            self._incarnation = str(event.get("incarnation", ""))
        line = history_line(dict(event), incarnation=self._incarnation, wall=time.time(), monotonic=time.monotonic())
        if line is not None:
            self.file.write(json.dumps(line, default=str) + "\n")
        if self.file.trouble and not self._is_over:
            self._is_over = True
            event["history_ended"] = self.file.trouble
        return event
