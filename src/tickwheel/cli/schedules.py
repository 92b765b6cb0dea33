"""`schedules`: recurring tasks, by cron expression or interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.output import Output, examples, with_output
from tickwheel.cli.remote import (
    iterate_pages,
    page_options,
    schedule_names,
    service_names,
    with_client,
)
from tickwheel.cli.types import DURATION, PAYLOAD

if TYPE_CHECKING:
    from tickwheel.client import Client


@click.group()
def schedules() -> None:
    """Manage recurring tasks: cron, intervals."""


@schedules.command("list", epilog=examples("tickwheel schedules list"))
@page_options
@with_output
@with_client
def list_schedules(*, client: Client, out: Output, limit: int | None, cursor: str | None) -> None:
    """List schedules, by name."""
    out.items(
        iterate_pages(client.schedules_page, limit, cursor),
        ("name", "service", "cron", "interval", "next_at", "enabled", "tz"),
    )


@schedules.command(epilog=examples("tickwheel schedules show nightly"))
@click.argument("name", shell_complete=schedule_names)
@with_output
@with_client
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
@click.option("--interval", type=DURATION, help="The time between two firings: 30s, 5m.")
@click.option("--tz", help="The time zone of --cron.  [default: UTC]")
@click.option(
    "--missed", type=click.Choice(["once", "all", "skip"]),
    help="What to do about firings missed while no node was running.  [default: once]",
)  # fmt: skip
@click.option("--enabled/--disabled", default=True, help="Whether it fires.  [default: enabled]")
@click.option("--max-attempts", type=click.IntRange(1), help="The most calls for each task.")
@click.option("--priority", type=int, help="Higher values go first, within a service.")
@click.option("--timeout", type=DURATION, help="How long one call may take.")
@with_output
@with_client
def put(
    *, client: Client, out: Output, name: str, service: str, payload: Any, **options: Any
) -> None:
    """Create or replace a schedule; PAYLOAD is JSON, @FILE or -."""
    if (options["cron"] is None) == (options["interval"] is None):
        raise click.UsageError("give either --cron or --interval")
    out.record(client.put_schedule(name, service, payload, **options))


@schedules.command(epilog=examples("tickwheel schedules delete nightly"))
@click.argument("name", shell_complete=schedule_names)
@with_output
@with_client
def delete(*, client: Client, out: Output, name: str) -> None:
    """Delete a schedule, and cancel its next firing."""
    client.delete_schedule(name)
    out.result({"deleted": name}, f"deleted {name}")
