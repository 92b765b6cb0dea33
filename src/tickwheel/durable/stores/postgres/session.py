"""A session with PostgreSQL: its schema, and whether a pooler keeps it for one client.

Settings are sent after the connection is opened, not with it: PgBouncer refuses a startup message
with settings that it does not know.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlunsplit

import asyncpg  # type: ignore[import-untyped]

from tickwheel.durable.store import SHARED_SESSION
from tickwheel.errors import WrongStore
from tickwheel.values.store_url import split_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

SCHEMA = "tickwheel"  # of the tables, unless the URL names another
PARAMETER = "schema"
TARGET = "target_session_attrs"
TARGETS = ("read-write", "primary", "any")  # the driver's others are servers that accept no writes
IDENTIFIER = re.compile("(?!pg_)[a-z_][a-z0-9_]{0,62}")
NOTIFY_SECONDS = 5.0  # a session that keeps its LISTEN is notified much sooner
# A statement was prepared on one server connection and executed on another.
SHARED_STATES = ("26000", "42P05")


class Address(NamedTuple):
    """A store's URL without the schema, for the driver, and the schema of the tables.

    - `named`: whether the URL names the schema.
    - `target`: which servers may be used, one of `TARGETS`; None: the driver decides.
    """

    url: str
    schema: str
    named: bool
    target: str | None


def address_of(url: str) -> Address:
    """Split `?schema=NAME` off a PostgreSQL URL; the driver does not know that parameter."""
    parts = split_url(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "search_path" in given:
        raise ValueError("a store's URL names its schema with ?schema=NAME, not with search_path")
    target = target_of(parts.netloc.rpartition("@")[2] or given.get("host", ""), given.get(TARGET))
    if PARAMETER not in given:
        return Address(url, SCHEMA, named=False, target=target)
    schema = given[PARAMETER]
    if not IDENTIFIER.fullmatch(schema):
        raise ValueError(
            "the schema of a store's URL is 1 to 63 of a-z 0-9 _, with no digit and no pg_ first,"
            f" got {schema!r:.100}"
        )
    rest = [one for one in parts.query.split("&") if one.partition("=")[0] != PARAMETER]
    url = urlunsplit(parts._replace(query="&".join(rest)))
    return Address(url, schema, named=True, target=target)


def target_of(hosts: str, given: str | None) -> str | None:
    """Return which servers may be used: of several, those that accept writes."""
    if given is None:
        return TARGETS[0] if "," in hosts else None
    if given not in TARGETS:
        raise ValueError(
            f"a store needs a server that accepts writes: {TARGET} must be one of"
            f" {', '.join(TARGETS)}, got {given!r:.100}"
        )
    return given


def script(schema: str, settings: Mapping[str, str]) -> str:
    """Return the statements that prepare a session, for one round trip.

    Without `pg_temp` at the end of the path, temporary tables would come before all others.
    """
    lines = [f"SET {name} = '{value}'" for name, value in settings.items()]
    return "; ".join([*lines, f'SET search_path = "{schema}", pg_temp'])


def own_process(connection: Any) -> str:
    """Return a query with one row if the server process is the one that greeted the client.

    A pooler greets with a process number of its own. Only the status of the query counts, so it
    needs no prepared statement, which a pooler might lose.
    """
    return f"SELECT WHERE pg_backend_pid() = {connection.get_server_pid()}"


def is_pooled(status: str) -> bool:
    """Return whether a pooler is in between, from the status of `own_process`."""
    return status == "SELECT 0"


async def require_session(listening: Any, connect: Callable[[], Awaitable[Any]]) -> None:
    """Raise if a pooler in between does not keep a session for this client.

    Between two transactions such a pooler takes the server connection back. A notification that
    arrives there then never reaches this client, whichever connection the pooler chooses next.
    """
    channel = f"tickwheel_session_{secrets.token_hex(8)}"
    notified = asyncio.Event()

    def on_notify(*_: Any) -> None:
        notified.set()

    try:
        # In a transaction even such a pooler keeps one server connection.
        await listening.execute("BEGIN")
        await listening.add_listener(channel, on_notify)
        await listening.execute("COMMIT")
        other = await connect()
        try:
            await other.execute(f"NOTIFY {channel}")
            async with asyncio.timeout(NOTIFY_SECONDS):
                await notified.wait()
        finally:
            other.terminate()
        await listening.remove_listener(channel, on_notify)
    except TimeoutError:
        raise WrongStore(SHARED_SESSION) from None
    except asyncpg.PostgresError as error:
        raise (WrongStore(SHARED_SESSION) if is_shared(error) else error) from error


def is_shared(error: asyncpg.PostgresError) -> bool:
    """Return whether an error shows that the session is shared with other clients."""
    return error.sqlstate in SHARED_STATES or "not allowed in statement pooling" in str(error)
