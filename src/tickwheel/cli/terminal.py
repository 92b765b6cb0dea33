"""Lines and JSON for stdout and stderr, safe to show on a terminal.

A server's text may hold anything. A command prints only through this module, or as a table cell.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING

import click

from tickwheel.cli.exit_codes import problem_of

if TYPE_CHECKING:
    from tickwheel.errors import TickwheelError

# Controls that JSON leaves as they are, marks that change the direction of text, lone surrogates.
UNPRINTABLE = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
HINTS = {  # by error code; they name the command line's flags
    "unauthorized": "give a token with --token or TICKWHEEL_TOKEN",
    "already_replayed": "to replay it again, add --force",
    "server_unavailable": "is it running? --server or TICKWHEEL_SERVER names another",
}


def print_error(error: TickwheelError, *, as_json: bool) -> None:
    """Write an error to stderr: one line, or a problem document."""
    if as_json:
        print_json(problem_of(error), err=True)
    else:
        line = str(error).strip() or type(error).__name__
        notes = [error.code, *getattr(error, "__notes__", ())]
        notes += [HINTS[error.code]] if error.code in HINTS else []
        print_message(f"{line} ({'; '.join(notes)})")


def print_message(line: str, *, label: str = "error:", colour: str = "red") -> None:
    """Write a labelled line, such as an error or a warning, to stderr."""
    styled = click.style(label, fg=colour, bold=True)
    text = escape_controls(" ".join(line.split()))
    click.echo(f"{styled} {text}", err=True, color=None if may_use_colour() else False)


def print_warning(line: str) -> None:
    """Write a warning to stderr, on one line."""
    print_message(line, label="warning:", colour="yellow")


def print_line(line: str = "", *, err: bool = False) -> None:
    """Write a line to stdout or stderr, with control characters escaped."""
    click.echo(escape_controls(line), err=err)


def print_json(value: object, *, indent: int | None = None, err: bool = False) -> None:
    """Write a value as JSON to stdout or stderr."""
    click.echo(json_text(value, indent=indent), err=err)


def may_use_colour() -> bool:
    """Return whether the environment allows colours; click, unlike rich, does not check."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return a value as readable JSON; what a terminal or UTF-8 cannot take is escaped."""
    text = json.dumps(value, ensure_ascii=sys.stdout.encoding.lower() != "utf-8", indent=indent)
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escape_controls(text: str) -> str:
    """Return text with the characters escaped that a terminal would act on."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
