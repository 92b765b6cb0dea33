"""`submit-many`: read tasks from a file or a pipe, and submit them in batches as they come."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from tickwheel.cli import exit_codes, terminal
from tickwheel.cli.output import Output, console, examples, to_plain, with_output
from tickwheel.cli.remote import service_names, with_client
from tickwheel.cli.types import refuse_constant, stdin
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tickwheel.client import Client

CHUNK_CHARACTERS = 1 << 16
MAX_TASK_CHARACTERS = 16 << 20
WHITESPACE = "\ufeff \t\r\n"
PUNCTUATION = re.compile(r"[ \t\r\n]*([{:,}])[ \t\r\n]*")  # between names and values
DECODER = json.JSONDecoder(parse_constant=refuse_constant)
MAX_REFUSALS_SHOWN = 10  # in a table; JSON has all answers


class InvalidTasks(TickwheelError, ValueError):
    """The input is not JSON, or a task is not an object; reading stops there."""

    code = "invalid"


class Reader:
    """Iterate over the tasks in a stream: a JSON array, or one JSON object per line.

    - Holds one task and one chunk in memory, never all.
    - A payload is `Json`, its text as written: no digit is lost.
    - Invalid input raises `InvalidTasks` with its place: the line, or the task's number.
    - `read_bytes` is how much has been read, for a progress bar.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.count = 0
        self.read_bytes = 0
        self._line = 0  # the current line's number; 0 in an array

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first, line = self._read(CHUNK_CHARACTERS), 1
        while first and not first.strip(WHITESPACE):
            line += first.count("\n")
            first = self._read(CHUNK_CHARACTERS)
        text = first.lstrip(WHITESPACE)
        line += first[: len(first) - len(text)].count("\n")
        tasks = self._array(text[1:]) if text.startswith("[") else self._lines(text, line)
        for task in tasks:
            if not isinstance(task, dict):
                raise self._invalid(f"it is not a JSON object: {json.dumps(task)[:80]}")
            self.count += 1
            yield task

    def _lines(self, rest: str, first: int) -> Iterator[Any]:
        self._line = first
        while True:
            *lines, rest = rest.split("\n")
            for line in lines:
                if line.strip():
                    yield self._decode_line(line)
                self._line += 1
            if len(rest) > MAX_TASK_CHARACTERS:
                raise self._invalid("it is longer than 16 MiB")
            more = self._read(CHUNK_CHARACTERS)
            if not more:
                break
            rest += more
        if rest.strip():
            yield self._decode_line(rest)

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
                raise self._invalid(f"a task must be a JSON object, not {rest[:20]!r}")
            else:
                task, rest = self._item(rest)
                separated = False
                yield task

    def _item(self, rest: str) -> tuple[Any, str]:
        """Return the object at the start of `rest`, reading until it is complete."""
        while True:
            if (found := task_at(rest)) is not None:
                return found[0], rest[found[1] :]
            try:
                task, end = DECODER.raw_decode(rest)
            except json.JSONDecodeError as error:
                if len(rest) > MAX_TASK_CHARACTERS:
                    raise self._invalid("it is longer than 16 MiB") from error
                # Double the text each time, so that a long task is not parsed too often.
                longer = self._read(max(CHUNK_CHARACTERS, len(rest)))
                if not longer:
                    raise self._invalid(error.msg) from error
                rest += longer
            except (ValueError, RecursionError) as error:
                raise self._invalid(str(error)) from error
            else:
                return task, rest[end:]

    def _check_end(self, rest: str) -> None:
        if rest.strip() or self._read(CHUNK_CHARACTERS).strip():
            raise self._invalid("the array has already ended")

    def _more(self, rest: str) -> str:
        more = self._read(CHUNK_CHARACTERS)
        if not more:
            raise self._invalid("the array does not end")
        return rest + more

    def _read(self, size: int) -> str:
        try:
            text = self._stream.read(size)
        except UnicodeDecodeError as error:
            raise InvalidTasks(
                f"after task {self.count}: it is not UTF-8 ({error.reason})"
            ) from error
        self.read_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return text

    def _decode_line(self, line: str) -> Any:
        found = task_at(line)
        if found is not None and not line[found[1] :].strip(WHITESPACE):
            return found[0]
        try:
            return DECODER.decode(line)
        except json.JSONDecodeError as error:
            raise self._invalid(f"{error.msg}, at column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise self._invalid(str(error)) from error

    def _invalid(self, why: str) -> InvalidTasks:
        where = f"line {self._line}" if self._line else f"task {self.count + 1}"
        return InvalidTasks(f"{where} cannot be read: {why}")


def task_at(text: str) -> tuple[dict[str, Any], int] | None:
    """Return the task at the start of a text, its payload as `Json`, and where it ends.

    None if it is incomplete or invalid: the JSON decoder reports the error better.
    """
    try:
        return _task_at(text)
    except (ValueError, LookupError, RecursionError):
        return None


def _task_at(text: str) -> tuple[dict[str, Any], int]:
    from tickwheel.client import Json  # noqa: PLC0415 - not for --help

    task: dict[str, Any] = {}
    at = _skip("{", text, 0)
    if text[at] == "}":
        return task, at + 1
    while True:
        if text[at] != '"':
            raise ValueError("no name")
        name, at = DECODER.raw_decode(text, at)
        start = _skip(":", text, at)
        value, at = DECODER.raw_decode(text, start)
        task[name] = Json(text[start:at]) if name == "payload" else value
        found = PUNCTUATION.match(text, at)
        if found is not None and found[1] == "}":
            return task, found.end()
        at = _skip(",", text, at)


def _skip(sign: str, text: str, at: int) -> int:
    """Return the position after `sign` and the blanks around it."""
    found = PUNCTUATION.match(text, at)
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
    "--service", shell_complete=service_names, help="The service of tasks that do not name one."
)
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=1000, show_default=True,
    help="Tasks per request.",
)  # fmt: skip
@with_output
@with_client
def submit_many(*, client: Client, out: Output, file: str, service: str | None, batch: int) -> int:
    """Submit many tasks from a file or stdin.

    FILE, or - for stdin, is a JSON array or has one JSON object per line. An object has a
    service, a payload, and the options of `tickwheel submit`, with underscores: due_at,
    on_conflict, max_attempts. Tasks are sent while the file is read, so it may be of any length.

    With --json, the answers are printed one per line, in order. A refused task does not stop the
    others; the exit code is that of the first refusal. Invalid input stops the command: tasks
    before it are submitted, tasks after it are not.
    """
    size = None if file == "-" else Path(file).stat().st_size
    with contextlib.ExitStack() as stack:
        given = stdin() if file == "-" else stack.enter_context(Path(file).open(encoding="utf-8"))
        reader = Reader(given)
        show = stack.enter_context(progress_bar(reader, size))
        tasks = Tasks(reader, service)
        answers = stack.enter_context(contextlib.closing(client.submit_stream(tasks, batch=batch)))
        tally = print_answers(out, answers, show)
    terminal.print_line(f"stored {tally.stored:,}, refused {tally.refused:,}", err=out.as_json)
    if tasks.unread is not None:
        raise tasks.unread
    return exit_codes.OK if tally.first is None else exit_codes.exit_code(tally.first)


class Tasks:
    """The tasks of a reader, with a service for those that do not name one.

    Iteration ends at invalid input, so that the tasks before it are sent; `unread` is the error.
    """

    def __init__(self, reader: Reader, service: str | None) -> None:
        self._reader = reader
        self._service = service
        self.unread: InvalidTasks | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for task in self._reader:
                yield task if self._service is None else {"service": self._service, **task}
        except InvalidTasks as error:
            self.unread = error


class Tally:
    """The number of tasks stored and refused, and the first refusal."""

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


def print_answers(out: Output, answers: Iterable[object], show: Callable[[int], None]) -> Tally:
    """Print answers as they come, and count them."""
    tally = Tally()
    for number, answer in enumerate(answers, 1):
        tally.add(answer)
        if out.as_json:
            terminal.print_json(document_of(answer))
        elif isinstance(answer, TickwheelError) and tally.refused <= MAX_REFUSALS_SHOWN:
            terminal.print_message(f"task {number}: {answer} ({answer.code})")
        show(number)
    return tally


def document_of(answer: object) -> Any:
    """Return an answer as JSON."""
    if isinstance(answer, TickwheelError):
        return {"problem": exit_codes.problem_of(answer)}
    return to_plain(answer)


@contextlib.contextmanager
def progress_bar(reader: Reader, size: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows progress on a terminal: by bytes, or by count for a pipe."""
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
