"""`lab`: a wheel to watch, as `python -m tickwheel.lab`."""

from __future__ import annotations

import click


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lab(arguments: tuple[str, ...]) -> int:
    """Watch a wheel turn in the terminal."""
    from tickwheel.lab import main  # noqa: PLC0415

    return main(arguments)
