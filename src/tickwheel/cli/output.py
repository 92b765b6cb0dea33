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

from tickwheel.cli.root import JSON
from tickwheel.cli.terminal import escape_controls, print_json, print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PIPE_COLUMNS = 200  # width of text that goes into a file or a pipe
MAX_CELL_CHARS = 65_536  # of a value in a table: wrapping ten million takes a quarter of a minute
UNBOUNDED_COLUMNS = 5_000  # wider than any table
MAX_CELL_COLUMNS = 60  # wider cells go on a line of their own
MAX_TIME_MS = 253_402_300_799_000  # the last second of the year 9999
COLUMN_GAP = 2
USUAL = {"attempt": 1}  # values that a list does not show
BLANKS = re.compile(r"[ \t\r\n]+")  # other white space is shown escaped
TIME_WITH_MS = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.\d{3}Z")
COLOURS = {
    "delay": "cyan", "ready": "yellow", "running": "blue", "finished": "green", "failed": "red",
    "cancelled": "bright_black", "closed": "green", "half-open": "yellow", "open": "red",
    "enabled": "green", "disabled": "bright_black",
}  # fmt: skip


class Output(NamedTuple):
    """Print a command's data to stdout, as JSON or as a table.

    - A list is one JSON document per line, so that it can be read while it is written.
    - A table shows no control characters, whatever is in the data.
    """

    as_json: bool

    def value(self, value: object) -> None:
        """Print one JSON document: indented for people, on one line for programs."""
        print_json(to_plain(value), indent=2 if sys.stdout.isatty() else None)

    def record(self, value: object) -> None:
        """Print one record: JSON, or one field per line."""
        if self.as_json:
            self.value(value)
            return
        shown: dict[str, Any] = to_plain(value)
        names = [name for name in shown if is_worth_showing(shown[name])]
        self.text(["", ""], [[name, shown[name]] for name in names])

    def items(self, items: Iterable[object], columns: Sequence[str]) -> int:
        """Print a list as JSON lines or as a table of `columns`; return the number of items.

        A table omits columns in which every item has the usual value, and milliseconds.
        """
        if self.as_json:
            count = 0
            for item in items:
                print_json(to_plain(item))
                count += 1
            return count
        shown: list[dict[str, Any]] = [to_plain(item) for item in items]
        titles = [
            name
            for name in columns
            if not shown or any(is_worth_showing(item.get(name), name) for item in shown)
        ]
        rows = [[shorten_time(item.get(name)) for name in titles] for item in shown]
        self.table(titles, rows)
        return len(shown)

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print rows under their titles, as wide as the terminal.

        Nothing is cut, so that ids and times can be copied: columns that do not fit, and long
        text, go on a line of their own under each row.
        """
        from rich.padding import Padding  # noqa: PLC0415 - JSON does not need rich
        from rich.segment import SegmentLines  # noqa: PLC0415

        given = [list(row) for row in rows]
        cells = [list(map(cell, row)) for row in given]
        screen = console() if has_known_width() else console(width=UNBOUNDED_COLUMNS)
        fitting = columns_that_fit(titles, cells, screen.width)
        table = _table(titles)
        for number in fitting:
            table.add_column(titles[number], no_wrap=True)
        for row in cells:
            table.add_row(*(row[number] for number in fitting))
        # The titles and the rule below them, then one line per row.
        options = screen.options.update(width=UNBOUNDED_COLUMNS)
        lines = screen.render_lines(table, options, pad=False)
        screen.print(SegmentLines(lines[:2], new_lines=True), end="", crop=False)
        for line, values in zip(lines[2:], given, strict=True):
            screen.print(SegmentLines([line], new_lines=True), end="", crop=False)
            rest = [
                (titles[number], value)
                for number, value in enumerate(values)
                if number not in fitting and is_worth_showing(value, titles[number])
            ]
            if rest:
                screen.print(Padding(format_pairs(rest), (0, 0, 0, 4), expand=False))

    def text(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print rows for reading: long text wraps; a column with the title "" has no header."""
        table = _table([title for title in titles if title])
        for number, title in enumerate(titles):
            style = None if number else "bold"
            table.add_column(title, overflow="fold", no_wrap=not number, style=style)
        for row in rows:
            table.add_row(*(cell(value, lines=True) for value in row))
        console().print(table)

    def result(self, value: object, line: str) -> None:
        """Print the result of a command: JSON, or a sentence."""
        if self.as_json:
            self.value(value)
        else:
            print_line(line)


def _table(titles: Sequence[str]) -> Table:
    from rich import box  # noqa: PLC0415 - JSON does not need rich
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD if titles else None, show_header=bool(titles))
    table.pad_edge, table.show_edge, table.collapse_padding = False, False, True
    return table


def columns_that_fit(
    titles: Sequence[str], cells: Sequence[Sequence[Text]], room: int
) -> list[int]:
    """Return the numbers of the columns that fit side by side; the first always does."""
    found: list[int] = []
    for number, title in enumerate(titles):
        width = max(len(title), *(row[number].cell_len for row in cells), 0)
        if not found or (width <= MAX_CELL_COLUMNS and width + COLUMN_GAP <= room):
            found.append(number)
            room -= width + (COLUMN_GAP if number else 0)
    return found


def format_pairs(named: Iterable[tuple[str, object]]) -> Text:
    """Return names and values as text that wraps."""
    from rich.text import Text  # noqa: PLC0415 - JSON does not need rich

    parts = [Text.assemble((name, "bright_black"), " ", cell(value)) for name, value in named]
    text = Text("  ").join(parts)
    text.overflow = "fold"
    return text


def has_known_width() -> bool:
    """Return whether the width of stdout is known."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def examples(*lines: str) -> str:
    """Return the end of a command's help: example command lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def with_output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json and --table to a command, and pass it an `Output` as `out`."""

    @functools.wraps(command)
    def wrapped(*args: Any, json_wanted: bool | None, **options: Any) -> Any:
        as_json = not sys.stdout.isatty() if json_wanted is None else json_wanted
        return command(*args, out=Output(as_json), **options)

    def remember_choice(ctx: click.Context, _: click.Parameter, wanted: bool | None) -> bool | None:
        ctx.meta[JSON] = bool(wanted)
        return wanted

    return click.option(
        "--json/--table", "json_wanted", default=None, is_eager=True, callback=remember_choice,
        help="Print JSON, or a table; by default a table on a terminal, JSON elsewhere.",
    )(wrapped)  # fmt: skip


def to_plain(value: object) -> Any:
    """Return a value as plain JSON types: times as text, classes as objects."""
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, Enum):
        return value.value
    document = getattr(value, "document", None)
    if isinstance(document, dict):  # the server's answer, including fields unknown to this version
        return document
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_plain(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def is_worth_showing(value: object, name: str = "") -> bool:
    """Return whether a field is neither empty nor, by its name, at its usual value."""
    if name in USUAL and value == USUAL[name]:
        return False
    return value not in (None, "", [], {}, 0) or value is False


def shorten_time(value: object) -> object:
    """Return a time to the second, and anything else unchanged."""
    found = TIME_WITH_MS.fullmatch(value) if isinstance(value, str) else None
    return f"{found[1]}Z" if found else value


def format_time(at: datetime) -> str:
    """Return a time as the API writes it: UTC, with milliseconds."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def format_time_ms(at_ms: int | None) -> str | None:
    """Return a time in milliseconds since 1970 as the API writes it, capped at the year 9999."""
    if at_ms is None:
        return None
    return format_time(datetime.fromtimestamp(min(at_ms, MAX_TIME_MS) / 1000, UTC))


def format_duration(seconds: float | None) -> str:
    """Return a time span for people."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.1f} s"


def cell(value: object, *, lines: bool = False) -> Text:
    """Return a value as a table cell, on one line unless `lines` allows several."""
    from rich.text import Text  # noqa: PLC0415 - JSON does not need rich

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
    if len(text) > MAX_CELL_CHARS:
        more = len(text) - MAX_CELL_CHARS
        text = f"{text[:MAX_CELL_CHARS]}… and {more:,} characters more; --json prints all of them"
    return Text(
        escape_controls(text if lines else BLANKS.sub(" ", text)), style=COLOURS.get(text, "")
    )


def console(*, err: bool = False, width: int | None = None) -> Console:
    """Return a console on stdout or stderr; into a file or a pipe it is `PIPE_COLUMNS` wide."""
    from rich.console import Console  # noqa: PLC0415 - JSON does not need rich

    stream = sys.stderr if err else sys.stdout
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = PIPE_COLUMNS
    return Console(file=stream, width=width, highlight=False)
