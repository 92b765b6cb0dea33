"""The exit codes of the command line, and how an error is told."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Mapping

OK, OTHER, USAGE, NOT_FOUND, CONFLICT, REFUSED, AUTH, UNAVAILABLE, RATE_LIMITED = range(9)
INTERRUPTED, TERMINATED = 130, 143  # as shells have it: 128 and the signal

# Controls that JSON leaves as they are, what turns the direction of text, and lone surrogates.
UNPRINTABLE = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

EXITS = {
    "config_error": USAGE,
    "wrong_store": USAGE,
    "unknown_task": NOT_FOUND,
    "unknown_service": NOT_FOUND,
    "unknown_schedule": NOT_FOUND,
    "unknown_token": NOT_FOUND,
    "not_found": NOT_FOUND,
    "key_taken": CONFLICT,
    "task_gone": CONFLICT,
    "attempt_over": CONFLICT,
    "already_replayed": CONFLICT,
    "service_in_use": CONFLICT,
    "service_changed": CONFLICT,
    "bad_request": REFUSED,
    "invalid": REFUSED,
    "out_of_range": REFUSED,
    "idempotency_key_reused": REFUSED,
    "target_refused": REFUSED,
    "too_large": REFUSED,
    "unauthorized": AUTH,
    "forbidden": AUTH,
    "server_unavailable": UNAVAILABLE,
    "http_error": UNAVAILABLE,
    "store_unavailable": UNAVAILABLE,
    "locked": UNAVAILABLE,
    "overloaded": UNAVAILABLE,
    "rate_limited": RATE_LIMITED,
}
STATUSES = {401: AUTH, 403: AUTH, 404: NOT_FOUND, 409: CONFLICT, 412: CONFLICT, 429: RATE_LIMITED}
STATUSES |= {502: UNAVAILABLE, 503: UNAVAILABLE, 504: UNAVAILABLE}
BETWEEN = (401, 403, 429, 502, 503, 504)  # what a proxy before the server may say for it
HINTS = {  # what the flag is called here
    "unauthorized": "a token comes from --token or TICKWHEEL_TOKEN",
    "already_replayed": "a second replay: --force",
    "server_unavailable": "is it running? --server or TICKWHEEL_SERVER names another",
}


class UnknownToken(TickwheelError, LookupError):
    """No token has this id."""

    code = "unknown_token"


def exit_code(error: TickwheelError) -> int:
    """Return the exit code of an error: by the answer's status where there is one, else by code."""
    status = getattr(error, "status", None) or problem_of(error).get("status")
    if error.code == "bad_answer" and status not in BETWEEN:
        return OTHER
    if isinstance(status, int) and status >= 400:
        return exit_of_status(status)
    return EXITS.get(error.code, OTHER)


def exit_of_status(status: int) -> int:
    """Return the exit code that goes with an HTTP status of 400 or more."""
    return STATUSES.get(status, REFUSED if status < 500 else OTHER)


def problem_of(error: TickwheelError) -> dict[str, Any]:
    """Return an error as the problem document that the server sent, or would have sent."""
    problem: Mapping[str, Any] | None = getattr(error, "problem", None)
    if problem:
        return dict(problem)
    made: dict[str, Any] = {"code": error.code, "detail": str(error)}
    if (holder := getattr(error, "holder", None)) is not None:
        made["holder"] = holder
    return made


def tell(error: TickwheelError, *, as_json: bool) -> None:
    """Write an error to stderr: one line, or a problem document."""
    if as_json:
        say_json(problem_of(error), err=True)
    else:
        line = str(error).strip() or type(error).__name__
        notes = [error.code, *getattr(error, "__notes__", ())]
        notes += [HINTS[error.code]] if error.code in HINTS else []
        tell_line(f"{line} ({'; '.join(notes)})")


def tell_line(line: str, *, word: str = "error:", colour: str = "red") -> None:
    """Write an error or a warning to stderr, on one line."""
    styled = click.style(word, fg=colour, bold=True)
    text = clean(" ".join(line.split()))
    click.echo(f"{styled} {text}", err=True, color=None if coloured() else False)


def say(line: str = "", *, err: bool = False) -> None:
    """Write a line to stdout or stderr, in which a terminal finds nothing to act on.

    A server's text may hold anything: whatever is printed goes through here, `say_json`,
    `tell_line` or a cell of a table.
    """
    click.echo(clean(line), err=err)


def say_json(value: object, *, indent: int | None = None, err: bool = False) -> None:
    """Write a value as JSON to stdout or stderr."""
    click.echo(json_text(value, indent=indent), err=err)


def coloured() -> bool:
    """Say whether a terminal may be given colours; click asks no variable, as rich does."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON to print: readable, but for what a terminal or UTF-8 cannot take."""
    text = json.dumps(value, ensure_ascii=sys.stdout.encoding.lower() != "utf-8", indent=indent)
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def clean(text: str) -> str:
    """Return text without characters that a terminal would act on."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
