"""`tokens` and `migrate`: what is done on the store itself, since no server may be there yet."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tickwheel.cli.exits import UnknownToken, say, tell_line
from tickwheel.cli.output import Output, examples, moment_of_ms, printing
from tickwheel.cli.serve import loaded, settings
from tickwheel.cli.types import DURATION
from tickwheel.config import Config, ConfigError, without_password
from tickwheel.durable.directory.tokens import ANY, NAMESPACE, SCOPES, new_token
from tickwheel.durable.registry import Audit, Token
from tickwheel.durable.scheduler import scheme_of, sqlite_path, store_at
from tickwheel.values.changes import changes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ACTOR = "local"
LONGEST = 100 * 365 * 86_400.0  # seconds that a token may live; for longer it needs no end


class Made(NamedTuple):
    """A new token: what is stored of it, and the text that is shown once."""

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
) -> Made:
    """Make a token: `tw_<id>_<secret>`, of which only the secret's digest is stored."""
    token_id, digest, text = new_token()
    expires = None if lifetime is None else now_ms + round(lifetime * 1000)
    token = Token(token_id, name, digest, namespace, scopes, rate, now_ms, expires)
    return Made(token, text)


def shown(token: Token) -> dict[str, Any]:
    """Return a token for people and programs; its digest is nobody's business."""
    return {
        "id": token.id,
        "name": token.name,
        "namespace": token.namespace or "default",
        "scopes": list(token.scopes),
        "rate": token.rate,
        "created_at": moment_of_ms(token.created_at_ms),
        "expires_at": moment_of_ms(token.expires_at_ms),
    }


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Any]:
    """Open the store that the configuration names; what is wrong with it is the user's to know."""
    store = store_of(config)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def store_of(config: Config) -> Any:
    """Return the store, not open yet."""
    try:
        return store_at(config.store, shards=config.shards, clock=None)
    except ImportError as missing:
        raise click.ClickException(str(missing)) from missing
    except ValueError as error:
        raise ConfigError(str(error)) from error


def namespace_of(_: click.Context, __: click.Parameter, value: str) -> str:
    """Return the namespace as it is stored: "" for the default one."""
    if value == "default":
        return ""
    if value != ANY and not NAMESPACE.fullmatch(value):
        raise click.BadParameter(f"{value!r:.50} is none: 1 to 50 of A-Z a-z 0-9 . _ -, or *")
    return value


def lifetime_of(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """Return for how long a token is to live; one that is void at once would be a mistake."""
    if value is not None and not 1 <= value <= LONGEST:
        raise click.BadParameter(f"it must be from 1s to 36500d, got {value:g} s")
    return value


@click.group()
def tokens() -> None:
    """Make, list and revoke access tokens.

    These commands work on the store itself, not on a server: they make the first token, too. By
    default it is the file that `tickwheel serve` has in this directory. A running server knows of a
    change within a second or so.
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
    help="What it allows; may be given several times.  [default: submit and read]",
)  # fmt: skip
@click.option(
    "--namespace", default="default", show_default=True, callback=namespace_of,
    help="The namespace that it sees; * is any.",
)  # fmt: skip
@click.option(
    "--rate", type=click.FloatRange(0.001, 1_000_000), help="Requests per second that it may make."
)
@click.option(
    "--expires", type=DURATION, callback=lifetime_of,
    help="After how long it is void, such as 90d.  [default: never]",
)  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="Print the token and nothing else.")
@settings("store")
@printing
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
    """Make a token and print it, this one time."""
    if not name.strip() or not name.isprintable() or len(name) > 200:
        raise click.BadParameter("1 to 200 printable characters", param_hint="NAME")
    config, _ = loaded({"store": store}, config_file)
    scopes = tuple(scope for scope in SCOPES if scope in scopes)

    async def put() -> Made:
        if await missing(config):
            where = place(config)
            tell_line(f"{where} was not there: it is made", word="note:", colour="yellow")
        async with opened(config) as there:
            now_ms = int(there.now_ms())
            made = make_token(
                name, namespace=namespace, scopes=scopes, rate=rate, now_ms=now_ms, lifetime=expires
            )
            detail = changes({}, shown(made.token))
            audit = Audit(now_ms, ACTOR, namespace, "token.create", made.token.id, detail=detail)
            await there.registry.put_token(made.token, audit)
            return made

    made = asyncio.run(put())
    if quiet:
        say(made.text)
    elif out.as_json:
        out.value({"token": made.text, **shown(made.token)})
    else:
        out.record(shown(made.token))
        say(f"\n{made.text}\n\nKeep it now: it is not stored and will not be shown again.")


@tokens.command(
    "list",
    epilog=examples(
        "tickwheel tokens list",
        "tickwheel tokens list --store postgresql://tick@db/tick --json",
    ),
)
@settings("store")
@printing
def list_tokens(out: Output, config_file: str | None, store: str | None) -> None:
    """List the tokens, oldest first."""
    config, _ = loaded({"store": store}, config_file)

    async def read() -> list[Token]:
        await require(config)
        async with opened(config) as there:
            found: list[Token] = await there.registry.tokens()
            return found

    out.items(
        map(shown, asyncio.run(read())),
        ("id", "name", "namespace", "scopes", "rate", "created_at", "expires_at"),
    )


@tokens.command(epilog=examples("tickwheel tokens revoke 3f9a0c1b2d4e"))
@click.argument("token_id", metavar="ID")
@settings("store")
@printing
def revoke(out: Output, token_id: str, config_file: str | None, store: str | None) -> None:
    """Revoke a token by its id: what stands between tw_ and the next _."""
    config, _ = loaded({"store": store}, config_file)
    if token_id.startswith("tw_"):  # the whole token: its secret must get into no message
        token_id = token_id.split("_")[1]

    async def delete() -> bool:
        await require(config)
        async with opened(config) as there:
            found = {token.id: token for token in await there.registry.tokens()}
            if token_id not in found:
                return False
            token, now_ms = found[token_id], int(there.now_ms())
            detail = changes(shown(token), {})
            audit = Audit(now_ms, ACTOR, token.namespace, "token.revoke", token_id, detail=detail)
            return bool(await there.registry.delete_token(token_id, audit))

    if not asyncio.run(delete()):
        raise UnknownToken(f"there is no token {token_id!r:.50}: see `tickwheel tokens list`")
    out.said({"revoked": token_id}, f"revoked {token_id}")


@click.command(
    epilog=examples(
        "tickwheel migrate --store sqlite:///tasks.db",
        "tickwheel migrate --store postgresql://tick@db/tick",
    )
)
@settings("store", "shards")
@printing
def migrate(out: Output, config_file: str | None, **flags: object) -> None:
    """Bring a store's tables to this version's form.

    `serve` does this, too, when it starts; here it can be done before. A store that is not there is
    made. On PostgreSQL nodes go on working while it runs. It waits for other transactions as long
    as they take, and says which.
    """
    config, _ = loaded(flags, config_file)

    async def bring() -> tuple[int, int]:
        before = await version_of(config)
        if scheme_of(config.store) == "sqlite":
            async with opened(config):
                pass
        else:
            await _migrate_postgres(config)
        return before, await version_of(config)

    before, after = asyncio.run(bring())
    what = f"from version {before} to {after}" if before != after else f"at version {after} already"
    out.said({"before": before, "after": after}, f"the tables are {what}")


async def require(config: Config) -> None:
    """Raise when there is no store: to look for tokens is no reason to make one."""
    if await missing(config):
        raise ConfigError(f"{place(config)} is not there: --store says which store is meant")


async def missing(config: Config) -> bool:
    """Say whether there is no store yet; what is wrong with one is said when it is opened."""
    store_of(config)  # says what is wrong with its URL
    if scheme_of(config.store) == "sqlite":
        return not sqlite_path(config.store).exists()
    return not await version_of(config)


def place(config: Config) -> str:
    """Return where the store is, for people."""
    if scheme_of(config.store) == "sqlite":
        return f"the store {sqlite_path(config.store).absolute()}"
    return f"a store in {without_password(config.store)}"


async def version_of(config: Config) -> int:
    """Return how many migrations a store has had, 0 when it is not there."""
    if scheme_of(config.store) == "sqlite":
        return await asyncio.to_thread(_sqlite_version, config)
    store_of(config)  # says what is missing
    # Only the migrations know of versions: the store's contract says nothing of them.
    from tickwheel.durable.stores.postgres.migration import version  # noqa: PLC0415
    from tickwheel.durable.stores.postgres.pool import Pool  # noqa: PLC0415

    pool = Pool(config.store)
    try:
        return await pool.run(version, 10.0)
    finally:
        await pool.close()


async def _migrate_postgres(config: Config) -> None:
    """Migrate without a limit of time."""
    from tickwheel.durable.stores.postgres.migration import migrate  # noqa: PLC0415
    from tickwheel.durable.stores.postgres.pool import Pool  # noqa: PLC0415

    def notify(line: str) -> None:
        tell_line(line, word="waiting:", colour="yellow")

    pool = Pool(config.store)
    try:
        await migrate(pool, config.shards, patience=math.inf, notify=notify)
    finally:
        await pool.close()


def _sqlite_version(config: Config) -> int:
    import sqlite3  # noqa: PLC0415

    path = sqlite_path(config.store)
    if not path.exists():
        return 0
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.Error:
        return 0  # what is wrong with the file is said when it is opened
    finally:
        connection.close()
