"""The process's log: lines for people, or a JSON object a line for machines.

Whatever is logged while a session or a call is being worked on says so: its ids are bound where its task begins, and
every task that is started from there inherits them. Secrets are put out of every line, whoever logs it.
"""

import logging
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

from polar.telemetry.redaction import SecretRedactor

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

TEXT_FORMAT = "%(levelname)s %(name)s: %(message)s"

_bound_fields: ContextVar[dict[str, str]] = ContextVar("polar_about")


def bind(**ids: str) -> None:
    """From here on, in this task and those that it starts, lines have these fields (session_id, task_id, ...)."""
    _bound_fields.set({**_bound_fields.get({}), **ids})


def configure(format: LogFormat = "text", level: LogLevel = "warning", secrets: Iterable[str] = ()) -> None:
    """Writes the log to standard error. Once more, with other settings, takes the place of the first."""
    redactor = SecretRedactor(secrets)
    handler = StderrHandler()
    handler.addFilter(_FieldsFilter())
    handler.setFormatter(_JsonFormatter(redactor) if format == "json" else _TextFormatter(redactor))
    root = logging.getLogger()
    for other in [other for other in root.handlers if isinstance(other, StderrHandler)]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level.upper())


class StderrHandler(logging.StreamHandler[TextIO]):
    """Whatever standard error is at the moment."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        pass


class _FieldsFilter(logging.Filter):
    """Adds what is known of where a line comes from: by its task, not by who formats it."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.about = _bound_fields.get({})
        return True


class _TextFormatter(logging.Formatter):
    def __init__(self, redactor: SecretRedactor) -> None:
        super().__init__(TEXT_FORMAT)
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor(super().format(record))


class _JsonFormatter(logging.Formatter):
    def __init__(self, redactor: SecretRedactor) -> None:
        super().__init__()
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._clean(record.getMessage()),
            **getattr(record, "about", {}),
        }
        if record.exc_info:
            line["exception"] = self._clean(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = self._clean(record.stack_info)
        return msgspec.json.encode(line).decode()

    def _clean(self, text: str) -> str:
        """Names of files are bytes that need not be text."""
        return self._redactor(text).encode(errors="backslashreplace").decode()
