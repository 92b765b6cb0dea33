"""The registry on PostgreSQL: each change is one transaction, followed by a notification.

A change locks the registry's version first. So changes come one after the other, and nothing that
a change has read changes before its commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.durable.registry import Audit, NotedTimes, ServiceRow
from tickwheel.durable.stores.postgres.pool import clean_text
from tickwheel.durable.stores.postgres.statements import LEFT_BEHIND, UNUSED
from tickwheel.durable.stores.rows import audit_page, token_of, token_row
from tickwheel.errors import ServiceInUse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tickwheel.durable.registry import Token
    from tickwheel.durable.stores.postgres.pool import Connection
    from tickwheel.durable.stores.postgres.store import PostgresStore

T = TypeVar("T")

NUMBER = "SELECT value::bigint FROM setting WHERE name = 'registry'"
LOCK = f"{NUMBER} FOR UPDATE"
BUMP = "UPDATE setting SET value = (value::bigint + 1)::text WHERE name = 'registry'"

SERVICES = "SELECT name, version, config, updated_at_ms FROM service ORDER BY name"
VERSION = "SELECT version FROM service WHERE name = $1"
LAST_VERSION = "SELECT value::bigint FROM setting WHERE name = 'service'"
PUT_SERVICE = """
    INSERT INTO service (name, version, config, updated_at_ms) VALUES ($1, $2, $3, $4)
    ON CONFLICT (name) DO UPDATE SET version = EXCLUDED.version, config = EXCLUDED.config,
        updated_at_ms = EXCLUDED.updated_at_ms
"""
DELETE_SERVICE = "DELETE FROM service WHERE name = $1 RETURNING version"
# A new service of the same name continues from it: a version never means two things.
GONE = """
    UPDATE setting SET value = greatest(value::bigint, $1::bigint)::text WHERE name = 'service'
"""
IN_USE = "SELECT EXISTS (SELECT 1 FROM task t WHERE t.service = $1)"

TOKENS = """
    SELECT id, name, digest, namespace, scopes, rate, created_at_ms, expires_at_ms FROM token
    ORDER BY created_at_ms, id
"""
PUT_TOKEN = """
    INSERT INTO token (id, name, digest, namespace, scopes, rate, created_at_ms, expires_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
    ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name, digest = EXCLUDED.digest,
        namespace = EXCLUDED.namespace, scopes = EXCLUDED.scopes, rate = EXCLUDED.rate,
        created_at_ms = EXCLUDED.created_at_ms, expires_at_ms = EXCLUDED.expires_at_ms
"""  # noqa: S105
DELETE_TOKEN = "DELETE FROM token WHERE id = $1 RETURNING id"  # noqa: S105
# Never deleted: otherwise the deletion of the last token would open the service to everybody.
HAD_TOKENS = "INSERT INTO setting (name, value) VALUES ('tokens', '1') ON CONFLICT DO NOTHING"
EVER_TOKENS = """
    SELECT EXISTS (SELECT 1 FROM setting WHERE name = 'tokens') OR EXISTS (SELECT 1 FROM token)
"""

NOTE = """
    INSERT INTO audit (at_ms, actor, namespace, action, target, request, detail)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
"""
AUDIT = """
    SELECT id, at_ms, actor, namespace, action, target, request, detail FROM audit
    WHERE id < $1 ORDER BY id DESC LIMIT $2::bigint
"""
AUDIT_OF = AUDIT.replace("WHERE", "WHERE namespace = $3 AND").replace(
    "ORDER BY id", "ORDER BY namespace DESC, id"
)

OLD = """
    SELECT caller, key FROM idempotency WHERE used_at_ms < $1
    ORDER BY used_at_ms LIMIT $2::bigint FOR UPDATE SKIP LOCKED
"""
# The first lines: they are nearly in the order of their times, which have no index.
OLD_LINES = """
    WITH old AS MATERIALIZED (
        SELECT id, at_ms FROM audit WHERE id > 0 ORDER BY id LIMIT $2::bigint
        FOR UPDATE SKIP LOCKED
    )
    DELETE FROM audit WHERE id = ANY (ARRAY(SELECT id FROM old WHERE at_ms < $1)) RETURNING id
"""
TIMES = """
    SELECT (SELECT value::bigint FROM setting WHERE name = 'last_ms'),
        coalesce((SELECT value::bigint FROM setting WHERE name = 'trusted_ms'), 0)
"""
NOTE_TIMES = """
    INSERT INTO setting (name, value)
    VALUES ('last_ms', $1::bigint::text), ('trusted_ms', $2::bigint::text)
    ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value
"""
LAST = 2**63 - 1


class PostgresRegistry:
    """Services, tokens and the audit log, in the database of a store.

    - A service may still get tasks from submits under way while it is deleted: a submit does not
      check its service. Those tasks wait until the service exists again.
    """

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def version(self) -> int:
        """Return a number that rises with every change."""
        number: int = (await self._store.fetch(NUMBER))[0][0]
        return number

    async def services(self) -> list[ServiceRow]:
        """Return all services in the order of their names."""
        return list(map(ServiceRow._make, await self._store.fetch(SERVICES)))

    async def put_service(
        self, name: str, config: str, audit: Audit, *, version: int | None = None
    ) -> ServiceRow | None:
        """Store a service's configuration, if `version` is None or the stored version."""

        async def work(connection: Connection) -> ServiceRow | None:
            found = await connection.fetch(VERSION, name)
            stored: int = found[0][0] if found else 0
            if version not in (None, stored):
                return None
            last = stored or (await connection.fetch(LAST_VERSION))[0][0]
            row = ServiceRow(name, last + 1, config, audit.at_ms)
            await connection.fetch(PUT_SERVICE, *row)
            return row

        return await self._change(work, audit)

    async def delete_service(self, name: str, audit: Audit) -> bool:
        """Delete a service that has no live tasks; return whether it existed."""

        async def work(connection: Connection) -> bool | None:
            if not await connection.fetch(VERSION, name):
                return False
            if (await connection.fetch(IN_USE, name))[0][0]:
                return None
            await connection.fetch(GONE, *(await connection.fetch(DELETE_SERVICE, name))[0])
            return True

        gone = await self._change(work, audit)
        if gone is None:
            raise ServiceInUse(f"the service {name!r} has live tasks")
        return gone

    async def tokens(self) -> list[Token]:
        """Return all tokens, oldest first."""
        return list(map(token_of, await self._store.fetch(TOKENS)))

    async def had_tokens(self) -> bool:
        """Return whether there ever was a token."""
        return bool((await self._store.fetch(EVER_TOKENS))[0][0])

    async def put_token(self, token: Token, audit: Audit) -> None:
        """Store a token."""

        async def work(connection: Connection) -> bool:
            await connection.fetch(HAD_TOKENS)
            await connection.fetch(PUT_TOKEN, *token_row(token))
            return True

        await self._change(work, audit)

    async def delete_token(self, token_id: str, audit: Audit) -> bool:
        """Delete a token, and return whether it existed."""

        async def work(connection: Connection) -> bool:
            return bool(await connection.fetch(DELETE_TOKEN, token_id))

        return await self._change(work, audit)

    async def _change(self, work: Callable[[Connection], Awaitable[T]], audit: Audit) -> T:
        """Execute `work`; if it returns that something changed, record and notify that."""

        async def change_and_note(connection: Connection) -> T:
            await connection.fetch(LOCK)
            answer = await work(connection)
            if answer:
                await connection.fetch(BUMP)
                await connection.fetch(NOTE, *line(audit))
            return answer

        answer = await self._store._transaction(change_and_note)
        if answer:
            await self._store.notifications.notify_change()
        return answer

    async def audit(
        self, *, namespace: str | None, cursor: int | None, limit: int
    ) -> tuple[list[Audit], int | None]:
        """Return lines of the audit log, newest first, and the cursor of the next ones."""
        page = (LAST if cursor is None else cursor, limit + 1)
        if namespace is None:
            return audit_page(await self._store.fetch(AUDIT, *page), limit)
        return audit_page(await self._store.fetch(AUDIT_OF, *page, namespace), limit)

    async def note(self, audit: Audit) -> None:
        """Add a line to the audit log."""
        await self._store.fetch(NOTE, *line(audit))

    async def prune(self, before_ms: int, limit: int, *, audit_before_ms: int | None = None) -> int:
        """Delete old rows, up to `limit`; return how many.

        Idempotency keys, lines of the audit log, and rows that nodes of an older version left.
        """

        async def work(connection: Connection) -> int:
            old = await connection.fetch(OLD, before_ms, limit)
            await connection.executemany(UNUSED, old)
            left = limit - len(old)
            if audit_before_ms is not None:
                left -= len(await connection.fetch(OLD_LINES, audit_before_ms, left))
            left -= len(await connection.fetch(LEFT_BEHIND, before_ms, left))
            return limit - left

        return await self._store._transaction(work)

    async def noted_times(self) -> NotedTimes:
        """Return the noted times."""
        return NotedTimes._make((await self._store.fetch(TIMES))[0])

    async def note_times(self, times: NotedTimes) -> None:
        """Replace the noted times."""
        await self._store.fetch(NOTE_TIMES, *times)


def line(audit: Audit) -> list[Any]:
    """Return the columns of a line; its texts may contain anything."""
    return [audit.at_ms, *map(clean_text, audit[1:])]
