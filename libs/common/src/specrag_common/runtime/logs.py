"""Structured logs on stderr: JSON in containers, readable on a terminal.

Every line carries service, level, time, and, while a request is served, trace_id, span_id,
request_id and session_id. Lines of the standard library's loggers take the same path. Prompts,
passages and tokens never go above DEBUG.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry import trace

from specrag_common.runtime import call_context
from specrag_common.runtime.settings import LogFormat, LogLevel

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from structlog.typing import EventDict, Processor


def get_logger(name: str) -> BoundLogger:
    """Return a logger; use a constant message and put the facts into keyword arguments."""
    logger: BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def set_up_logs(
    service_name: str, *, level: LogLevel = LogLevel.INFO, log_format: LogFormat = LogFormat.AUTO
) -> None:
    """Configure structlog and the standard library's root logger for this process.

    Loggers that a library has given a stream of their own when it was imported lose it: their lines
    come out here, in the same form. Call it behind the imports.
    """
    route_through_standard_logging(service_name)
    _take_over_streams()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_shared_processors(service_name),
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(log_format),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def route_through_standard_logging(service_name: str) -> None:
    """Hand structured lines to the standard library's loggers; its handlers stay as they are."""
    structlog.configure(
        processors=[
            *_shared_processors(service_name),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _take_over_streams() -> None:
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            streams = [one for one in logger.handlers if type(one) is logging.StreamHandler]
            for handler in streams:
                logger.removeHandler(handler)
            logger.propagate = logger.propagate or bool(streams)


def _shared_processors(service_name: str) -> list[Processor]:
    def add_service(_logger: Any, _method: str, event: EventDict) -> EventDict:
        event["service"] = service_name
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        add_service,
        _add_call_context,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _add_call_context(_logger: Any, _method: str, event: EventDict) -> EventDict:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
        event["span_id"] = trace.format_span_id(span.span_id)
    for key, value in (
        ("request_id", call_context.request_id()),
        ("session_id", call_context.session_id()),
    ):
        if value is not None:
            event.setdefault(key, value)
    return event


def _renderers(log_format: LogFormat) -> list[Processor]:
    is_console = log_format is LogFormat.CONSOLE or (
        log_format is LogFormat.AUTO and sys.stderr.isatty()
    )
    # Tracebacks never show local variables: they hold prompts, passages and keys.
    if is_console:
        return [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    plain = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(plain), structlog.processors.JSONRenderer()]
