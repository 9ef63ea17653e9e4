"""Structured logs: one JSON object a line on standard error, with the service's name."""

import logging
import sys
from typing import Any, cast

import structlog

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(service: str, level: str) -> None:
    """Call once at start. Standard-library logging goes through the same renderer."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            *shared,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        # A line and its end in one write: what collects lines may come between two.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
            foreign_pre_chain=shared,
        )
    )
    logging.basicConfig(level=max(_LEVELS[level], logging.WARNING), handlers=[handler], force=True)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger; bind request_id, step or worker to it where they are known."""
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger(component=name))
