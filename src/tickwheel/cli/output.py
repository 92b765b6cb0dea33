"""How data is printed: tables for people on a terminal, JSON for programs everywhere else."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tickwheel.cli.exits import clean, say, say_json
from tickwheel.cli.root import JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

WIDE = 200  # columns of text that goes into a file or a pipe
UNBOUNDED = 5_000  # more columns than a table has
LONG = 60  # columns that a cell beside others may have
LAST_MS = 253_402_300_799_000  # the last second that a date can have
GAP = 2  # columns between two of a table
USUAL = {"attempt": 1}  # what goes without saying in a list
BLANKS = re.compile(r"[ \t\r\n]+")  # other white space is shown as what it is
WHOLE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.\d{3}Z")
COLOURS = {
    "delay": "cyan", "ready": "yellow", "running": "blue", "finished": "green", "failed": "red",
    "cancelled": "bright_black", "closed": "green", "half-open": "yellow", "open": "red",
    "enabled": "green", "disabled": "bright_black",
}  # fmt: skip


class Output(NamedTuple):
    """Where a command's data goes: stdout, in the form that was asked for.

    - A list is one JSON document per line, so that it can be read while it is written.
    - A table shows no control characters, whatever is in the data.
    """

    as_json: bool

    def value(self, value: object) -> None:
        """Print one JSON document: indented for people, on one line for programs."""
        say_json(plain(value), indent=2 if sys.stdout.isatty() else None)

    def record(self, value: object) -> None:
        """Print one thing: JSON, or its fields below each other."""
        if self.as_json:
            self.value(value)
            return
        shown: dict[str, Any] = plain(value)
        names = [name for name in shown if tells(shown[name])]
        self.text(["", ""], [[name, shown[name]] for name in names])

    def items(self, items: Iterable[object], columns: Sequence[str]) -> int:
        """Print a list: JSON lines as they come, or a table of these fields; return how many.

        A table leaves out the fields in which nothing in the list differs from the usual, and the
        milliseconds.
        """
        if self.as_json:
            count = 0
            for item in items:
                say_json(plain(item))
                count += 1
            return count
        shown: list[dict[str, Any]] = [plain(item) for item in items]
        told = [
            name
            for name in columns
            if not shown or any(tells(item.get(name), name) for item in shown)
        ]
        self.table(told, [[brief(item.get(name)) for name in told] for item in shown])
        return len(shown)

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print rows under their titles, as wide as the terminal is.

        Nothing is cut, so that ids and times can be copied: the columns that have no room beside
        the others, and long text, go into a line of their own under each row.
        """
        from rich.padding import Padding  # noqa: PLC0415 - JSON needs none of it
        from rich.segment import SegmentLines  # noqa: PLC0415

        given = [list(row) for row in rows]
        cells = [list(map(cell, row)) for row in given]
        screen = console() if measured() else console(width=UNBOUNDED)
        beside = fitting(titles, cells, screen.width)
        table = _table(titles)
        for number in beside:
            table.add_column(titles[number], no_wrap=True)
        for row in cells:
            table.add_row(*(row[number] for number in beside))
        # Its title and the rule below it, then a line for each row.
        lines = screen.render_lines(table, screen.options.update(width=UNBOUNDED), pad=False)
        screen.print(SegmentLines(lines[:2], new_lines=True), end="", crop=False)
        for line, values in zip(lines[2:], given, strict=True):
            screen.print(SegmentLines([line], new_lines=True), end="", crop=False)
            rest = [
                (titles[number], value)
                for number, value in enumerate(values)
                if number not in beside and tells(value, titles[number])
            ]
            if rest:
                screen.print(Padding(pairs(rest), (0, 0, 0, 4), expand=False))

    def text(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print rows for reading: what is long goes on in the next line; "" has no title."""
        table = _table([title for title in titles if title])
        for number, title in enumerate(titles):
            style = None if number else "bold"
            table.add_column(title, overflow="fold", no_wrap=not number, style=style)
        for row in rows:
            table.add_row(*(cell(value, lines=True) for value in row))
        console().print(table)

    def said(self, value: object, line: str) -> None:
        """Print what a command did: JSON, or a sentence."""
        if self.as_json:
            self.value(value)
        else:
            say(line)


def _table(titles: Sequence[str]) -> Table:
    from rich import box  # noqa: PLC0415 - JSON needs none of it
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD if titles else None, show_header=bool(titles))
    table.pad_edge, table.show_edge, table.collapse_padding = False, False, True
    return table


def fitting(titles: Sequence[str], cells: Sequence[Sequence[Text]], room: int) -> list[int]:
    """Return which columns, by number, have room beside each other; the first always has."""
    found: list[int] = []
    for number, title in enumerate(titles):
        width = max(len(title), *(row[number].cell_len for row in cells), 0)
        if not found or (width <= LONG and width + GAP <= room):
            found.append(number)
            room -= width + (GAP if number else 0)
    return found


def pairs(named: Iterable[tuple[str, object]]) -> Text:
    """Return names and values as text that goes on in the next line."""
    from rich.text import Text  # noqa: PLC0415 - JSON needs none of it

    parts = [Text.assemble((name, "bright_black"), " ", cell(value)) for name, value in named]
    text = Text("  ").join(parts)
    text.overflow = "fold"
    return text


def measured() -> bool:
    """Say whether it is known how wide stdout is."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def examples(*lines: str) -> str:
    """Return the end of a command's help: lines that can be typed as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def printing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --json and --table, and the output that follows from them as `out`."""

    @functools.wraps(command)
    def wrapped(*args: Any, json_wanted: bool | None, **options: Any) -> Any:
        as_json = not sys.stdout.isatty() if json_wanted is None else json_wanted
        return command(*args, out=Output(as_json), **options)

    def note(ctx: click.Context, _: click.Parameter, wanted: bool | None) -> bool | None:
        ctx.meta[JSON] = bool(wanted)
        return wanted

    return click.option(
        "--json/--table", "json_wanted", default=None, is_eager=True, callback=note,
        help="Print JSON, or a table; by default a table on a terminal, JSON elsewhere.",
    )(wrapped)  # fmt: skip


def plain(value: object) -> Any:
    """Return a value as JSON has it: times as text, classes as objects."""
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, Enum):
        return value.value
    document = getattr(value, "document", None)
    if isinstance(document, dict):  # what the server sent, whatever this version knows of it
        return document
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def tells(value: object, name: str = "") -> bool:
    """Say whether a field has something to show; one with a name, other than the usual."""
    if name in USUAL and value == USUAL[name]:
        return False
    return value not in (None, "", [], {}, 0) or value is False


def brief(value: object) -> object:
    """Return a time to the second, and anything else as it is."""
    found = WHOLE.fullmatch(value) if isinstance(value, str) else None
    return f"{found[1]}Z" if found else value


def moment(at: datetime) -> str:
    """Return a time as the API writes it: UTC, with milliseconds."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_of_ms(at_ms: int | None) -> str | None:
    """Return a time in milliseconds since 1970 as the API writes it; one beyond 9999 is its end."""
    if at_ms is None:
        return None
    return moment(datetime.fromtimestamp(min(at_ms, LAST_MS) / 1000, UTC))


def cell(value: object, *, lines: bool = False) -> Text:
    """Return a value as a cell of a table, on one line unless it may have several."""
    from rich.text import Text  # noqa: PLC0415 - JSON needs none of it

    if isinstance(value, Text):
        return value
    if value is None:
        return Text("–", style="bright_black")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, int | float):
        return Text(f"{value:,}" if isinstance(value, int) else f"{value:g}")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = " ".join(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Text(clean(text if lines else BLANKS.sub(" ", text)), style=COLOURS.get(text, ""))


def console(*, err: bool = False, width: int | None = None) -> Console:
    """Return a console on stdout or stderr; where no terminal shows it, it is wide."""
    from rich.console import Console  # noqa: PLC0415 - JSON needs none of it

    stream = sys.stderr if err else sys.stdout
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = WIDE
    return Console(file=stream, width=width, highlight=False)
