"""`top`: watch the service in the terminal; each second a snapshot is fetched and drawn."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli import exit_codes
from tickwheel.cli.output import Output, console, examples, to_plain, with_output
from tickwheel.cli.remote import with_client
from tickwheel.cli.top_frame import Snapshot, draw_frame
from tickwheel.clock import SystemClock
from tickwheel.config import without_password
from tickwheel.errors import TickwheelError
from tickwheel.keyboard import quit_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.client import Client

TEMPORARY = (exit_codes.UNAVAILABLE, exit_codes.RATE_LIMITED)


@click.command(
    epilog=examples(
        "tickwheel top",
        "tickwheel top --cluster --interval 5",
        "tickwheel top --once --json | jq .rates",
        "tickwheel top --store postgresql://tick@db/tick",
    )
)
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True,
    help="Seconds between two refreshes.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print one frame and stop; the default in a pipe.")
@click.option(
    "--cluster", is_flag=True, help="Show all nodes together, not only the node that answers."
)
@click.option(
    "--store", metavar="URL",
    help="Look into this store, without a server: for programs that embed the scheduler.",
)  # fmt: skip
@click.option(
    "--coordinator", metavar="NAME",
    help="With --store: where its nodes are registered, if that is zookeeper://HOST:PORT/PATH.",
)  # fmt: skip
@with_output
@with_client
def top(
    *,
    client: Client,
    out: Output,
    interval: float,
    once: bool,
    cluster: bool,
    store: str | None,
    coordinator: str | None,
) -> int:
    """Watch the service: wheels, rates, lateness, services, nodes.

    Rates and lateness are those since the last refresh. The figures are those of the node that
    answers, or with --cluster those of all nodes. With --store they are the store's own: the tasks
    due in the next minute, hour and day, and no rates. Press q to leave.
    """
    now = SystemClock().time
    once = once or out.as_json or not sys.stdout.isatty()
    if store is None:
        if coordinator is not None:
            raise click.UsageError("--coordinator needs --store")
        show(
            out, client.server, partial(take_snapshot, client, now, cluster=cluster), interval, once
        )
        return exit_codes.OK
    from tickwheel.cli.top_store import store_snapshots  # noqa: PLC0415 - imports the stores

    with store_snapshots(store, coordinator, now) as snapshot:
        show(out, without_password(store), snapshot, interval, once)
    return exit_codes.OK


def show(
    out: Output, title: str, snapshot: Callable[[], Snapshot], interval: float, once: bool
) -> None:
    """Print one frame, or draw frames until the user leaves."""
    before = snapshot()
    if not once:
        with quit_keys() as pressed:
            watch(title, snapshot, before, interval, pressed)
        return
    time.sleep(min(interval, 1.0))
    after = snapshot()
    if out.as_json:
        out.value(after.document(before))
    else:
        console().print(draw_frame(title, before, after))


def take_snapshot(client: Client, now: Callable[[], float], *, cluster: bool) -> Snapshot:
    """Ask the server for everything that a frame shows."""
    scope = {"cluster": True} if cluster else {}
    stats, wheel = client.stats(**scope), client.wheel(**scope)
    services: list[dict[str, Any]] = to_plain(client.services())
    nodes: list[dict[str, Any]] = to_plain(client.nodes())
    return Snapshot(now(), stats, wheel, services, nodes)


def watch(
    server: str,
    snapshot: Callable[[], Snapshot],
    before: Snapshot,
    interval: float,
    pressed: Callable[[float], bool],
) -> None:
    """Draw frames until the user leaves; an unreachable server is asked again."""
    from rich.live import Live  # noqa: PLC0415 - only on a terminal

    screen, after, trouble = console(), before, ""
    first = draw_frame(server, before, before)
    with Live(first, console=screen, screen=True, auto_refresh=False) as live:
        while not pressed(interval):
            try:
                before, after = after, snapshot()
                trouble = ""
            except TickwheelError as error:
                if exit_codes.exit_code(error) not in TEMPORARY:
                    raise
                before, trouble = after, str(error)
            live.update(draw_frame(server, before, after, trouble), refresh=True)
