"""The daemons' own log: one line per record, whatever a worker, a node or a stranger has put into it.

Reasons and messages come from afar; a line break in one would forge a line, an escape byte would steer a terminal.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO


def set_up(level: int, line: str, stream: TextIO | None = None) -> None:
    """Set logging up as logging.basicConfig does, with lines that cannot be forged. `line`: the format; `stream`:
    default stderr.

    With `json` in UNICRON_LOG each record is a JSON object on a line.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if os.environ.get("UNICRON_LOG") == "json" else PlainLines(line))
    handler.addFilter(is_news)
    logging.basicConfig(level=level, handlers=[handler])


def is_news(record: logging.LogRecord) -> bool:
    """Say whether the record is worth logging. (asyncio complains of nats-py at every end of a TLS connection.)"""
    return not (record.name == "asyncio" and str(record.msg).startswith("returning true from eof_received()"))


def escape(text: str) -> str:
    """Return `text` on one line: unprintable characters as in a Python string, an escape byte as \\\\x1b."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class PlainLines(logging.Formatter):
    """Messages on one line; the lines of a traceback are indented, so that none looks like a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """Return the record's message with its control characters escaped."""
        record.message = escape(record.message)
        return super().formatMessage(record)

    def formatException(  # noqa: N802  # logging's name
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """Return the traceback, indented by four spaces, with its control characters escaped."""
        return "\n".join(f"    {escape(line)}" for line in super().formatException(ei).split("\n"))


class JsonLines(logging.Formatter):
    """A JSON object per record: time, level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record on one line; JSON escapes everything in the message."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)
