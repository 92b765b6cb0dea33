"""`submit-many`: tasks from a file or a pipe, sent in batches while they are read."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from tickwheel.cli import exits
from tickwheel.cli.output import Output, console, examples, plain, printing
from tickwheel.cli.remote import remote, service_names
from tickwheel.cli.types import refuse, stdin
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tickwheel.client import Client

CHUNK = 1 << 16  # characters
MAX_TASK = 16 << 20  # characters of one task: more is no task
BLANK = "\ufeff \t\r\n"
SIGN = re.compile(r"[ \t\r\n]*([{:,}])[ \t\r\n]*")  # what stands between names and values
DECODER = json.JSONDecoder(parse_constant=refuse)
SHOWN = 10  # refused tasks that are told of on a terminal


class NotTasks(TickwheelError, ValueError):
    """What was to be a task is not JSON, or no object: it ends the stream."""

    code = "invalid"


class Reader:
    """Tasks from a stream of text: a JSON array, or one JSON object per line.

    - Yields objects as they come, and holds one of them and a chunk, never all.
    - A payload is `Json`, the text as it stands there: none of its digits is lost.
    - What cannot be read raises, and says where it stands: a line by its number in the file.
    - `read_bytes`: how much has been read, for a bar.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.count = 0
        self.read_bytes = 0
        self._line = 0  # its number; 0 in an array

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first, line = self._read(CHUNK), 1
        while first and not first.strip(BLANK):
            line += first.count("\n")
            first = self._read(CHUNK)
        text = first.lstrip(BLANK)
        line += first[: len(first) - len(text)].count("\n")
        tasks = self._array(text[1:]) if text.startswith("[") else self._lines(text, line)
        for task in tasks:
            if not isinstance(task, dict):
                raise self._wrong(f"it is no JSON object: {json.dumps(task)[:80]}")
            self.count += 1
            yield task

    def _lines(self, rest: str, first: int) -> Iterator[Any]:
        self._line = first
        while True:
            *lines, rest = rest.split("\n")
            for line in lines:
                if line.strip():
                    yield self._decoded(line)
                self._line += 1
            if len(rest) > MAX_TASK:
                raise self._wrong("it is longer than 16 MiB")
            more = self._read(CHUNK)
            if not more:
                break
            rest += more
        if rest.strip():
            yield self._decoded(rest)

    def _array(self, rest: str) -> Iterator[Any]:
        separated = True
        while True:
            rest = rest.lstrip()
            if not rest:
                rest = self._more("")
            elif rest[0] == "]" and (not separated or not self.count):
                self._check_end(rest[1:])
                return
            elif rest[0] == "," and not separated:
                rest, separated = rest[1:], True
            elif not separated or rest[0] != "{":
                raise self._wrong(f"a task is an object, and here stands {rest[:20]!r}")
            else:
                task, rest = self._item(rest)
                separated = False
                yield task

    def _item(self, rest: str) -> tuple[Any, str]:
        """Return the object that `rest` begins with, reading on until it is whole."""
        while True:
            if (found := task_at(rest)) is not None:
                return found[0], rest[found[1] :]
            try:
                task, end = DECODER.raw_decode(rest)
            except json.JSONDecodeError as error:
                if len(rest) > MAX_TASK:
                    raise self._wrong("it is longer than 16 MiB") from error
                longer = self._read(max(CHUNK, len(rest)))  # doubling: no task is read too often
                if not longer:
                    raise self._wrong(error.msg) from error
                rest += longer
            except (ValueError, RecursionError) as error:
                raise self._wrong(str(error)) from error
            else:
                return task, rest[end:]

    def _check_end(self, rest: str) -> None:
        if rest.strip() or self._read(CHUNK).strip():
            raise self._wrong("the array has ended before it")

    def _more(self, rest: str) -> str:
        more = self._read(CHUNK)
        if not more:
            raise self._wrong("the array has no end")
        return rest + more

    def _read(self, size: int) -> str:
        try:
            text = self._stream.read(size)
        except UnicodeDecodeError as error:
            raise NotTasks(f"after task {self.count}: it is not UTF-8 ({error.reason})") from error
        self.read_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return text

    def _decoded(self, line: str) -> Any:
        found = task_at(line)
        if found is not None and not line[found[1] :].strip(BLANK):
            return found[0]
        try:
            return DECODER.decode(line)
        except json.JSONDecodeError as error:
            raise self._wrong(f"{error.msg}, at column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise self._wrong(str(error)) from error

    def _wrong(self, why: str) -> NotTasks:
        where = f"line {self._line}" if self._line else f"task {self.count + 1}"
        return NotTasks(f"{where} cannot be read: {why}")


def task_at(text: str) -> tuple[dict[str, Any], int] | None:
    """Return the task that a text begins with, its payload as it is written there, and its end.

    None when there is no whole and right one: what is wrong, the decoder says better.
    """
    try:
        return _task_at(text)
    except (ValueError, LookupError, RecursionError):
        return None


def _task_at(text: str) -> tuple[dict[str, Any], int]:
    from tickwheel.client import Json  # noqa: PLC0415 - not for --help

    task: dict[str, Any] = {}
    at = _behind("{", text, 0)
    if text[at] == "}":
        return task, at + 1
    while True:
        if text[at] != '"':
            raise ValueError("no name")
        name, at = DECODER.raw_decode(text, at)
        start = _behind(":", text, at)
        value, at = DECODER.raw_decode(text, start)
        task[name] = Json(text[start:at]) if name == "payload" else value
        found = SIGN.match(text, at)
        if found is not None and found[1] == "}":
            return task, found.end()
        at = _behind(",", text, at)


def _behind(sign: str, text: str, at: int) -> int:
    """Return where that goes on which stands behind a sign and the blanks around it."""
    found = SIGN.match(text, at)
    if found is None or found[1] != sign:
        raise ValueError(f"no {sign}")
    return found.end()


@click.command(
    "submit-many",
    epilog=examples(
        "tickwheel submit-many tasks.ndjson",
        """echo '{"service": "sums", "payload": [1], "delay": 60}' | tickwheel submit-many -""",
        "tickwheel submit-many payloads.json --service close-order --json > answers.ndjson",
    ),
)
@click.argument("file", type=click.Path(allow_dash=True, dir_okay=False, exists=True))
@click.option(
    "--service", shell_complete=service_names, help="The service of tasks that name none."
)
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=1000, show_default=True,
    help="How many tasks go into one request.",
)  # fmt: skip
@printing
@remote
def submit_many(*, client: Client, out: Output, file: str, service: str | None, batch: int) -> int:
    """Submit many tasks from a file or stdin.

    FILE, or - for stdin, is a JSON array, or has one JSON object per line. An object has the fields
    of a submit: service, payload, delay or due_at, key, on_conflict, max_attempts, priority,
    timeout, deadline. It is sent while it is read, however long it is.

    As JSON, the answers are printed one per line, in order. A refused task stops no other; the exit
    code is that of the first refusal. What cannot be read ends it: what stands before is submitted,
    nothing after it.
    """
    size = None if file == "-" else Path(file).stat().st_size
    with contextlib.ExitStack() as stack:
        given = stdin() if file == "-" else stack.enter_context(Path(file).open(encoding="utf-8"))
        reader = Reader(given)
        show = stack.enter_context(bar(reader, size))
        tasks = Tasks(reader, service)
        answers = stack.enter_context(contextlib.closing(client.submit_stream(tasks, batch=batch)))
        tally = told(out, answers, show)
    exits.say(f"stored {tally.stored:,}, refused {tally.refused:,}", err=out.as_json)
    if tasks.unread is not None:
        raise tasks.unread
    return exits.OK if tally.first is None else exits.exit_code(tally.first)


class Tasks:
    """The tasks of a reader, with the service that those without one are for.

    They end before what cannot be read, so that those before it are sent; `unread` says what it is.
    """

    def __init__(self, reader: Reader, service: str | None) -> None:
        self._reader = reader
        self._service = service
        self.unread: NotTasks | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for task in self._reader:
                yield task if self._service is None else {"service": self._service, **task}
        except NotTasks as error:
            self.unread = error


class Tally:
    """How many were stored and refused, and the first refusal."""

    def __init__(self) -> None:
        self.stored = 0
        self.refused = 0
        self.first: TickwheelError | None = None

    def add(self, answer: object) -> None:
        """Count an answer."""
        if isinstance(answer, TickwheelError):
            self.refused += 1
            self.first = self.first or answer
        else:
            self.stored += 1


def told(out: Output, answers: Iterable[object], show: Callable[[int], None]) -> Tally:
    """Print answers as they come, and count them."""
    tally = Tally()
    for number, answer in enumerate(answers, 1):
        tally.add(answer)
        if out.as_json:
            exits.say_json(document_of(answer))
        elif isinstance(answer, TickwheelError) and tally.refused <= SHOWN:
            exits.tell_line(f"task {number}: {answer} ({answer.code})")
        show(number)
    return tally


def document_of(answer: object) -> Any:
    """Return an answer as JSON has it."""
    if isinstance(answer, TickwheelError):
        return {"problem": exits.problem_of(answer)}
    return plain(answer)


@contextlib.contextmanager
def bar(reader: Reader, size: int | None) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how far it is: by the file's bytes, or only by count for a pipe."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (
        TextColumn("submitting"), BarColumn(),
        TextColumn("{task.fields[done]:,} tasks, {task.fields[rate]:,.0f}/s"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console(err=True), transient=True) as progress:
        task = progress.add_task("", total=size, done=0, rate=0.0)

        def show(done: int) -> None:
            if done % 100 == 0:
                elapsed = progress.tasks[0].elapsed or 1.0
                progress.update(task, completed=reader.read_bytes, done=done, rate=done / elapsed)

        yield show
