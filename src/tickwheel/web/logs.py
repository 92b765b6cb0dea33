"""Logs: lines for people on a terminal, JSON objects elsewhere. No secret is ever put into one."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

EXTRA = ("request", "task", "service", "attempt", "seconds", "error")


class JsonFormatter(logging.Formatter):
    """One JSON object on each line; `node` is who wrote it, once that has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.node: str | None = None

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        line: dict[str, str | int] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self.node is not None:
            line["node"] = self.node
        for name in EXTRA:
            if (value := getattr(record, name, None)) is not None:
                line[name] = value if isinstance(value, int) else str(value)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Time, level, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's lines: no other can look like one, whatever a callee has said."""
        first, *rest = super().format(record).split("\n")
        return "\n".join([harmless(first), *(f"    {harmless(line)}" for line in rest)])


def harmless(line: str) -> str:
    """Return a line in which nothing moves the cursor or colours what follows."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def sign(node: str) -> None:
    """Say in each line from now on which node wrote it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.node = node


def set_up(level: str, form: str) -> None:
    """Log to stderr, in this form; "auto" is text on a terminal."""
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tickwheel").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of each request that is none
