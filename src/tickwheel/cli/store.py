"""`tokens` and `migrate`: commands that open the store itself, because no server may run yet."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tickwheel.cli.exit_codes import UnknownToken
from tickwheel.cli.output import Output, examples, format_time_ms, with_output
from tickwheel.cli.serve import load_config, setting_options
from tickwheel.cli.terminal import print_line, print_message
from tickwheel.cli.types import DURATION
from tickwheel.config import Config, ConfigError
from tickwheel.durable.directory.tokens import ANY, NAMESPACE, SCOPES, new_token
from tickwheel.durable.implementations import store_at
from tickwheel.durable.registry import Audit, Token
from tickwheel.values.changes import changes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.durable.store import Store

ACTOR = "local"
MAX_LIFETIME_SECONDS = 100 * 365 * 86_400.0


class NewToken(NamedTuple):
    """A new token: its stored form, and its text, which is shown once."""

    token: Token
    text: str


def make_token(
    name: str,
    *,
    namespace: str,
    scopes: tuple[str, ...],
    rate: float | None,
    now_ms: int,
    lifetime: float | None,
) -> NewToken:
    """Make a token: `tw_<id>_<secret>`; only the digest of its secret is stored."""
    token_id, digest, text = new_token()
    expires = None if lifetime is None else now_ms + round(lifetime * 1000)
    token = Token(token_id, name, digest, namespace, scopes, rate, now_ms, expires)
    return NewToken(token, text)


def token_document(token: Token) -> dict[str, Any]:
    """Return a token for output, without its digest."""
    return {
        "id": token.id,
        "name": token.name,
        "namespace": token.namespace or "default",
        "scopes": list(token.scopes),
        "rate": token.rate,
        "created_at": format_time_ms(token.created_at_ms),
        "expires_at": format_time_ms(token.expires_at_ms),
    }


@asynccontextmanager
async def open_store(store: Store) -> AsyncIterator[Store]:
    """Open a store, and close it at the end."""
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def store_of(config: Config) -> Store:
    """Return the store, not yet open; a wrong URL or a missing package is the user's error."""
    try:
        return store_at(config.store, shards=config.shards)
    except ImportError as missing:
        raise click.ClickException(str(missing)) from missing
    except ValueError as error:
        raise ConfigError(str(error)) from error


def parse_namespace(_: click.Context, __: click.Parameter, value: str) -> str:
    """Return the namespace as it is stored: "" for the default one."""
    if value == "default":
        return ""
    if value != ANY and not NAMESPACE.fullmatch(value):
        raise click.BadParameter(f"{value!r:.50} must be 1 to 50 of A-Z a-z 0-9 . _ -, or *")
    return value


def check_lifetime(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """Return a token's lifetime in seconds; refuse one that would expire at once."""
    if value is not None and not 1 <= value <= MAX_LIFETIME_SECONDS:
        raise click.BadParameter(f"it must be from 1s to 36500d, got {value:g} s")
    return value


@click.group()
def tokens() -> None:
    """Create, list and revoke access tokens.

    These commands open the store itself and need no server, so that they can create the first
    token. The default store is the file that `tickwheel serve` uses in this directory. A running
    server picks up a change within about a second.
    """


@tokens.command(
    epilog=examples(
        "tickwheel tokens create operator --scope admin --namespace '*'",
        "tickwheel tokens create orders --scope submit --namespace shop --rate 200 --expires 90d",
        "TICKWHEEL_TOKEN=$(tickwheel tokens create -q ci)",
    )
)
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(SCOPES), default=("submit", "read"),
    help="What the token allows; may be given several times.  [default: submit and read]",
)  # fmt: skip
@click.option(
    "--namespace", default="default", show_default=True, callback=parse_namespace,
    help="The namespace that the token sees; * is any.",
)  # fmt: skip
@click.option(
    "--rate", type=click.FloatRange(0.001, 1_000_000), help="The most requests per second."
)
@click.option(
    "--expires", type=DURATION, callback=check_lifetime,
    help="The time until it expires, such as 90d.  [default: never]",
)  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="Print the token and nothing else.")
@setting_options("store")
@with_output
def create(
    *,
    out: Output,
    name: str,
    scopes: tuple[str, ...],
    quiet: bool,
    config_file: str | None,
    namespace: str,
    rate: float | None,
    expires: float | None,
    store: str | None,
) -> None:
    """Create a token and print it, this one time."""
    if not name.strip() or not name.isprintable() or len(name) > 200:
        raise click.BadParameter("it must be 1 to 200 printable characters", param_hint="NAME")
    config, _ = load_config({"store": store}, config_file)
    scopes = tuple(scope for scope in SCOPES if scope in scopes)

    async def put() -> NewToken:
        unopened = store_of(config)
        if await unopened.schema_version() is None:
            line = f"creating the store in {unopened.where}"
            print_message(line, label="note:", colour="yellow")
        async with open_store(unopened) as there:
            now_ms = int(there.now_ms())
            made = make_token(
                name, namespace=namespace, scopes=scopes, rate=rate, now_ms=now_ms, lifetime=expires
            )
            detail = changes({}, token_document(made.token))
            audit = Audit(now_ms, ACTOR, namespace, "token.create", made.token.id, detail=detail)
            await there.registry.put_token(made.token, audit)
            return made

    made = asyncio.run(put())
    if quiet:
        print_line(made.text)
    elif out.as_json:
        out.value({"token": made.text, **token_document(made.token)})
    else:
        out.record(token_document(made.token))
        print_line(f"\n{made.text}\n\nStore it now: it will not be shown again.")


@tokens.command(
    "list",
    epilog=examples(
        "tickwheel tokens list",
        "tickwheel tokens list --store postgresql://tick@db/tick --json",
    ),
)
@setting_options("store")
@with_output
def list_tokens(out: Output, config_file: str | None, store: str | None) -> None:
    """List the tokens, oldest first."""
    config, _ = load_config({"store": store}, config_file)

    async def read() -> list[Token]:
        unopened = store_of(config)
        await require_store(unopened)
        async with open_store(unopened) as there:
            return await there.registry.tokens()

    out.items(
        map(token_document, asyncio.run(read())),
        ("id", "name", "namespace", "scopes", "rate", "created_at", "expires_at"),
    )


@tokens.command(epilog=examples("tickwheel tokens revoke 3f9a0c1b2d4e"))
@click.argument("token_id", metavar="ID")
@setting_options("store")
@with_output
def revoke(out: Output, token_id: str, config_file: str | None, store: str | None) -> None:
    """Revoke a token by its id: the part between tw_ and the next _."""
    config, _ = load_config({"store": store}, config_file)
    if token_id.startswith("tw_"):  # the whole token: no message may contain its secret
        token_id = token_id.split("_")[1]

    async def delete() -> bool:
        unopened = store_of(config)
        await require_store(unopened)
        async with open_store(unopened) as there:
            found = {token.id: token for token in await there.registry.tokens()}
            if token_id not in found:
                return False
            token, now_ms = found[token_id], int(there.now_ms())
            detail = changes(token_document(token), {})
            audit = Audit(now_ms, ACTOR, token.namespace, "token.revoke", token_id, detail=detail)
            return await there.registry.delete_token(token_id, audit)

    if not asyncio.run(delete()):
        raise UnknownToken(f"no token has the id {token_id!r:.50}: see `tickwheel tokens list`")
    out.result({"revoked": token_id}, f"revoked {token_id}")


@click.command(
    epilog=examples(
        "tickwheel migrate --store sqlite:///tasks.db",
        "tickwheel migrate --store postgresql://tick@db/tick",
    )
)
@setting_options("store", "shards")
@with_output
def migrate(out: Output, config_file: str | None, **flags: object) -> None:
    """Migrate a store's tables to this version.

    `serve` also does this when it starts; this command does it in advance. A missing store is
    created. On PostgreSQL, nodes keep working during a migration. It waits for other transactions
    without a limit, and prints which.
    """
    config, _ = load_config(flags, config_file)

    def notify(line: str) -> None:
        print_message(line, label="waiting:", colour="yellow")

    async def bring_up_to_date() -> tuple[int, int]:
        store = store_of(config)
        before = await store.schema_version() or 0
        await store.migrate(notify)
        return before, await store.schema_version() or 0

    before, after = asyncio.run(bring_up_to_date())
    line = f"migrated the tables from version {before} to {after}"
    if before == after:
        line = f"the tables are already at version {after}"
    out.result({"before": before, "after": after}, line)


async def require_store(store: Store) -> None:
    """Raise if there is no store: listing or revoking tokens must not create one."""
    if await store.schema_version() is None:
        raise ConfigError(f"the store in {store.where} does not exist: --store names another")
