"""Chooses the log lines of a daemon that belong to its history, and names a history's fields. Pure.

A history uses the names of the log, so that readers of both need one vocabulary.
"""

from typing import Final

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
        "state_fetch_failed",
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
