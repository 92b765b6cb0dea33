"""The root of the command line: which commands there are, and what becomes of their errors.

It names the commands and imports none, so that `--help` and completion are quick.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from tickwheel.cli import exits
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Sequence

JSON = "tickwheel.json"  # in a context's meta: --json was given
UNWRITTEN = (errno.ENOSPC, errno.EFBIG, errno.EIO)
NO_COMMAND = getattr(click.exceptions, "NoArgsIsHelpError", ())  # click 8.1 has none


class Lazy(NamedTuple):
    """A command that is not loaded yet: where it is, and the line that tells of it."""

    module: str
    name: str
    line: str


SECTIONS: dict[str, dict[str, Lazy]] = {
    "The service": {
        "serve": Lazy("serve", "serve", "Run the service."),
        "config": Lazy("serve", "config", "Show every setting of serve and where it is from."),
        "migrate": Lazy("stored", "migrate", "Bring a store's tables to this version's form."),
        "tokens": Lazy("stored", "tokens", "Make, list and revoke access tokens."),
    },
    "Tasks": {
        "submit": Lazy("tasks", "submit", "Submit a task."),
        "submit-many": Lazy("bulk", "submit_many", "Submit many tasks from a file or stdin."),
        "show": Lazy("tasks", "show", "Show a task, live or ended."),
        "list": Lazy("tasks", "list_tasks", "List tasks, newest first."),
        "cancel": Lazy("tasks", "cancel", "Cancel tasks by id, or all with a key or of a service."),
        "reschedule": Lazy("tasks", "reschedule", "Give a task another due time."),
        "feedback": Lazy("tasks", "feedback", "Say how an accepted task ended, or goes on."),
        "backlog": Lazy("backlog", "backlog", "List and replay tasks that have ended."),
    },
    "Whom and when to call": {
        "services": Lazy("services", "services", "Say whom to call when a task is due, and how."),
        "schedules": Lazy("schedules", "schedules", "Submit tasks by the clock: cron, intervals."),
    },
    "A look inside": {
        "top": Lazy("top", "top", "Watch the service: wheels, rates, lateness, services, nodes."),
        "nodes": Lazy("cluster", "nodes", "List the nodes of the cluster."),
        "shards": Lazy("cluster", "shards", "List the shards and who owns them."),
        "audit": Lazy("cluster", "audit", "List who changed what, newest first."),
        "bench": Lazy("bench", "bench", "Measure a running server."),
        "lab": Lazy("lab", "lab", "Watch a wheel turn in the terminal."),
        "completion": Lazy("completion", "completion", "Print a shell's completion script."),
    },
}  # fmt: skip
COMMANDS = {name: lazy for section in SECTIONS.values() for name, lazy in section.items()}


class Root(click.Group):
    """The group of all commands.

    - A command is imported when it is called or asked for its own help.
    - A command returns its exit code, or None for 0; what it raises is told in one line.
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
            from difflib import get_close_matches  # noqa: PLC0415 - for mistakes only

            near = [repr(name) for name in get_close_matches(args[0], COMMANDS)]
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command {args[0]!r:.50}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                rows = [(name.ljust(width), lazy.line) for name, lazy in commands.items()]
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - for completion only

        found = [
            CompletionItem(name, help=lazy.line)
            for name, lazy in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TickwheelError as error:
            exits.tell(error, as_json=bool(ctx.meta.get(JSON)))
            ctx.exit(exits.exit_code(error))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run, and exit: there is no other mode, the parameter is click's."""
        if isinstance(sys.stdout, io.TextIOWrapper):  # what it cannot show is no reason to stop
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except NO_COMMAND as error:
            exits.say(error.format_message(), err=True)
            code = exits.USAGE
        except click.NoSuchOption as error:
            exits.tell_line(f"{error.format_message()}{hint_on(error)}")
            code = exits.USAGE
        except click.UsageError as error:
            where = f" (try '{error.ctx.command_path} --help')" if error.ctx else ""
            exits.tell_line(f"{error.format_message()}{where}")
            code = exits.USAGE
        except click.ClickException as error:
            exits.tell_line(error.format_message())
            code = error.exit_code
        except click.Abort:
            code = exits.INTERRUPTED
        except OSError as error:
            if error.errno not in UNWRITTEN or error.filename is not None:
                raise
            exits.tell_line(f"cannot write: {os.strerror(error.errno)}")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries once more, at its end
            code = exits.OTHER
        sys.exit(code if isinstance(code, int) else exits.OK)


def hint_on(error: click.NoSuchOption) -> str:
    """Return what helps with an unknown option: most belong to a command, and go behind it."""
    if error.ctx is None:
        return ""
    if isinstance(error.ctx.command, Root):
        return f" Options go after the command: tickwheel COMMAND {error.option_name} …"
    return f" (try '{error.ctx.command_path} --help')"


def show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        from tickwheel import __version__  # noqa: PLC0415 - a callback of an option

        exits.say(f"tickwheel {__version__}")
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
