"""Types of arguments on the command line: durations, times, payloads, secrets."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from tickwheel.config import parse_duration

if TYPE_CHECKING:
    from click import Context, Parameter

BLANKS = " \t\r\n"  # JSON's
FILE_NAME = re.compile(r"\A[\w./~-]+\.(json|ndjson|jsonl|txt)\Z")


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time span: `30s`, `5m`, `2h`, `1d`, `1h30m`, or a number of seconds."""

    name = "duration"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds < 0:
            self.fail(f"{value!r:.50} is negative: a duration is 0 or more", param, ctx)
        return seconds


class Moment(click.ParamType):  # type: ignore[type-arg]
    """An RFC 3339 time with its offset: `2030-01-31T12:00:00Z`."""

    name = "time"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            at = None
        if at is None or at.tzinfo is None or len(value) < 16:
            self.fail(
                f"{value!r:.50} is not an RFC 3339 time with an offset: 2030-01-31T12:00:00Z",
                param,
                ctx,
            )
        return at.astimezone(UTC)


class Payload(click.ParamType):  # type: ignore[type-arg]
    """JSON as typed, from `@FILE`, or from stdin (`-`).

    It is checked here and sent to the server byte for byte: digits, blanks, duplicate keys.
    """

    name = "json"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> Any:
        if not isinstance(value, str):
            return value
        from tickwheel.client import Json  # noqa: PLC0415 - not for --help

        text = read_text(self, value, param, ctx)
        try:
            return Json(text.strip(BLANKS))
        except ValueError as error:
            self.fail(f"{error}{json_hint(value)}", param, ctx)


class Object(click.ParamType):  # type: ignore[type-arg]
    """A JSON object, as typed, from `@FILE` or from stdin (`-`)."""

    name = "object"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        text = read_text(self, value, param, ctx)
        try:
            found = json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            self.fail(f"not JSON: {error}{json_hint(value, may_be_text=False)}", param, ctx)
        if not isinstance(found, dict):
            self.fail("it must be a JSON object", param, ctx)
        return found


class Secret(click.ParamType):  # type: ignore[type-arg]
    """A secret from `@FILE` or stdin (`-`), which no list of processes shows, or as typed."""

    name = "secret"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> str:
        text = read_text(self, value, param, ctx).strip()
        if not text.isprintable() or not text:
            self.fail("a secret must be one line of printable characters", param, ctx)
        return text


def json_hint(value: str, *, may_be_text: bool = True) -> str:
    """Return a hint for a value that is not JSON: a file without @, or text without quotes."""
    if value[:1] in ("@", "-"):
        return ""
    if FILE_NAME.search(value) or is_file(value):
        return f"; to read a file, type @{value}"
    return "; a string needs its quotes: '\"text\"'" if may_be_text else ""


def is_file(value: str) -> bool:
    """Return whether a file has this name; the value may be no valid file name at all."""
    with suppress(OSError, ValueError):
        return Path(value).is_file()
    return False


def stdin() -> TextIO:
    """Return stdin as UTF-8, whatever the locale: JSON is always UTF-8."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    return sys.stdin


def read_text(
    kind: click.ParamType,  # type: ignore[type-arg]
    value: str,
    param: Parameter | None,
    ctx: Context | None,
) -> str:
    """Return the content of a file (`@FILE`) or stdin (`-`), or the value itself."""
    try:
        if value == "-":
            return stdin().read()
        if value.startswith("@"):
            return Path(value[1:]).read_text("utf-8")
    except UnicodeDecodeError:
        kind.fail(f"{value[1:] or 'stdin'} is not UTF-8", param, ctx)
    except OSError as error:
        kind.fail(f"{value[1:]}: {error.strerror}", param, ctx)
    return value


def refuse_constant(constant: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts and JSON does not have."""
    raise ValueError(f"{constant} is not JSON")


DURATION, MOMENT, PAYLOAD = Duration(), Moment(), Payload()
OBJECT, SECRET = Object(), Secret()
