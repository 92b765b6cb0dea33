"""What the commands that speak to a server have in common: which server, and as whom."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tickwheel.cli.exits import say, tell_line
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from click.shell_completion import CompletionItem

    from tickwheel.client import Client, Page

SERVER = "http://127.0.0.1:7380"
RETRIES = 2  # somebody waits: the next try is theirs
PAGE = 1000
PLAIN_NAME = re.compile("[A-Za-z0-9._:-]+")  # what a shell takes as it is, whatever the server says
OPTIONS = (
    click.option(
        "--server", envvar="TICKWHEEL_SERVER", default=SERVER, show_default=True,
        show_envvar=True, metavar="URL", help="The server to ask.",
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


def reaching(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --server, --token and --namespace, as they were typed."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def remote(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --server, --token and --namespace, and the client they make as `client`.

    What the client refuses before it asks the server is a mistake in the command line.
    """

    @functools.wraps(command)
    def wrapped(
        *args: Any, server: str, token: str | None, namespace: str | None, **options: Any
    ) -> Any:
        try:
            with connected(server, token, namespace) as client:
                return command(*args, client=client, **options)
        except TickwheelError:
            raise
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    return reaching(wrapped)


def connected(
    server: str | None, token: str | None, namespace: str | None, *, retries: int = RETRIES
) -> Client:
    """Return a client; its warnings are told as the command line tells things."""
    from tickwheel.client import Client  # noqa: PLC0415 - not for --help

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = Client(server, token, namespace, retries=retries)
    for warning in caught:
        tell_line(str(warning.message), word="warning:", colour="yellow")
    return client


def paged(
    read: Callable[..., Page[Any]], limit: int | None, cursor: str | None, **asked: Any
) -> Iterator[Any]:
    """Yield the items of a list, page by page, `limit` of them at most.

    When there are more, it is said on stderr how to go on, once the command has printed its list:
    to people, and to who has set no limit.
    """
    left = limit
    while True:
        page = read(cursor=cursor, limit=min(left or PAGE, PAGE), **asked)
        yield from page.items
        cursor = page.next_cursor
        if left is not None:
            left -= len(page.items)
        if cursor is None:
            return
        if left is not None and left <= 0:
            tell_of_more(click.get_current_context(), cursor)
            return


def tell_of_more(ctx: click.Context, cursor: str) -> None:
    """Say at the end that a list goes on; a program that has set the limit itself knows."""
    chosen = ctx.get_parameter_source("limit") is ParameterSource.COMMANDLINE
    if sys.stderr.isatty() or not chosen:
        line = f"there are more: --cursor {cursor}, or --all"
        ctx.call_on_close(functools.partial(say, line, err=True))


def limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --limit, --all and --cursor, as `limit` (None: all) and `cursor`."""

    @functools.wraps(command)
    def wrapped(*args: Any, limit: int, everything: bool, **options: Any) -> Any:
        return command(*args, limit=None if everything else limit, **options)

    for option in (
        click.option("--cursor", help="Go on where an earlier list ended."),
        click.option("--all", "everything", is_flag=True, help="No limit."),
        click.option(
            "--limit",
            type=click.IntRange(1),
            default=100,
            show_default=True,
            help="At most so many.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def completing(read: Callable[[Client], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    """Return a completion of names that the server knows; silent when there is no server."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # noqa: PLC0415

        from tickwheel.client import Client  # noqa: PLC0415

        server, token, namespace = map(ctx.params.get, ("server", "token", "namespace"))
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                Client(server, token, namespace, timeout=2, retries=0) as client,
            ):
                names = [name for name in read(client) if PLAIN_NAME.fullmatch(name)]
        except (TickwheelError, ValueError, OSError):
            return []
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return complete


service_names = completing(lambda client: [service.name for service in client.services()])
schedule_names = completing(lambda client: [schedule.name for schedule in client.schedules()])
