"""The daemon's log: structlog to stderr, JSON unless a person reads it. Under systemd also the journal's fields."""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal

import structlog
from structlog.typing import EventDict

from headway.daemon.history.writer import HistoryWriter
from headway.daemon.runtime.journal import JournalSocket, fields_of, is_journal
from headway.daemon.terminal import behind, printable


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


def _printable_values(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Escape control characters before colours are added; JSON escapes them by itself."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


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
    # This library logs every signal that it sends; the supervisor reports those that matter.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
