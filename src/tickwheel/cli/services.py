"""`services`: the endpoints that due tasks are sent to, and how they are called."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.output import Output, examples, to_plain, with_output
from tickwheel.cli.remote import service_names, with_client
from tickwheel.cli.terminal import print_line
from tickwheel.cli.types import DURATION, OBJECT, SECRET
from tickwheel.client.errors import ApiError
from tickwheel.config import MASK
from tickwheel.errors import ServiceChanged, UnknownService
from tickwheel.values.service import CLOUDEVENTS, CONFIRMED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.client import Client
    from tickwheel.client.values import Service

MAX_UPDATES = 8  # tries, if others change the service at the same time
NESTED = ("backoff", "breaker")  # --backoff-first is backoff's "first"
GROWTH = {"first", "factor", "max"}  # of a backoff without a list of delays
SHOWN_ONLY = ("name", "version", "updated_at", "problem")  # shown, but not configuration


@click.group()
def services() -> None:
    """Manage the services that tasks are sent to."""


@services.command(
    "list", epilog=examples("tickwheel services list", "tickwheel services list --json")
)
@with_output
@with_client
def list_services(*, client: Client, out: Output) -> None:
    """List all services, by name."""
    out.items(
        client.services(),
        ("name", "enabled", "endpoint", "timeout", "concurrency", "rate", "problem"),
    )


@services.command(epilog=examples("tickwheel services show close-order"))
@click.argument("name", shell_complete=service_names)
@with_output
@with_client
def show(*, client: Client, out: Output, name: str) -> None:
    """Show a service; its secret and its headers' values are masked."""
    out.record(client.get_service(name))


@services.command(
    epilog=examples(
        "tickwheel services put close-order --endpoint https://shop.example/hooks/close",
        "tickwheel services put ship --protocol rabbitmq --endpoint"
        " 'amqp://user:password@mq.example/shop?exchange=orders&routing_key=ship'",
        "tickwheel services put close-order --rate 50 --max-attempts 8",
        "tickwheel services put close-order --generate-secret --keep-old",
        "tickwheel services show close-order --json > service.json",
        "tickwheel services put close-order --from @service.json --replace",
    )
)
@click.argument("name", shell_complete=service_names)
@click.option(
    "--endpoint", metavar="URL", help="The URL to POST to, grpc://HOST:PORT, or that of a broker."
)
@click.option(
    "--protocol",
    help="The protocol of calls: http, grpc, rabbitmq, redis, kafka, nats, celery, or that of a"
    " channel of your own.  [default: http]",
)
@click.option("--timeout", type=DURATION, help="The longest time for one call.")
@click.option("--max-attempts", type=click.IntRange(1), help="The most calls before a task fails.")
@click.option("--concurrency", type=click.IntRange(1), help="Calls at once, on all nodes together.")
@click.option("--rate", type=float, help="Calls per second, on all nodes together.")
@click.option(
    "--feedback-timeout", type=DURATION, help="The longest wait for feedback after a 202."
)
@click.option(
    "--confirmed", type=click.Choice(CONFIRMED),
    help="What the broker's confirm means for the task: finished, or running until feedback.",
)  # fmt: skip
@click.option("--cloudevents", type=click.Choice(CLOUDEVENTS), help="Send messages as CloudEvents.")
@click.option("--backoff-first", type=DURATION, help="The delay after the first failure.")
@click.option("--backoff-factor", type=float, help="The factor by which each delay grows.")
@click.option("--backoff-max", type=DURATION, help="The longest delay.")
@click.option("--backoff-jitter", type=float, help="The part of the delay that is random, 0 to 1.")
@click.option(
    "--breaker-failures", type=click.IntRange(1),
    help="Calls in a row without an answer, or with a 5xx, before a pause.",
)  # fmt: skip
@click.option("--breaker-pause", type=DURATION, help="The first pause.")
@click.option("--breaker-max-pause", type=DURATION, help="The longest pause.")
@click.option(
    "--breaker-probes",
    type=click.IntRange(1),
    help="Calls at once after a pause, to test the service.",
)
@click.option(
    "--header", "headers", multiple=True, metavar="'NAME: VALUE'",
    help="A header to send; may be given several times. Replaces all stored headers.",
)  # fmt: skip
@click.option("--no-headers", is_flag=True, help="Remove all stored headers.")
@click.option("--secret", type=SECRET, metavar="@FILE|-", help="The secret that signs calls.")
@click.option("--generate-secret", is_flag=True, help="Generate a secret, and print it once.")
@click.option("--keep-old", is_flag=True, help="Also sign with the earlier secrets: rotation.")
@click.option("--no-secret", is_flag=True, help="Stop signing calls.")
@click.option("--enabled/--disabled", default=None, help="Whether its tasks are sent.")
@click.option(
    "--from", "document", type=OBJECT, metavar="JSON|@FILE|-",
    help="Fields as JSON, as `services show --json` prints them.",
)  # fmt: skip
@click.option(
    "--replace", is_flag=True,
    help="Reset fields that are not given to their defaults; the secret and the headers stay.",
)  # fmt: skip
@with_output
@with_client
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
    """Create a service, or change the given fields of one.

    `services show --json` prints asterisks for secrets; given back, they keep the stored secrets. A
    copy under another name needs --secret, --generate-secret or --no-secret. Stored secrets and
    headers are never sent to another origin: an --endpoint on another origin needs them given
    again, or --no-secret and --no-headers.
    """
    check_secrets(secret, generate=generate_secret, keep_old=keep_old, none=no_secret)
    if headers and no_headers:
        raise click.UsageError("give --header or --no-headers, not both")
    made = new_secret() if generate_secret else None

    def new_config(before: dict[str, Any]) -> dict[str, Any]:
        given = without_shown_fields(document or {}) | fields_of(flags)
        config = merge_configs({} if replace else before, given)
        if headers or no_headers:
            config["headers"] = dict(map(parse_header, headers))
        if no_secret:
            config["secret"] = None
        if new := secret or made:
            config["secret"] = [new, MASK] if keep_old and before.get("secret") else new
        if not config.get("endpoint"):
            raise click.UsageError("a new service, and --replace, need --endpoint")
        return config

    if replace and not keep_old:
        service = client.put_service(name, **new_config({}))
    else:
        service = update_service(client, name, new_config)
    shown = to_plain(service) | ({"secret": made} if made else {})
    if out.as_json:
        out.value(shown)
        return
    out.record(shown)
    if made:
        print_line("\nStore the secret now: it will not be shown again.")


@services.command(epilog=examples("tickwheel services delete close-order"))
@click.argument("name", shell_complete=service_names)
@with_output
@with_client
def delete(*, client: Client, out: Output, name: str) -> None:
    """Delete a service; if it has live tasks, or a schedule names it, the exit code is 4."""
    client.delete_service(name)
    out.result({"deleted": name}, f"deleted {name}")


@services.command(epilog=examples("tickwheel services enable close-order"))
@click.argument("name", shell_complete=service_names)
@with_output
@with_client
def enable(*, client: Client, out: Output, name: str) -> None:
    """Enable a service: its tasks are sent again."""
    switch(client, out, name, enabled=True)


@services.command(epilog=examples("tickwheel services disable close-order"))
@click.argument("name", shell_complete=service_names)
@with_output
@with_client
def disable(*, client: Client, out: Output, name: str) -> None:
    """Disable a service: its tasks wait until it is enabled."""
    switch(client, out, name, enabled=False)


def switch(client: Client, out: Output, name: str, *, enabled: bool) -> None:
    """Enable or disable a service, and leave its other fields unchanged."""
    service = update_service(client, name, lambda before: before | {"enabled": enabled}, new=False)
    out.result(service, f"{name} is {'enabled' if service.enabled else 'disabled'}")


def update_service(
    client: Client,
    name: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    new: bool = True,
) -> Service:
    """Read a service, apply `change` to its configuration, and put it.

    - `new` allows a service that does not exist; `change` then gets an empty configuration.
    - If someone else changed the service in between, read it again, so that their change stays.
    """
    for turn in count(1):
        before, version = read_service(client, name, new=new)
        try:
            return client.put_service(name, version=version, **change(before))
        except ServiceChanged:
            if turn == MAX_UPDATES:
                raise
    raise AssertionError("unreachable")


def read_service(client: Client, name: str, *, new: bool) -> tuple[dict[str, Any], int]:
    """Return a service's configuration, as `put_service` takes it, and its version; 0 if new."""
    try:
        service = client.get_service(name)
    except UnknownService:
        if not new:
            raise
        return {}, 0
    except ApiError as error:
        if error.code == "forbidden" and "'read'" in error.detail:  # then it lacks admin as well
            detail = "the token lacks the scope 'admin'"
            raise ApiError(detail, code=error.code, status=error.status) from None
        raise
    return service.config, service.version


def without_shown_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a service as shown, so that a file can make a copy."""
    return {name: value for name, value in document.items() if name not in SHOWN_ONLY}


def fields_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that flags set: `backoff_first` is "first" in "backoff"."""
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


def merge_configs(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the given fields replaced, also within nested ones.

    A growing wait replaces a list of delays, which would take precedence.
    """
    config = before | given
    for name in NESTED:
        if isinstance(before.get(name), dict) and isinstance(given.get(name), dict):
            config[name] = before[name] | given[name]
    backoff = given.get("backoff")
    if isinstance(backoff, dict) and "delays" not in backoff and backoff.keys() & GROWTH:
        config["backoff"].pop("delays", None)
    return config


def check_secrets(secret: str | None, *, generate: bool, keep_old: bool, none: bool) -> None:
    """Raise for options on secrets that contradict each other."""
    if (secret is not None) + generate + none > 1:
        raise click.UsageError("give one of --secret, --generate-secret and --no-secret")
    if keep_old and secret is None and not generate:
        raise click.UsageError("--keep-old needs --secret or --generate-secret")


def parse_header(text: str) -> tuple[str, str]:
    """Split a header as typed into its name and value."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise click.BadParameter("it must be 'NAME: VALUE'", param_hint="--header")
    return name.strip(), value.strip()


def new_secret() -> str:
    """Return a new secret for signing calls."""
    from tickwheel.values import signature  # noqa: PLC0415 - not for --help

    return signature.new_secret()
