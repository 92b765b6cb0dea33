"""The verbs on tasks: submit, show, list, cancel, reschedule, feedback."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli import exits
from tickwheel.cli.frame import span
from tickwheel.cli.output import Output, examples, plain, printing
from tickwheel.cli.remote import limits, paged, remote, service_names
from tickwheel.cli.types import DURATION, MOMENT, PAYLOAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from tickwheel.client import Attempt, Client, Verdict

STATES = ("delay", "ready", "running", "finished", "failed", "cancelled")
COLUMNS = ("id", "service", "state", "due_at", "key", "attempt", "failures", "error")


def due(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --delay and --due-at, of which one may be given."""

    @functools.wraps(command)
    def wrapped(*, delay: float | None, at: datetime | None, **options: Any) -> Any:
        if delay is not None and at is not None:
            raise click.UsageError("give --delay or --due-at, not both")
        return command(delay=delay, at=at, **options)

    wrapped = click.option(
        "--due-at", "--at", "at", type=MOMENT, help="When it is due: 2030-01-31T12:00:00Z."
    )(wrapped)
    return click.option("--delay", type=DURATION, help="In how long it is due: 30s, 5m, 2h, 1d.")(
        wrapped
    )


@click.command(
    epilog=examples(
        """tickwheel submit close-order '{"order": "o-1"}' --delay 30m --key order:o-1""",
        "tickwheel submit report @report.json --due-at 2030-01-31T12:00:00Z",
        "echo '[1, 2]' | tickwheel submit sums - --json",
    )
)
@click.argument("service", shell_complete=service_names)
@click.argument("payload", type=PAYLOAD, required=False)
@due
@click.option("--key", help="A name that only one live task of the service may have.")
@click.option(
    "--on-conflict", type=click.Choice(["reject", "replace", "keep"]),
    help="What to do when the key is taken.  [default: reject]",
)  # fmt: skip
@click.option("--max-attempts", type=click.IntRange(1), help="Calls in all.")
@click.option("--priority", type=int, help="The higher goes first, within its service.")
@click.option("--timeout", type=DURATION, help="How long one call may take.")
@click.option("--deadline", type=MOMENT, help="After this time it is not called any more.")
@click.option("--idempotency-key", help="The same one again, within a day, stores nothing.")
@click.option("--quiet", "-q", is_flag=True, help="Print the task's id and nothing else.")
@printing
@remote
def submit(
    *, client: Client, out: Output, service: str, payload: Any, quiet: bool, **options: Any
) -> None:
    """Submit a task.

    PAYLOAD is JSON, @FILE, or - for stdin. Without --delay and --due-at the task is due at once.
    """
    task = client.submit(service, payload, **options)
    if quiet:
        exits.say(task.id)
    else:
        out.said(task, f"{task.id} is due at {plain(task.due_at)}")


@click.command(
    epilog=examples(
        "tickwheel show 0198c0de00007000a1b2c3d4e5f60718",
        "tickwheel show 0198c0de00007000a1b2c3d4e5f60718 --attempts",
    )
)
@click.argument("task_id", metavar="ID")
@click.option("--attempts", is_flag=True, help="Show how each attempt ended, too.")
@printing
@remote
def show(*, client: Client, out: Output, task_id: str, attempts: bool) -> None:
    """Show a task, live or ended."""
    task = client.get(task_id)
    log = client.attempts(task_id) if attempts else []
    if out.as_json:
        out.value(plain(task) | ({"attempts": plain(log)} if attempts else {}))
        return
    out.record(task)
    if attempts:
        exits.say()
        told_of(log, out)


def told_of(log: Sequence[Attempt], out: Output) -> None:
    """Print a table of attempts; nodes and epochs when they differ."""
    moved = len({(attempt.node, attempt.epoch) for attempt in log}) > 1
    where = ["node", "epoch"] if moved else []
    rows = []
    for attempt in log:
        took = span((attempt.ended_at - attempt.started_at).total_seconds())
        rest = [getattr(attempt, name) for name in where]
        started = plain(attempt.started_at)
        rows.append([attempt.attempt, plain(attempt.event), started, took, *rest, attempt.error])
    out.table(["attempt", "event", "started_at", "took", *where, "error"], rows)


@click.command(
    "list",
    epilog=examples(
        "tickwheel list --service close-order --state ready",
        "tickwheel list --key order:o-1",
        "tickwheel list --all --json | jq .id",
    ),
)
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@click.option("--service", shell_complete=service_names, help="Only those of this service.")
@click.option("--key", help="Only those with this key.")
@click.option("--due-before", type=MOMENT, help="Only those due before this time.")
@limits
@printing
@remote
def list_tasks(
    *, client: Client, out: Output, limit: int | None, cursor: str | None, **asked: Any
) -> None:
    """List tasks, newest first.

    As JSON it is one task per line. `tickwheel backlog list` has those that have ended only.
    """
    out.items(paged(client.list, limit, cursor, **asked), COLUMNS)


@click.command(
    epilog=examples(
        "tickwheel cancel 0198c0de00007000a1b2c3d4e5f60718",
        "tickwheel cancel --key order:o-1",
        "tickwheel cancel --service close-order --due-before 2030-01-01T00:00:00Z --yes",
    )
)
@click.argument("task_ids", metavar="[ID]...", nargs=-1)
@click.option("--key", help="All with this key.")
@click.option("--service", shell_complete=service_names, help="All of this service.")
@click.option("--state", type=click.Choice(STATES[:2]), help="Of these, only those in this state.")
@click.option("--due-before", type=MOMENT, help="Of these, only those due before this time.")
@click.option("--yes", "-y", is_flag=True, help="Cancel all of a service without asking.")
@printing
@remote
def cancel(
    *,
    client: Client,
    out: Output,
    task_ids: tuple[str, ...],
    key: str | None,
    service: str | None,
    state: str | None,
    due_before: datetime | None,
    yes: bool,
) -> int:
    """Cancel tasks by id, or all with a key or of a service.

    A task that runs or has ended is not cancelled: for an id the exit code is then 4. All of a
    service are cancelled after a question; where nobody can be asked, --yes is needed.
    """
    if task_ids:
        if key or service or state or due_before:
            raise click.UsageError("give ids, or --key and --service, not both")
        return verdicts(out, map(client.cancel, task_ids), "cancelled")
    if not (key or service):
        raise click.UsageError("say which tasks: ids, --key or --service")
    if key is None and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("this cancels all such tasks of a service: give --yes")
        if not click.confirm(f"Cancel all such tasks of {service}?", err=True):
            return exits.OTHER
    count = client.cancel_where(key=key, service=service, state=state, due_before=due_before)
    out.said({"cancelled": count}, f"cancelled {count:,}")
    return exits.OK


@click.command(
    epilog=examples(
        "tickwheel reschedule 0198c0de00007000a1b2c3d4e5f60718 --delay 5m",
        "tickwheel reschedule 0198c0de00007000a1b2c3d4e5f60718 --due-at 2030-01-31T12:00:00Z",
    )
)
@click.argument("task_id", metavar="ID")
@due
@printing
@remote
def reschedule(
    *, client: Client, out: Output, task_id: str, delay: float | None, at: datetime | None
) -> int:
    """Give a task another due time.

    A task that runs or has ended is not changed: the exit code is then 4.
    """
    if delay is None and at is None:
        raise click.UsageError("give --delay or --due-at, one of them")
    return verdicts(out, [client.reschedule(task_id, delay=delay, at=at)], "rescheduled")


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
    "--attempt", type=click.IntRange(1), required=True, help="Of the call: tickwheel-attempt."
)
@click.option("--epoch", type=click.IntRange(0), help="Of the call: tickwheel-epoch.")
@click.option("--result", type=PAYLOAD, help="What it finished with: JSON, @FILE or -.")
@click.option("--error", help="Why it failed.")
@click.option("--retry/--no-retry", default=None, help="Whether a failed one is tried again.")
@printing
@remote
def feedback(*, client: Client, out: Output, task_id: str, outcome: str, **said: Any) -> int:
    """Say how an accepted task ended, or goes on.

    For a callee that answered 202. Feedback for another attempt than the running one changes
    nothing: the exit code is then 4.
    """
    return verdicts(out, [client.feedback(task_id, outcome, **said)], f"took {outcome}")


def verdicts(out: Output, given: Iterable[Verdict], done: str) -> int:
    """Print who won, each as it is known, and return the exit code."""
    code = exits.OK
    for verdict in given:
        code = code if verdict.won else exits.CONFLICT
        state = plain(verdict.state)
        sentence = f"{done}, now {state}" if verdict.won else f"not {done}: it is {state}"
        out.said(verdict, f"{verdict.id} {sentence}")
    return code
