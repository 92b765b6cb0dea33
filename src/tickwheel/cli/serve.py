"""`serve` and `config`: both build the configuration; one runs it, the other shows it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tickwheel.cli.exits import tell_line
from tickwheel.cli.output import Output, console, examples, printing
from tickwheel.config import FILE, SETTINGS, SWITCH, load, mistyped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tickwheel.config import Config, Setting

ROOMY = 120  # columns in which a sentence has room beside three others
F = TypeVar("F", bound="Callable[..., Any]")


def settings(*names: str) -> Callable[[F], F]:
    """Give a command the flags of these settings, or of all, and --config."""
    chosen = [s for s in SETTINGS if not s.secret and (not names or s.field in names)]

    def decorate(command: F) -> F:
        for setting in reversed(chosen):
            command = _flag_of(setting)(command)
        return click.option(
            "--config", "config_file", metavar="FILE", type=click.Path(dir_okay=False),
            help=f"A TOML file with settings; by default TICKWHEEL_CONFIG, or {FILE} here.",
        )(command)  # fmt: skip

    return decorate


def loaded(flags: Mapping[str, object], file: str | None) -> tuple[Config, dict[str, str]]:
    """Return the configuration and where it is from; of a variable nobody reads it is told."""
    for variable, near in mistyped(os.environ).items():
        line = f"{variable} is no setting: did you mean {near}?"
        tell_line(line, word="warning:", colour="yellow")
    return load(flags, os.environ, file)


def _flag_of(setting: Setting) -> Callable[[F], F]:
    kind, default = setting.kind, setting.spelled(setting.default)
    known = f"  [default: {default}]" if default and kind is not SWITCH else ""
    about = f"{setting.help}{known}  [{setting.variable}]"
    names = (str(setting.flag), setting.field)
    if kind is SWITCH:
        return click.option(*names, is_flag=True, default=None, help=about)
    return click.option(*names, metavar=kind.metavar, multiple=kind.many, help=about)


@click.command(
    epilog=examples(
        "tickwheel serve",
        "tickwheel serve --store sqlite:////var/lib/tickwheel/tasks.db --allow-private-targets",
        "tickwheel serve --store postgresql://tick@db/tick --listen 0.0.0.0:7380 --workers 4",
    )
)
@settings()
def serve(config_file: str | None, **flags: object) -> int:
    """Run the service.

    Flags count before the environment, that before the file, that before the defaults. It listens
    on loopback unless told otherwise; elsewhere it wants tokens: see `tickwheel tokens`.

    TICKWHEEL_SECRET_KEY, in the environment only, seals services' secrets in the store.
    """
    config, _ = loaded(flags, config_file)
    try:
        from tickwheel.web.server import run  # noqa: PLC0415 - it brings the whole server
    except ImportError as missing:
        if (missing.name or "").startswith("tickwheel"):
            raise
        raise click.ClickException(
            f"{missing}; for the server: pip install 'tickwheel[server]'"
        ) from missing
    return run(config)


@click.command(
    epilog=examples(
        "tickwheel config",
        "TICKWHEEL_LISTEN=0.0.0.0:80 tickwheel config --json",
        "tickwheel config --config production.toml",
    )
)
@settings()
@printing
def config(out: Output, config_file: str | None, **flags: object) -> None:
    """Show every setting of serve and where it is from.

    It takes the flags of `tickwheel serve`, too, and says what would come of them; secrets are
    masked. As JSON it has the values alone, as a file may have them. What each setting is, a wide
    terminal shows here, and `tickwheel serve --help` everywhere.
    """
    made, origins = loaded(flags, config_file)
    if out.as_json:
        out.value({s.name: s.shown(getattr(made, s.field)) for s in SETTINGS})
    else:
        told = ["setting", "value", "from"] + (["what it is"] if console().width >= ROOMY else [])
        out.text(told, [row[: len(told)] for row in _rows(made, origins)])


def _rows(made: object, origins: dict[str, str]) -> Iterable[list[object]]:
    for setting in SETTINGS:
        value = setting.spelled(getattr(made, setting.field))
        yield [setting.name, value, origins[setting.field], setting.help]
