"""Options of the commands that talk to a server: the server, the token, pages of a list."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tickwheel.cli.terminal import print_line, print_warning
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from click.shell_completion import CompletionItem

    from tickwheel.client import Client, Page

DEFAULT_SERVER = "http://127.0.0.1:7380"
RETRIES = 2  # few: a person is waiting, and can try again
PAGE_ITEMS = 1000
SAFE_NAME = re.compile("[A-Za-z0-9._:-]+")  # safe to complete unquoted, even from a hostile server
OPTIONS = (
    click.option(
        "--server", envvar="TICKWHEEL_SERVER", default=DEFAULT_SERVER, show_default=True,
        show_envvar=True, metavar="URL", help="The server to ask, or several, separated by commas.",
    ),
    click.option(
        "--token", envvar="TICKWHEEL_TOKEN", show_envvar=True,
        help="The access token; others can see flags, so prefer the environment.",
    ),
    click.option(
        "--namespace", envvar="TICKWHEEL_NAMESPACE", show_envvar=True,
        help="The namespace to work in, for tokens that may choose.",
    ),
)  # fmt: skip


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --server, --token and --namespace to a command, as typed."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def with_client(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --server, --token and --namespace to a command, and pass it a `client`.

    If the client itself refuses an argument, the command line is wrong: a usage error.
    """

    @functools.wraps(command)
    def wrapped(
        *args: Any, server: str, token: str | None, namespace: str | None, **options: Any
    ) -> Any:
        try:
            with open_client(server, token, namespace) as client:
                return command(*args, client=client, **options)
        except TickwheelError:
            raise
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    return server_options(wrapped)


def open_client(
    server: str | None, token: str | None, namespace: str | None, *, retries: int = RETRIES
) -> Client:
    """Return a client, and print its warnings the way of the command line."""
    from tickwheel.client import Client  # noqa: PLC0415 - not for --help

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = Client(server, token, namespace, retries=retries)
    for warning in caught:
        print_warning(str(warning.message))
    return client


def iterate_pages(
    read: Callable[..., Page[Any]], limit: int | None, cursor: str | None, **asked: Any
) -> Iterator[Any]:
    """Yield at most `limit` items of a list, page by page.

    If there are more, a line on stderr says how to continue, after the command has printed its
    list.
    """
    left = limit
    while True:
        page = read(cursor=cursor, limit=min(left or PAGE_ITEMS, PAGE_ITEMS), **asked)
        yield from page.items
        cursor = page.next_cursor
        if left is not None:
            left -= len(page.items)
        if cursor is None:
            return
        if left is not None and left <= 0:
            announce_more(click.get_current_context(), cursor)
            return


def announce_more(ctx: click.Context, cursor: str) -> None:
    """Print at the end that a list continues; not to a program that set --limit itself."""
    chosen = ctx.get_parameter_source("limit") is ParameterSource.COMMANDLINE
    if sys.stderr.isatty() or not chosen:
        line = f"there are more: --cursor {cursor}, or --all"
        ctx.call_on_close(functools.partial(print_line, line, err=True))


def page_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --limit, --all and --cursor to a command, as `limit` (None: all) and `cursor`."""

    @functools.wraps(command)
    def wrapped(*args: Any, limit: int, everything: bool, **options: Any) -> Any:
        return command(*args, limit=None if everything else limit, **options)

    for option in (
        click.option("--cursor", help="Continue where an earlier list ended."),
        click.option("--all", "everything", is_flag=True, help="No limit."),
        click.option(
            "--limit",
            type=click.IntRange(1),
            default=100,
            show_default=True,
            help="The most items to list.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def complete_names(read: Callable[[Client], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    """Return a completion of names that the server knows; without a server it is empty."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # noqa: PLC0415

        from tickwheel.client import Client  # noqa: PLC0415

        server, token, namespace = map(ctx.params.get, ("server", "token", "namespace"))
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                Client(server, token, namespace, timeout=2, retries=0) as client,
            ):
                names = [name for name in read(client) if SAFE_NAME.fullmatch(name)]
        except (TickwheelError, ValueError, OSError):
            return []
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return complete


service_names = complete_names(lambda client: [service.name for service in client.services()])
schedule_names = complete_names(lambda client: [schedule.name for schedule in client.schedules()])
