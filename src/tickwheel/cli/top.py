"""`top`: the service in the terminal, renewed each second: a look is fetched, a frame is drawn."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli import exits
from tickwheel.cli.frame import Look, drawn
from tickwheel.cli.output import Output, console, examples, plain, printing
from tickwheel.cli.remote import remote
from tickwheel.clock import SystemClock
from tickwheel.errors import TickwheelError
from tickwheel.keyboard import keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.client import Client


@click.command(
    epilog=examples(
        "tickwheel top", "tickwheel top --interval 5", "tickwheel top --once --json | jq .rates"
    )
)
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True,
    help="Seconds between two looks.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print one frame and stop; always so in a pipe.")
@printing
@remote
def top(*, client: Client, out: Output, interval: float, once: bool) -> int:
    """Watch the service: wheels, rates, lateness, services, nodes.

    Rates and lateness are those between two looks. The figures are of the node that answers; q
    leaves.
    """
    now = SystemClock().time
    before = looked(client, now)
    if once or out.as_json or not sys.stdout.isatty():
        time.sleep(min(interval, 1.0))
        after = looked(client, now)
        if out.as_json:
            out.value(after.document(before))
        else:
            console().print(drawn(client.server, before, after))
        return exits.OK
    with keys() as pressed:
        watch(client, before, interval, now, pressed)
    return exits.OK


def looked(client: Client, now: Callable[[], float]) -> Look:
    """Ask the server for all that a frame shows."""
    stats, wheel = client.stats(), client.wheel()
    services: list[dict[str, Any]] = plain(client.services())
    nodes: list[dict[str, Any]] = plain(client.nodes())
    return Look(now(), stats, wheel, services, nodes)


def watch(
    client: Client,
    before: Look,
    interval: float,
    now: Callable[[], float],
    pressed: Callable[[float], bool],
) -> None:
    """Draw frames until somebody leaves; a server that is away is waited for."""
    from rich.live import Live  # noqa: PLC0415 - only on a terminal

    screen, after, trouble = console(), before, ""
    first = drawn(client.server, before, before)
    with Live(first, console=screen, screen=True, auto_refresh=False) as live:
        while not pressed(interval):
            try:
                before, after = after, looked(client, now)
                trouble = ""
            except TickwheelError as error:
                if exits.exit_code(error) not in (exits.UNAVAILABLE, exits.RATE_LIMITED):
                    raise
                before, trouble = after, str(error)
            live.update(drawn(client.server, before, after, trouble), refresh=True)
