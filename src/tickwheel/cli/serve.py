"""`serve` and `config`: both load the configuration; one runs it, the other shows it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tickwheel.cli.output import Output, console, examples, with_output
from tickwheel.cli.terminal import print_warning
from tickwheel.config import FILE, SETTINGS, SWITCH, find_mistyped, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tickwheel.config import Config, Setting

COLUMNS_FOR_HELP = 120  # a narrower terminal does not show the settings' help
F = TypeVar("F", bound="Callable[..., Any]")


def setting_options(*names: str) -> Callable[[F], F]:
    """Add --config and the flags of these settings, or of all, to a command."""
    chosen = [s for s in SETTINGS if not s.secret and (not names or s.field in names)]

    def decorate(command: F) -> F:
        for setting in reversed(chosen):
            command = _flag_of(setting)(command)
        return click.option(
            "--config", "config_file", metavar="FILE", type=click.Path(dir_okay=False),
            help=f"A TOML file with settings; by default TICKWHEEL_CONFIG, or {FILE} here.",
        )(command)  # fmt: skip

    return decorate


def load_config(flags: Mapping[str, object], file: str | None) -> tuple[Config, dict[str, str]]:
    """Warn about mistyped TICKWHEEL_ variables, then load the configuration and its sources."""
    for variable, near in find_mistyped(os.environ).items():
        print_warning(f"{variable} is not a setting: did you mean {near}?")
    return load(flags, os.environ, file)


def _flag_of(setting: Setting) -> Callable[[F], F]:
    kind, default = setting.kind, setting.format(setting.default)
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
@setting_options()
def serve(config_file: str | None, **flags: object) -> int:
    """Run the service.

    Flags override the environment, which overrides the file, which overrides the defaults. The
    server listens on loopback by default; on other addresses it requires tokens: see
    `tickwheel tokens`.

    TICKWHEEL_SECRET_KEY, in the environment only, encrypts services' secrets in the store.
    """
    config, _ = load_config(flags, config_file)
    return run_server(config)


def run_server(config: Config) -> int:
    """Run a server; a missing package is an error that names the extra."""
    with server_packages():
        from tickwheel.web.server import run  # noqa: PLC0415 - imports the whole server
    return run(config)


@contextmanager
def server_packages() -> Iterator[None]:
    """Turn an import of a missing package into an error that names the extra."""
    try:
        yield
    except ImportError as missing:
        if (missing.name or "").startswith("tickwheel"):
            raise
        raise click.ClickException(
            f"{missing}; the server needs: pip install 'tickwheel[server]'"
        ) from missing


@click.command(
    epilog=examples(
        "tickwheel dashboard --store sqlite:///tasks.db",
        "tickwheel dashboard --store postgresql://tick@db/tick --listen 127.0.0.1:7381",
        "tickwheel dashboard --store sqlite:///tasks.db --allow-target 10.0.0.0/8",
    )
)
@setting_options("store", "listen", "allow_private_targets", "allow_target")
def dashboard(config_file: str | None, **flags: object) -> int:
    """Serve a store's dashboard; run no tasks.

    It is for programs that embed the scheduler, which may keep running: this process shows and
    changes the tasks in their store. `tickwheel serve` has the same dashboard.

    With the programs' TICKWHEEL_SECRET_KEY it can pause and resume every service. It edits and
    test-calls those whose target it may call itself.
    """
    config, _ = load_config({**flags, "submit_only": True}, config_file)
    return run_server(config)


@click.command(
    epilog=examples(
        "tickwheel config",
        "TICKWHEEL_LISTEN=0.0.0.0:80 tickwheel config --json",
        "tickwheel config --config production.toml",
    )
)
@setting_options()
@with_output
def config(out: Output, config_file: str | None, **flags: object) -> None:
    """Show every setting of serve and its source.

    It takes the flags of `tickwheel serve` and shows their effect; secrets are masked. JSON has
    the values without their sources. A wide terminal also shows what each setting means, as
    `tickwheel serve --help` does everywhere.
    """
    made, origins = load_config(flags, config_file)
    if out.as_json:
        out.value({s.name: s.mask(getattr(made, s.field)) for s in SETTINGS})
    else:
        titles = ["setting", "value", "from"]
        titles += ["what it is"] if console().width >= COLUMNS_FOR_HELP else []
        out.text(titles, [row[: len(titles)] for row in _rows(made, origins)])


def _rows(made: object, origins: dict[str, str]) -> Iterable[list[object]]:
    for setting in SETTINGS:
        value = setting.format(getattr(made, setting.field))
        yield [setting.name, value, origins[setting.field], setting.help]
