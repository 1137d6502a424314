"""How a daemon speaks: structlog to stderr, JSON unless a person reads it."""

import logging
import sys
from typing import Literal

import structlog


def configure_logs(level: str, log_format: Literal["auto", "json", "console"], *, node: str) -> None:
    """Set up logging for the whole process and bind the node's name to every line."""
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
