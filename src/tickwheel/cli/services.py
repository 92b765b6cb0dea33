"""`services`: whom to call when a task is due, and how."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.exits import say
from tickwheel.cli.output import Output, examples, plain, printing
from tickwheel.cli.remote import remote, service_names
from tickwheel.cli.types import DURATION, OBJECT, SECRET
from tickwheel.config import MASK
from tickwheel.errors import ServiceChanged, UnknownService

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.client import Client
    from tickwheel.client.values import Service

TURNS = 8  # of a change that others were quicker than each time
NESTED = ("backoff", "breaker")  # --backoff-first is backoff's "first"
SHOWN = ("name", "version", "updated_at", "problem")  # what `show` has besides the configuration


@click.group()
def services() -> None:
    """Say whom to call when a task is due, and how."""


@services.command(
    "list", epilog=examples("tickwheel services list", "tickwheel services list --json")
)
@printing
@remote
def list_services(*, client: Client, out: Output) -> None:
    """List all services, by name."""
    out.items(
        client.services(),
        ("name", "enabled", "endpoint", "timeout", "concurrency", "rate", "problem"),
    )


@services.command(epilog=examples("tickwheel services show close-order"))
@click.argument("name", shell_complete=service_names)
@printing
@remote
def show(*, client: Client, out: Output, name: str) -> None:
    """Show a service; its secret and its headers' values are masked."""
    out.record(client.get_service(name))


@services.command(
    epilog=examples(
        "tickwheel services put close-order --endpoint https://shop.example/hooks/close",
        "tickwheel services put close-order --rate 50 --max-attempts 8",
        "tickwheel services put close-order --generate-secret --keep-old",
        "tickwheel services show close-order --json > service.json",
        "tickwheel services put close-order --from @service.json --replace",
    )
)
@click.argument("name", shell_complete=service_names)
@click.option("--endpoint", metavar="URL", help="Where to POST to.")
@click.option("--protocol", help="How to call.  [default: http]")
@click.option("--timeout", type=DURATION, help="How long one call may take.")
@click.option("--max-attempts", type=click.IntRange(1), help="Calls in all before a task fails.")
@click.option("--concurrency", type=click.IntRange(1), help="Calls at once, on all nodes together.")
@click.option("--rate", type=float, help="Calls per second, on all nodes together.")
@click.option("--feedback-timeout", type=DURATION, help="How long feedback after a 202 may take.")
@click.option("--backoff-first", type=DURATION, help="Wait so long after the first failure.")
@click.option("--backoff-factor", type=float, help="Then so many times longer after each.")
@click.option("--backoff-max", type=DURATION, help="But not longer than this.")
@click.option(
    "--backoff-jitter", type=float, help="Up to this part of it, 0 to 1, is left to chance."
)
@click.option("--breaker-failures", type=click.IntRange(1), help="Pause after so many in a row.")
@click.option("--breaker-pause", type=DURATION, help="For how long, at first.")
@click.option("--breaker-max-pause", type=DURATION, help="And at most.")
@click.option("--breaker-probes", type=click.IntRange(1), help="Calls at once when trying again.")
@click.option(
    "--header", "headers", multiple=True, metavar="'NAME: VALUE'",
    help="A header to send; may be given several times. These replace the earlier ones.",
)  # fmt: skip
@click.option("--no-headers", is_flag=True, help="Send none of the earlier headers any more.")
@click.option("--secret", type=SECRET, metavar="@FILE|-", help="The secret that signs calls.")
@click.option("--generate-secret", is_flag=True, help="Make a new secret, and print it once.")
@click.option("--keep-old", is_flag=True, help="Sign with the earlier secrets, too: rotation.")
@click.option("--no-secret", is_flag=True, help="Sign calls no more.")
@click.option("--enabled/--disabled", default=None, help="Whether its tasks are called at all.")
@click.option(
    "--from", "document", type=OBJECT, metavar="JSON|@FILE|-",
    help="Fields as JSON, such as `services show --json` prints them.",
)  # fmt: skip
@click.option(
    "--replace", is_flag=True,
    help="What is not given gets its default again; the secret and the headers stay.",
)  # fmt: skip
@printing
@remote
def put(
    *,
    client: Client,
    out: Output,
    name: str,
    headers: tuple[str, ...],
    no_headers: bool,
    secret: str | None,
    generate_secret: bool,
    keep_old: bool,
    no_secret: bool,
    document: dict[str, Any] | None,
    replace: bool,
    **flags: Any,
) -> None:
    """Make a service, or change one: what is given is changed, the rest stays as it is.

    What `services show --json` prints has asterisks for secrets, which keep those that are stored:
    a copy under another name needs --secret, --generate-secret or --no-secret. What is stored goes
    to no other origin: an --endpoint on another one needs the secret and the headers given again,
    or --no-secret and --no-headers.
    """
    check_secrets(secret, generate=generate_secret, keep_old=keep_old, none=no_secret)
    if headers and no_headers:
        raise click.UsageError("give --header or --no-headers, not both")
    made = new_secret() if generate_secret else None

    def configured(before: dict[str, Any]) -> dict[str, Any]:
        config = merged({} if replace else before, part_of(document or {}) | fields_of(flags))
        if headers or no_headers:
            config["headers"] = dict(map(header_of, headers))
        if no_secret:
            config["secret"] = None
        if given := secret or made:
            config["secret"] = [given, MASK] if keep_old and before.get("secret") else given
        if not config.get("endpoint"):
            raise click.UsageError("a new service needs --endpoint; so does one with --replace")
        return config

    if replace and not keep_old:
        service = client.put_service(name, **configured({}))
    else:
        service = changed(client, name, configured)
    shown = plain(service) | ({"secret": made} if made else {})
    if out.as_json:
        out.value(shown)
        return
    out.record(shown)
    if made:
        say("\nKeep the secret now: it will not be shown again.")


@services.command(epilog=examples("tickwheel services delete close-order"))
@click.argument("name", shell_complete=service_names)
@printing
@remote
def delete(*, client: Client, out: Output, name: str) -> None:
    """Delete a service; with live tasks it is refused, with exit code 4."""
    client.delete_service(name)
    out.said({"deleted": name}, f"deleted {name}")


@services.command(epilog=examples("tickwheel services enable close-order"))
@click.argument("name", shell_complete=service_names)
@printing
@remote
def enable(*, client: Client, out: Output, name: str) -> None:
    """Call a service again that was disabled."""
    switch(client, out, name, enabled=True)


@services.command(epilog=examples("tickwheel services disable close-order"))
@click.argument("name", shell_complete=service_names)
@printing
@remote
def disable(*, client: Client, out: Output, name: str) -> None:
    """Call a service no more: its tasks wait until it is enabled."""
    switch(client, out, name, enabled=False)


def switch(client: Client, out: Output, name: str, *, enabled: bool) -> None:
    """Enable or disable a service and leave the rest of it as it is."""
    service = changed(client, name, lambda before: before | {"enabled": enabled}, new=False)
    out.said(service, f"{name} is {'enabled' if service.enabled else 'disabled'}")


def changed(
    client: Client,
    name: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    new: bool = True,
) -> Service:
    """Read a service and put it as `change` makes it of what was read, empty when it is `new`.

    When another has changed it meanwhile, it is read again: what that one did stays.
    """
    for turn in count(1):
        before, version = stored(client, name, new=new)
        try:
            return client.put_service(name, version=version, **change(before))
        except ServiceChanged:
            if turn == TURNS:
                raise
    raise AssertionError("it has returned, or raised")


def stored(client: Client, name: str, *, new: bool) -> tuple[dict[str, Any], int]:
    """Return a service's configuration as it may be put back, and its version; 0 of a new one."""
    try:
        service = client.get_service(name)
    except UnknownService:
        if not new:
            raise
        return {}, 0
    return service.config, service.version


def part_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return what of a service as it is shown may be put: a file of one makes a copy."""
    return {name: value for name, value in document.items() if name not in SHOWN}


def fields_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that flags give: `backoff_first` is in "backoff"."""
    fields: dict[str, Any] = {}
    for flag, value in flags.items():
        if value is None:
            continue
        outer, _, inner = flag.partition("_")
        if outer in NESTED:
            fields.setdefault(outer, {})[inner] = value
        else:
            fields[flag] = value
    return fields


def merged(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with what is given laid over it."""
    config = before | given
    for name in NESTED:
        if isinstance(before.get(name), dict) and isinstance(given.get(name), dict):
            config[name] = before[name] | given[name]
    return config


def check_secrets(secret: str | None, *, generate: bool, keep_old: bool, none: bool) -> None:
    """Raise for what cannot be said of secrets together."""
    if (secret is not None) + generate + none > 1:
        raise click.UsageError("give one of --secret, --generate-secret and --no-secret")
    if keep_old and secret is None and not generate:
        raise click.UsageError("--keep-old goes with --secret or --generate-secret")


def header_of(text: str) -> tuple[str, str]:
    """Return the name and the value of a header as typed."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise click.BadParameter("'NAME: VALUE' is wanted", param_hint="--header")
    return name.strip(), value.strip()


def new_secret() -> str:
    """Return a new secret for signatures."""
    from tickwheel.values import signature  # noqa: PLC0415 - not for --help

    return signature.new_secret()
