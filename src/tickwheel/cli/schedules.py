"""`schedules`: tasks that are submitted by the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.output import Output, examples, printing
from tickwheel.cli.remote import limits, paged, remote, schedule_names, service_names
from tickwheel.cli.types import DURATION, PAYLOAD

if TYPE_CHECKING:
    from tickwheel.client import Client


@click.group()
def schedules() -> None:
    """Submit tasks by the clock: cron, intervals."""


@schedules.command("list", epilog=examples("tickwheel schedules list"))
@limits
@printing
@remote
def list_schedules(*, client: Client, out: Output, limit: int | None, cursor: str | None) -> None:
    """List schedules, by name."""
    out.items(
        paged(client.schedules_page, limit, cursor),
        ("name", "service", "cron", "interval", "next_at", "enabled", "tz"),
    )


@schedules.command(epilog=examples("tickwheel schedules show nightly"))
@click.argument("name", shell_complete=schedule_names)
@printing
@remote
def show(*, client: Client, out: Output, name: str) -> None:
    """Show a schedule."""
    out.record(client.get_schedule(name))


@schedules.command(
    epilog=examples(
        "tickwheel schedules put nightly report --cron '0 3 * * *' --tz Europe/Berlin",
        """tickwheel schedules put poll fetch '{"from": "inbox"}' --interval 30s --missed skip""",
    )
)
@click.argument("name", shell_complete=schedule_names)
@click.argument("service", shell_complete=service_names)
@click.argument("payload", type=PAYLOAD, required=False)
@click.option("--cron", help="Five fields: minute, hour, day, month, weekday.")
@click.option("--interval", type=DURATION, help="Each time after so long: 30s, 5m.")
@click.option("--tz", help="The time zone of --cron.  [default: UTC]")
@click.option(
    "--missed", type=click.Choice(["once", "all", "skip"]),
    help="What to do about firings that no node was there for.  [default: once]",
)  # fmt: skip
@click.option("--enabled/--disabled", default=True, help="Whether it fires.  [default: enabled]")
@click.option("--max-attempts", type=click.IntRange(1), help="Calls in all, of each task.")
@click.option("--priority", type=int, help="The higher goes first, within its service.")
@click.option("--timeout", type=DURATION, help="How long one call may take.")
@printing
@remote
def put(
    *, client: Client, out: Output, name: str, service: str, payload: Any, **options: Any
) -> None:
    """Make a schedule, or put another in its place; PAYLOAD is JSON, @FILE or -."""
    if (options["cron"] is None) == (options["interval"] is None):
        raise click.UsageError("give --cron or --interval, one of them")
    out.record(client.put_schedule(name, service, payload, **options))


@schedules.command(epilog=examples("tickwheel schedules delete nightly"))
@click.argument("name", shell_complete=schedule_names)
@printing
@remote
def delete(*, client: Client, out: Output, name: str) -> None:
    """Delete a schedule; a firing of it that is still to come is cancelled."""
    client.delete_schedule(name)
    out.said({"deleted": name}, f"deleted {name}")
