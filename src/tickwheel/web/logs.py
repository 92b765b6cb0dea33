"""Logs: text lines on a terminal, JSON objects elsewhere. No secret is ever logged."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

EXTRA_FIELDS = ("request", "task", "service", "attempt", "seconds", "error")


class JsonFormatter(logging.Formatter):
    """Formats each record as a line with a JSON object; `node` is the node's name, once set."""

    def __init__(self) -> None:
        super().__init__()
        self.node: str | None = None

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line of JSON."""
        line: dict[str, str | int] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self.node is not None:
            line["node"] = self.node
        for name in EXTRA_FIELDS:
            if (value := getattr(record, name, None)) is not None:
                line[name] = value if isinstance(value, int) else str(value)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Formats each record as time, level and message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's lines; text from a callee cannot be mistaken for another record."""
        first, *rest = super().format(record).split("\n")
        return "\n".join([escape_control(first), *(f"    {escape_control(line)}" for line in rest)])


def escape_control(line: str) -> str:
    """Return a line with its control characters escaped: no cursor movement, no colour."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def set_node_name(node: str) -> None:
    """Put this node's name into each new JSON line."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.node = node


def set_up_logging(level: str, form: str) -> None:
    """Log to stderr, as "text" or "json"; "auto" is text on a terminal and JSON elsewhere."""
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tickwheel").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns about each malformed request
