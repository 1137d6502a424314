"""The daemon's log: structlog to stderr, JSON unless a person reads it. Under systemd also the journal's fields.

Chosen lines are copied into the daemon's history: JSON lines, in files as those of workers.
"""

import json
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping, MutableMapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, Literal

import structlog
from structlog.typing import EventDict

from headway.daemon.base.terminal import behind, printable
from headway.stages.telemetry.history import HistoryFile

SOCKET: Final = "/run/systemd/journal/socket"
FIELDS: Final = ("node", "job", "event", "generation", "stage", "worker", "peer")
"""Keys of a line that become fields; each has few values, by which one searches."""
PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
IDENTIFIER: Final = "headway"


def is_journal(stream: IO[str], environment: Mapping[str, str]) -> bool:
    """Whether a stream leads to the journal: systemd names it in JOURNAL_STREAM, and a child's pipe is another one."""
    try:
        told = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{told.st_dev}:{told.st_ino}"


def fields_of(event: EventDict) -> dict[str, str]:
    """Return the fields of a line, without its message."""
    fields = {f"HEADWAY_{key.upper()}": str(event[key]) for key in FIELDS if event.get(key) not in (None, "")}
    priority = PRIORITIES.get(str(event.get("level")), PRIORITIES["info"])
    return {"PRIORITY": str(priority), "SYSLOG_IDENTIFIER": IDENTIFIER, **fields}


def datagram(fields: Mapping[str, str]) -> bytes:
    """Return one entry. A value's line breaks and = begin no other field."""
    entry = bytearray()
    for name, value in fields.items():
        content = value.encode(errors="replace")
        if b"\n" in content:
            entry += name.encode() + b"\n" + struct.pack("<Q", len(content)) + content + b"\n"
        else:
            entry += name.encode() + b"=" + content + b"\n"
    return bytes(entry)


class JournalSocket:
    """Sends entries and never waits. It says which it could not send, so that the caller writes them elsewhere."""

    def __init__(self, path: str = SOCKET) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def send(self, fields: Mapping[str, str]) -> bool:
        """Send an entry. False: the journal is full or away, or the entry is too large for a datagram."""
        try:
            self._socket.sendto(datagram(fields), self._path)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Free the socket; later entries are not sent."""
        self._socket.close()


class LossyLogger:
    """Writes lines to a stream. A line that the stream does not take (a full disk) is late or lost, and counted.

    An error of the log must never end the daemon's work.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._num_lost = 0

    def msg(self, message: str) -> None:
        """Write a line, after the number of lines that were lost before it."""
        try:
            if self._num_lost:
                self._stream.write(f"{self._num_lost} log lines were late or lost\n")
            self._stream.write(message + "\n")
            self._stream.flush()
            self._num_lost = 0
        except (OSError, ValueError):
            self._num_lost += 1

    log = debug = info = warn = warning = error = critical = exception = fatal = msg


class JournalLogger(LossyLogger):
    """Sends lines to the journal with their fields. What the journal does not take goes to the stream."""

    def __init__(self, stream: IO[str], journal: JournalSocket) -> None:
        super().__init__(stream)
        self._journal = journal

    def msg(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        """Send a line; without the journal, write it without its fields."""
        if fields is None or not self._journal.send({"MESSAGE": message, **fields}):
            super().msg(message)

    log = debug = info = warn = warning = error = critical = exception = fatal = msg


class JournalRenderer:
    """Renders a line as JSON, and adds its fields."""

    def __init__(self) -> None:
        self._json = structlog.processors.JSONRenderer()

    def __call__(self, logger: object, method: str, event: EventDict) -> tuple[tuple[str], dict[str, object]]:
        """Return the arguments of JournalLogger.msg."""
        fields = fields_of(event)
        return (str(self._json(logger, method, event)),), {"fields": fields}


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
HISTORY_FIELDS: Final = ("event", "node", "incarnation", "job", "generation", "timeline")
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
    line |= {name: event[name] for name in HISTORY_FIELDS if name in event}
    line.setdefault("incarnation", incarnation)
    return line | {name: value for name, value in event.items() if name not in (*HISTORY_FIELDS, "timestamp")}


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


def _printable_values(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Escape control characters before colours are added; JSON escapes them by itself."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


def readable(line: str) -> str:
    """Return a JSON line of a log as `14:29:06 stage started: generation 1, stage 0`; other lines as they are."""
    try:
        told = json.loads(line)
        event, at = told["event"].replace("_", " "), datetime.fromisoformat(told["timestamp"]).astimezone()
    except (ValueError, TypeError, KeyError, AttributeError):
        return line
    level = "" if told.get("level") == "info" else f"{told.get('level')}: "
    hidden = ("event", "timestamp", "level", "node", "job", "worker", "pid")
    rest = ", ".join(f"{name} {value}" for name, value in told.items() if name not in hidden)
    return f"{at:%H:%M:%S} {level}{event}{': ' * bool(rest)}{rest}"


def configure_logs(
    level: str, log_format: Literal["auto", "json", "console"], *, node: str, history: Path | None = None
) -> None:
    """Set up logging for the whole process and bind the node's name to every line.

    history: the folder into which the lines of the run's history are copied. Raises OSError when it cannot be used.
    """
    is_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    journal = JournalSocket() if log_format == "auto" and is_journal(sys.stderr, os.environ) else None
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if is_console
        else structlog.processors.JSONRenderer()
        if journal is None
        else JournalRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            *([] if history is None else [HistoryWriter(history, node=node)]),
            *([_printable_values] if is_console else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: (
            LossyLogger(behind(sys.stderr)) if journal is None else JournalLogger(behind(sys.stderr), journal)
        ),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(node=node)
