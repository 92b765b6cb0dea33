"""`lab`: watch a wheel turn, as with `python -m tickwheel.lab`, which needs no other package."""

from __future__ import annotations

import click

from tickwheel.cli.output import examples
from tickwheel.cli.terminal import print_line
from tickwheel.cli.types import DURATION


@click.command(
    epilog=examples(
        "tickwheel lab",
        "tickwheel lab --size 8 --rate 100",
        "tickwheel lab --once --seed 7",
        "tickwheel lab --web",
    )
)
@click.option("--seconds", type=DURATION, help="Stop after this time.")
@click.option("--frames", type=click.IntRange(1), help="Stop after this many frames.")
@click.option("--once", is_flag=True, help="Draw one frame and stop.")
@click.option(
    "--size", type=click.IntRange(2, 64), default=16, show_default=True, help="Slots per level."
)
@click.option(
    "--rate", type=click.FloatRange(0.01, 1000), default=20.0, show_default=True,
    help="Ticks per second.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random timers.")
@click.option(
    "--web", is_flag=True,
    help="Serve the lab as a web page, with scenes to play; it needs tickwheel[server].",
)  # fmt: skip
@click.option(
    "--listen", default="127.0.0.1:7381", show_default=True, help="HOST:PORT of the web page."
)
def lab(
    *,
    seconds: float | None,
    frames: int | None,
    once: bool,
    size: int,
    rate: float,
    seed: int,
    web: bool,
    listen: str,
) -> int:
    """Watch a wheel turn, in the terminal or in a browser.

    It needs no server. Press q to leave. If the output is not a terminal, it writes a plain frame
    each second.
    """
    if web:
        return serve_page(listen)
    from tickwheel.lab import FOREVER, watch  # noqa: PLC0415 - not for --help

    return watch(
        size=size,
        seed=seed,
        rate=rate,
        frames=1 if once else frames or FOREVER,
        seconds=FOREVER if seconds is None else seconds,
    )


def serve_page(listen: str) -> int:
    """Serve the lab until Ctrl-C."""
    from tickwheel.cli.serve import server_packages  # noqa: PLC0415
    from tickwheel.config import LISTEN, Listen  # noqa: PLC0415
    from tickwheel.web.metrics_listener import bind_listener  # noqa: PLC0415

    with server_packages():
        import uvicorn  # noqa: PLC0415

        from tickwheel.web.lab import LabApp  # noqa: PLC0415

    try:
        address = LISTEN.parse(listen)
    except ValueError:
        message = f"must be {LISTEN.expected}, got {listen!r:.100}"
        raise click.BadParameter(message, param_hint="--listen") from None
    try:
        listener = bind_listener(address)
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from None
    here = Listen(address.host, listener.getsockname()[1])
    print_line(f"the lab is at http://{here}/lab (Ctrl-C to stop)", err=True)
    uvicorn.Server(uvicorn.Config(LabApp(), log_level="warning")).run(sockets=[listener])
    return 0
