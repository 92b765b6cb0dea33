"""The commands on tasks: submit, show, list, cancel, reschedule, feedback."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tickwheel.cli import exit_codes, terminal
from tickwheel.cli.output import Output, examples, format_duration, to_plain, with_output
from tickwheel.cli.remote import iterate_pages, page_options, service_names, with_client
from tickwheel.cli.types import DURATION, MOMENT, PAYLOAD
from tickwheel.errors import UnknownTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from tickwheel.client import Attempt, Client, Verdict

F = TypeVar("F", bound="Callable[..., Any]")

STATES = ("delay", "ready", "running", "finished", "failed", "cancelled")
COLUMNS = ("id", "service", "state", "due_at", "key", "attempt", "failures", "error", "tags")


def due_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --delay and --due-at to a command; only one may be given."""

    @functools.wraps(command)
    def wrapped(*, delay: float | None, at: datetime | None, **options: Any) -> Any:
        if delay is not None and at is not None:
            raise click.UsageError("give --delay or --due-at, not both")
        return command(delay=delay, at=at, **options)

    wrapped = click.option(
        "--due-at", "--at", "at", type=MOMENT, help="When it is due: 2030-01-31T12:00:00Z."
    )(wrapped)
    return click.option("--delay", type=DURATION, help="Time until it is due: 30s, 5m, 2h, 1d.")(
        wrapped
    )


def tag_option(name: str, text: str) -> Callable[[F], F]:
    """Return a decorator that adds --tag, which may be given several times, or None."""
    return click.option(
        "--tag", name, multiple=True, callback=lambda _, __, tags: tags or None, help=text
    )


def filter_options(states: Sequence[str]) -> Callable[[F], F]:
    """Return a decorator that adds the options which say which tasks a command is about."""

    def decorate(command: F) -> F:
        for option in (
            tag_option("tag", "Only tasks with this tag; repeat it to require all of them."),
            click.option("--key", help="Only tasks with this key."),
            click.option(
                "--service", shell_complete=service_names, help="Only tasks of this service."
            ),
            click.option("--state", type=click.Choice(states), help="Only tasks in this state."),
        ):
            command = option(command)
        return command

    return decorate


due_before = click.option("--due-before", type=MOMENT, help="Only tasks due before this time.")


def given_filters(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the filters that were given."""
    return {name: value for name, value in asked.items() if value is not None}


@click.command(
    epilog=examples(
        """tickwheel submit close-order '{"order": "o-1"}' --delay 30m --key order:o-1""",
        "tickwheel submit report @report.json --due-at 2030-01-31T12:00:00Z",
        "echo '[1, 2]' | tickwheel submit sums - --json",
    )
)
@click.argument("service", shell_complete=service_names)
@click.argument("payload", type=PAYLOAD, required=False)
@due_options
@click.option("--key", help="A key that only one live task of the service may have.")
@click.option(
    "--on-conflict", type=click.Choice(["reject", "replace", "keep"]),
    help="What to do when the key is taken.  [default: reject]",
)  # fmt: skip
@click.option("--max-attempts", type=click.IntRange(1), help="The most calls, retries included.")
@click.option("--priority", type=int, help="Higher values go first, within a service.")
@click.option("--timeout", type=DURATION, help="How long one call may take.")
@click.option("--deadline", type=MOMENT, help="After this time it is no longer called.")
@tag_option("tags", "A tag to find it by; may be given 8 times.")
@click.option("--idempotency-key", help="A second submit with it, within a day, stores nothing.")
@click.option("--quiet", "-q", is_flag=True, help="Print the task's id and nothing else.")
@with_output
@with_client
def submit(
    *, client: Client, out: Output, service: str, payload: Any, quiet: bool, **options: Any
) -> None:
    """Submit a task.

    PAYLOAD is JSON, @FILE, or - for stdin. Without --delay and --due-at the task is due at once.
    """
    task = client.submit(service, payload, **options)
    if quiet:
        terminal.print_line(task.id)
    else:
        out.result(task, f"{task.id} is due at {to_plain(task.due_at)}")


@click.command(
    epilog=examples(
        "tickwheel show 0198c0de00007000a1b2c3d4e5f60718",
        "tickwheel show 0198c0de00007000a1b2c3d4e5f60718 --attempts",
    )
)
@click.argument("task_id", metavar="ID")
@click.option("--attempts", is_flag=True, help="Also show how each attempt ended.")
@with_output
@with_client
def show(*, client: Client, out: Output, task_id: str, attempts: bool) -> None:
    """Show a task, live or ended."""
    task = client.get(task_id)
    log = client.attempts(task_id) if attempts else []
    if out.as_json:
        out.value(to_plain(task) | ({"attempts": to_plain(log)} if attempts else {}))
        return
    out.record(task)
    if attempts:
        terminal.print_line()
        print_attempts(log, out)


def print_attempts(log: Sequence[Attempt], out: Output) -> None:
    """Print a table of attempts, with nodes and epochs if they differ, and where messages are."""
    moved = len({(attempt.node, attempt.epoch) for attempt in log}) > 1
    where = ["node", "epoch"] if moved else []
    if any(attempt.delivered_to is not None for attempt in log):
        where.append("delivered_to")
    rows = []
    for attempt in log:
        took = format_duration((attempt.ended_at - attempt.started_at).total_seconds())
        rest = [getattr(attempt, name) for name in where]
        started = to_plain(attempt.started_at)
        rows.append([attempt.attempt, to_plain(attempt.event), started, took, *rest, attempt.error])
    out.table(["attempt", "event", "started_at", "took", *where, "error"], rows)


@click.command(
    "list",
    epilog=examples(
        "tickwheel list --service close-order --state ready",
        "tickwheel list --key order:o-1",
        "tickwheel list --all --json | jq .id",
    ),
)
@filter_options(STATES)
@click.option("--due-after", type=MOMENT, help="Only tasks due at this time or later.")
@due_before
@page_options
@with_output
@with_client
def list_tasks(
    *, client: Client, out: Output, limit: int | None, cursor: str | None, **asked: Any
) -> None:
    """List tasks, newest first.

    JSON has one task per line. `tickwheel backlog list` lists only those that have ended.
    """
    out.items(iterate_pages(client.list, limit, cursor, **asked), COLUMNS)


@click.command(
    epilog=examples(
        "tickwheel cancel 0198c0de00007000a1b2c3d4e5f60718",
        "tickwheel cancel --key order:o-1",
        "tickwheel cancel --service close-order --due-before 2030-01-01T00:00:00Z --yes",
    )
)
@click.argument("task_ids", metavar="[ID]...", nargs=-1)
@filter_options(STATES[:2])
@due_before
@click.option("--yes", "-y", is_flag=True, help="Cancel many tasks without asking.")
@with_output
@with_client
def cancel(
    *,
    client: Client,
    out: Output,
    task_ids: tuple[str, ...],
    yes: bool,
    **asked: Any,
) -> int:
    """Cancel tasks by id, key, service or tag.

    A task that runs or has ended is not cancelled: for an id the exit code is then 4. If no task
    that waits has the key, it is 3. Cancelling all tasks of a service or with a tag asks for
    confirmation; without a terminal it needs --yes.
    """
    which = given_filters(asked)
    if task_ids:
        if which:
            raise click.UsageError("give ids, or options such as --key and --service, not both")
        return print_verdicts(out, map(client.cancel, task_ids), "cancelled")
    if not which.keys() & {"key", "service", "tag"}:
        raise click.UsageError("give the tasks to cancel: ids, --key, --service or --tag")
    if "key" not in which and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("this cancels all matching tasks: confirm with --yes")
        whose = " and ".join([*which.get("tag", ()), *filter(None, [which.get("service")])])
        if not click.confirm(f"Cancel all matching tasks of {whose}?", err=True):
            return exit_codes.OTHER
    count = client.cancel_where(**which)
    out.result({"cancelled": count}, f"cancelled {count:,}")
    if "key" in which and not count:  # it may be the wrong server
        error = UnknownTask(f"no task that waits has the key {which['key']!r:.100}")
        error.add_note("--server or TICKWHEEL_SERVER names another server")
        terminal.print_error(error, as_json=out.as_json)
        return exit_codes.NOT_FOUND
    return exit_codes.OK


@click.command(
    epilog=examples(
        "tickwheel reschedule 0198c0de00007000a1b2c3d4e5f60718 --delay 5m",
        "tickwheel reschedule 0198c0de00007000a1b2c3d4e5f60718 --due-at 2030-01-31T12:00:00Z",
    )
)
@click.argument("task_id", metavar="ID")
@due_options
@with_output
@with_client
def reschedule(
    *, client: Client, out: Output, task_id: str, delay: float | None, at: datetime | None
) -> int:
    """Change a task's due time.

    A task that runs or has ended is not changed: the exit code is then 4.
    """
    if delay is None and at is None:
        raise click.UsageError("give either --delay or --due-at")
    return print_verdicts(out, [client.reschedule(task_id, delay=delay, at=at)], "rescheduled")


@click.command(
    epilog=examples(
        """tickwheel feedback 0198c0de… finished --attempt 1 --result '{"sum": 3}'""",
        "tickwheel feedback 0198c0de… failed --attempt 1 --error 'no such order' --no-retry",
        "tickwheel feedback 0198c0de… progress --attempt 1",
    )
)
@click.argument("task_id", metavar="ID")
@click.argument("outcome", type=click.Choice(["finished", "failed", "progress"]))
@click.option(
    "--attempt", type=click.IntRange(1), required=True, help="The call's header tickwheel-attempt."
)
@click.option("--epoch", type=click.IntRange(0), help="The call's header tickwheel-epoch.")
@click.option("--result", type=PAYLOAD, help="The result of a finished task: JSON, @FILE or -.")
@click.option("--error", help="Why the task failed.")
@click.option("--retry/--no-retry", default=None, help="Whether to retry a failed task.")
@with_output
@with_client
def feedback(*, client: Client, out: Output, task_id: str, outcome: str, **options: Any) -> int:
    """Report the outcome of an accepted task.

    This is for a callee that answered 202. Feedback for an attempt that is not the running one
    changes nothing: the exit code is then 4.
    """
    return print_verdicts(
        out, [client.feedback(task_id, outcome, **options)], f"reported as {outcome}"
    )


def print_verdicts(out: Output, verdicts: Iterable[Verdict], done: str) -> int:
    """Print each verdict as it arrives, and return the exit code."""
    code = exit_codes.OK
    for verdict in verdicts:
        code = code if verdict.won else exit_codes.CONFLICT
        state = to_plain(verdict.state)
        sentence = f"{done}, now {state}" if verdict.won else f"not {done}: it is {state}"
        out.result(verdict, f"{verdict.id} {sentence}")
    return code
