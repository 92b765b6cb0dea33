"""The root of the command line: the list of commands, and the handling of their errors.

It names the commands and imports none, so that `--help` and completion are fast.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from tickwheel.cli import exit_codes, terminal
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Sequence

JSON = "tickwheel.json"  # in a context's meta: --json was given
WRITE_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EIO)
NO_COMMAND = getattr(click.exceptions, "NoArgsIsHelpError", ())  # new in click 8.2


class Lazy(NamedTuple):
    """A command that is not imported yet: its module, its name there, and its line of help."""

    module: str
    name: str
    help: str


SECTIONS: dict[str, dict[str, Lazy]] = {
    "The service": {
        "serve": Lazy("serve", "serve", "Run the service."),
        "dashboard": Lazy("serve", "dashboard", "Serve a store's dashboard; run no tasks."),
        "config": Lazy("serve", "config", "Show every setting of serve and its source."),
        "worker": Lazy("worker", "worker", "Run the task functions of a scheduler."),
        "doctor": Lazy("doctor", "doctor", "Check the store, this host and the settings."),
        "migrate": Lazy("store", "migrate", "Migrate a store's tables to this version."),
        "tokens": Lazy("store", "tokens", "Create, list and revoke access tokens."),
    },
    "Tasks": {
        "submit": Lazy("tasks", "submit", "Submit a task."),
        "submit-many": Lazy("bulk", "submit_many", "Submit many tasks from a file or stdin."),
        "consume": Lazy("consume", "consume", "Turn the messages of a queue into tasks."),
        "show": Lazy("tasks", "show", "Show a task, live or ended."),
        "list": Lazy("tasks", "list_tasks", "List tasks, newest first."),
        "cancel": Lazy("tasks", "cancel", "Cancel tasks by id, key, service or tag."),
        "reschedule": Lazy("tasks", "reschedule", "Change a task's due time."),
        "feedback": Lazy("tasks", "feedback", "Report the outcome of an accepted task."),
        "backlog": Lazy("backlog", "backlog", "List and replay tasks that have ended."),
    },
    "Services and schedules": {
        "services": Lazy("services", "services", "Manage the services that tasks are sent to."),
        "schedules": Lazy("schedules", "schedules", "Manage recurring tasks: cron, intervals."),
    },
    "Inspection": {
        "top": Lazy("top", "top", "Watch the service: wheels, rates, lateness, services, nodes."),
        "nodes": Lazy("cluster", "nodes", "List and drain the nodes of the cluster."),
        "shards": Lazy("cluster", "shards", "List the shards and their owners."),
        "audit": Lazy("cluster", "audit", "List the audit log, newest first."),
        "bench": Lazy("bench", "bench", "Measure a running server."),
        "lab": Lazy("lab", "lab", "Watch a wheel turn, in the terminal or in a browser."),
        "completion": Lazy("completion", "completion", "Print a shell's completion script."),
    },
}  # fmt: skip
COMMANDS = {name: lazy for section in SECTIONS.values() for name, lazy in section.items()}


class Root(click.Group):
    """The group of all commands.

    - A command is imported when it is called, or for its own help.
    - A command returns its exit code, or None for 0. An exception becomes one line on stderr.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        command: click.Command = getattr(import_module(f"tickwheel.cli.{lazy.module}"), lazy.name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and args[0][:1] != "-" and not ctx.resilient_parsing:
            from difflib import get_close_matches  # noqa: PLC0415 - only on a typo

            near = [repr(name) for name in get_close_matches(args[0], COMMANDS)]
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command {args[0]!r:.50}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                rows = [(name.ljust(width), lazy.help) for name, lazy in commands.items()]
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - for completion only

        found = [
            CompletionItem(name, help=lazy.help)
            for name, lazy in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TickwheelError as error:
            terminal.print_error(error, as_json=bool(ctx.meta.get(JSON)))
            ctx.exit(exit_codes.exit_code(error))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run and exit; `standalone_mode` is click's parameter and has no effect."""
        if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding must not stop a command
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except NO_COMMAND as error:
            terminal.print_line(error.format_message(), err=True)
            code = exit_codes.USAGE
        except click.NoSuchOption as error:
            terminal.print_message(f"{error.format_message()}{unknown_option_hint(error)}")
            code = exit_codes.USAGE
        except click.UsageError as error:
            where = f" (try '{error.ctx.command_path} --help')" if error.ctx else ""
            terminal.print_message(f"{error.format_message()}{where}")
            code = exit_codes.USAGE
        except click.ClickException as error:
            terminal.print_message(error.format_message())
            code = error.exit_code
        except click.Abort:
            code = exit_codes.INTERRUPTED
        except OSError as error:
            if error.errno not in WRITE_ERRORS or error.filename is not None:
                raise
            terminal.print_message(f"cannot write: {os.strerror(error.errno)}")
            # Otherwise Python flushes stdout again at exit, and fails again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = exit_codes.OTHER
        sys.exit(code if isinstance(code, int) else exit_codes.OK)


def unknown_option_hint(error: click.NoSuchOption) -> str:
    """Return a hint for an unknown option: most belong after the command."""
    if error.ctx is None:
        return ""
    if isinstance(error.ctx.command, Root):
        return f" Options go after the command: tickwheel COMMAND {error.option_name} …"
    if error.option_name == "--store" and any(
        one.name == "server" for one in error.ctx.command.params
    ):
        return (
            " This command asks a server: start 'tickwheel dashboard --store URL', and pass its"
            " address with --server"
        )
    return f" (try '{error.ctx.command_path} --help')"


def show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        from tickwheel import __version__  # noqa: PLC0415 - only for --version

        terminal.print_line(f"tickwheel {__version__}")
        ctx.exit()


@click.group(
    cls=Root,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Each command has its own --help, with examples.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version,
    help="Show the version and exit.",
)  # fmt: skip
def root() -> None:
    """Timers and delayed tasks on hierarchical timing wheels."""
