"""`backlog`: tasks that have ended, and their replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.output import Output, examples, with_output
from tickwheel.cli.remote import iterate_pages, page_options, with_client
from tickwheel.cli.tasks import due_options, filter_options, given_filters

if TYPE_CHECKING:
    from datetime import datetime

    from tickwheel.client import Client

ENDED = ("finished", "failed", "cancelled")
COLUMNS = ("id", "service", "state", "updated_at", "key", "attempt", "error", "replayed_as")


@click.group()
def backlog() -> None:
    """List and replay tasks that have ended."""


@backlog.command(
    "list",
    epilog=examples(
        "tickwheel backlog list --state failed",
        "tickwheel backlog list --service close-order --all --json",
    ),
)
@filter_options(ENDED)
@page_options
@with_output
@with_client
def list_backlog(
    *, client: Client, out: Output, limit: int | None, cursor: str | None, **asked: Any
) -> None:
    """List tasks that have ended, newest first; JSON has one task per line."""
    out.items(iterate_pages(client.backlog, limit, cursor, **asked), COLUMNS)


@backlog.command(
    epilog=examples(
        "tickwheel backlog replay 0198c0de00007000a1b2c3d4e5f60718",
        "tickwheel backlog replay 0198c0de00007000a1b2c3d4e5f60718 --delay 5m --force",
        "tickwheel backlog replay --service close-order --state failed",
    )
)
@click.argument("task_ids", metavar="[ID]...", nargs=-1)
@filter_options(ENDED)
@due_options
@click.option("--force", is_flag=True, help="Also replay tasks that were replayed before.")
@with_output
@with_client
def replay(
    *,
    client: Client,
    out: Output,
    task_ids: tuple[str, ...],
    delay: float | None,
    at: datetime | None,
    force: bool,
    **asked: Any,
) -> None:
    """Submit ended tasks again: by id, or all that match.

    The new task has a new id and names the old one as replay_of. A second replay needs --force;
    without it the exit code is 4. Filters choose failed tasks if --state is not given, and skip
    tasks that were replayed before, with the exit code 0. --delay and --due-at need ids.
    """
    matches = given_filters(asked)
    if bool(task_ids) == bool(matches):
        raise click.UsageError("give ids, or at least one of --state, --service, --key and --tag")
    if matches:
        if delay is not None or at is not None:
            raise click.UsageError("--delay and --due-at need ids")
        count = client.replay_where(**matches, force=force)
        out.result({"replayed": count}, f"replayed {count:,}")
        return
    for task_id in task_ids:
        task = client.replay(task_id, delay=delay, at=at, force=force)
        out.result(task, f"replayed {task_id} as {task.id}")
