"""How a daemon speaks: structlog to stderr, JSON unless a person reads it."""

import logging
import sys
from pathlib import Path
from typing import Literal

import structlog

from headway.daemon.history.writer import HistoryWriter


def configure_logs(
    level: str, log_format: Literal["auto", "json", "console"], *, node: str, history: Path | None = None
) -> None:
    """Set up logging for the whole process and bind the node's name to every line.

    history: the folder into which the lines of the run's history are copied. Raises OSError when it cannot be used.
    """
    is_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if is_console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if is_console else [structlog.processors.format_exc_info]),
            *([] if history is None else [HistoryWriter(history, node=node)]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(node=node)
    # It speaks of every signal that it sends; what matters of it, the supervisor says itself.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
