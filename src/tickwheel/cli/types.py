"""What may be typed on the command line: durations, times, payloads."""

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

from tickwheel.config import duration

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
            seconds = duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds < 0:
            self.fail(f"{value!r:.50} is in the past: a duration is 0 or more", param, ctx)
        return seconds


class Moment(click.ParamType):  # type: ignore[type-arg]
    """A time as RFC 3339 has it, with its offset: `2030-01-31T12:00:00Z`."""

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
                f"{value!r:.50} is no RFC 3339 time with its offset: 2030-01-31T12:00:00Z",
                param,
                ctx,
            )
        return at.astimezone(UTC)


class Payload(click.ParamType):  # type: ignore[type-arg]
    """JSON as typed, `@FILE` for what a file has, or `-` for stdin.

    It is checked here, and goes to the server as it was written: digits, blanks, doubled keys.
    """

    name = "json"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> Any:
        if not isinstance(value, str):
            return value
        from tickwheel.client import Json  # noqa: PLC0415 - not for --help

        text = text_of(self, value, param, ctx)
        try:
            return Json(text.strip(BLANKS))
        except ValueError as error:
            self.fail(f"{error}{hint_on(value)}", param, ctx)


class Object(click.ParamType):  # type: ignore[type-arg]
    """A JSON object, as typed, from `@FILE` or stdin (`-`): its fields are read."""

    name = "object"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        text = text_of(self, value, param, ctx)
        try:
            found = json.loads(text, parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            self.fail(f"not JSON: {error}{hint_on(value, text=False)}", param, ctx)
        if not isinstance(found, dict):
            self.fail("a JSON object is wanted", param, ctx)
        return found


class Secret(click.ParamType):  # type: ignore[type-arg]
    """A secret from `@FILE` or stdin (`-`), so that it is in no list of processes; or as typed."""

    name = "secret"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> str:
        text = text_of(self, value, param, ctx).strip()
        if not text.isprintable() or not text:
            self.fail("a secret is one line of printable characters", param, ctx)
        return text


def hint_on(value: str, *, text: bool = True) -> str:
    """Return what may have been meant by a value that is no JSON: a file, or text if it may be."""
    if value[:1] in ("@", "-"):
        return ""
    if FILE_NAME.search(value) or is_file(value):
        return f"; a file is given as @{value}"
    return "; a string needs its quotes: '\"text\"'" if text else ""


def is_file(value: str) -> bool:
    """Say whether a file is called so; it may be no name of a file at all."""
    with suppress(OSError, ValueError):
        return Path(value).is_file()
    return False


def stdin() -> TextIO:
    """Return stdin as UTF-8, whatever the locale is: JSON is nothing else."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    return sys.stdin


def text_of(
    kind: click.ParamType,  # type: ignore[type-arg]
    value: str,
    param: Parameter | None,
    ctx: Context | None,
) -> str:
    """Return what a file (`@FILE`) or stdin (`-`) has, or the value itself."""
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


def refuse(word: str) -> None:
    """Refuse NaN and its like, which Python reads and JSON has not."""
    raise ValueError(f"{word} is not JSON")


DURATION, MOMENT, PAYLOAD = Duration(), Moment(), Payload()
OBJECT, SECRET = Object(), Secret()
