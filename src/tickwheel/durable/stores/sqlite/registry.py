"""The registry on SQLite, on the store's writer and reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.registry import Audit, NotedTimes, ServiceRow
from tickwheel.durable.stores.rows import audit_page, token_of, token_row
from tickwheel.durable.stores.sqlite.writer import Rank
from tickwheel.errors import ServiceInUse

if TYPE_CHECKING:
    from tickwheel.durable.registry import Token
    from tickwheel.durable.stores.sqlite.connection import Connection
    from tickwheel.durable.stores.sqlite.store import SqliteStore

SETTING = "SELECT CAST(value AS INTEGER) FROM setting WHERE name = ?"
BUMP = "UPDATE setting SET value = CAST(value AS INTEGER) + 1 WHERE name = 'registry'"

SERVICES = "SELECT name, version, config, updated_at_ms FROM service ORDER BY name"
VERSION = "SELECT version FROM service WHERE name = ?"
PUT_SERVICE = (
    "INSERT OR REPLACE INTO service (name, version, config, updated_at_ms) VALUES (?,?,?,?)"
)
DELETE_SERVICE = "DELETE FROM service WHERE name = ? RETURNING version"
# A new service of the same name continues from it: a version never means two things.
GONE = """
    UPDATE setting SET value = max(CAST(value AS INTEGER), ?) WHERE name = 'service'
"""
IN_USE = "SELECT EXISTS (SELECT 1 FROM task WHERE service = ?)"

TOKENS = """
    SELECT id, name, digest, namespace, scopes, rate, created_at_ms, expires_at_ms FROM token
    ORDER BY created_at_ms, id
"""
PUT_TOKEN = """
    INSERT OR REPLACE INTO token
        (id, name, digest, namespace, scopes, rate, created_at_ms, expires_at_ms)
    VALUES (?,?,?,?,?,?,?,?)
"""  # noqa: S105
DELETE_TOKEN = "DELETE FROM token WHERE id = ? RETURNING id"  # noqa: S105
# Never deleted: otherwise the deletion of the last token would open the service to everybody.
HAD_TOKENS = "INSERT OR IGNORE INTO setting (name, value) VALUES ('tokens', '1')"

NOTE = """
    INSERT INTO audit (at_ms, actor, namespace, action, target, request, detail)
    VALUES (?,?,?,?,?,?,?)
"""
AUDIT = """
    SELECT id, at_ms, actor, namespace, action, target, request, detail FROM audit
    WHERE id < ? ORDER BY id DESC LIMIT ?
"""
AUDIT_OF = AUDIT.replace("WHERE", "WHERE namespace = ? AND")

PRUNE = """
    DELETE FROM idempotency WHERE (caller, key) IN (
        SELECT caller, key FROM idempotency WHERE used_at_ms < ? ORDER BY used_at_ms LIMIT ?
    )
    RETURNING 1
"""
# The first lines: they are nearly in the order of their times, which have no index.
OLD_LINES = """
    DELETE FROM audit WHERE id > 0 AND at_ms < :before AND id <= (
        SELECT max(id) FROM (SELECT id FROM audit WHERE id > 0 ORDER BY id LIMIT :limit)
    )
    RETURNING 1
"""
NOTE_TIMES = """
    INSERT OR REPLACE INTO setting (name, value) VALUES ('last_ms', ?), ('trusted_ms', ?)
"""
LAST = 2**63 - 1


class SqliteRegistry:
    """Services, tokens and the audit log, in the file of a store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def version(self) -> int:
        """Return a number that rises with every change."""

        def work(connection: Connection) -> int:
            number: int = connection.run(SETTING, ("registry",))[0][0]
            return number

        return await self._store._read(work)

    async def services(self) -> list[ServiceRow]:
        """Return all services in the order of their names."""

        def work(connection: Connection) -> list[ServiceRow]:
            return list(map(ServiceRow._make, connection.run(SERVICES)))

        return await self._store._read(work)

    async def put_service(
        self, name: str, config: str, audit: Audit, *, version: int | None = None
    ) -> ServiceRow | None:
        """Store a service's configuration, if `version` is None or the stored version."""

        def work(connection: Connection) -> ServiceRow | None:
            found = connection.run(VERSION, (name,))
            stored: int = found[0][0] if found else 0
            if version not in (None, stored):
                return None
            last = stored or connection.run(SETTING, ("service",))[0][0]
            row = ServiceRow(name, last + 1, config, audit.at_ms)
            connection.run(PUT_SERVICE, row)
            record_change(connection, audit)
            return row

        row = await self._store._write(Rank.CLAIM, work)
        if row is not None:
            self._store.notifications.send()
        return row

    async def delete_service(self, name: str, audit: Audit) -> bool:
        """Delete a service that has no live tasks; return whether it existed."""

        def work(connection: Connection) -> bool | None:
            if not connection.run(VERSION, (name,)):
                return False
            if connection.run(IN_USE, (name,))[0][0]:
                return None
            connection.run(GONE, connection.run(DELETE_SERVICE, (name,))[0])
            record_change(connection, audit)
            return True

        gone = await self._store._write(Rank.CLAIM, work)
        if gone is None:
            raise ServiceInUse(f"the service {name!r} has live tasks")
        if gone:
            self._store.notifications.send()
        return gone

    async def tokens(self) -> list[Token]:
        """Return all tokens, oldest first."""

        def work(connection: Connection) -> list[Token]:
            return list(map(token_of, connection.run(TOKENS)))

        return await self._store._read(work)

    async def had_tokens(self) -> bool:
        """Return whether there ever was a token."""

        def work(connection: Connection) -> bool:
            return bool(connection.run(SETTING, ("tokens",)) or connection.run(TOKENS))

        return await self._store._read(work)

    async def put_token(self, token: Token, audit: Audit) -> None:
        """Store a token."""

        def work(connection: Connection) -> None:
            connection.run(HAD_TOKENS)
            connection.run(PUT_TOKEN, token_row(token))
            record_change(connection, audit)

        await self._store._write(Rank.CLAIM, work)
        self._store.notifications.send()

    async def delete_token(self, token_id: str, audit: Audit) -> bool:
        """Delete a token, and return whether it existed."""

        def work(connection: Connection) -> bool:
            gone = bool(connection.run(DELETE_TOKEN, (token_id,)))
            if gone:
                record_change(connection, audit)
            return gone

        gone = await self._store._write(Rank.CLAIM, work)
        if gone:
            self._store.notifications.send()
        return gone

    async def audit(
        self, *, namespace: str | None, cursor: int | None, limit: int
    ) -> tuple[list[Audit], int | None]:
        """Return lines of the audit log, newest first, and the cursor of the next ones."""
        page = (LAST if cursor is None else cursor, limit + 1)

        def work(connection: Connection) -> tuple[list[Audit], int | None]:
            if namespace is None:
                return audit_page(connection.run(AUDIT, page), limit)
            return audit_page(connection.run(AUDIT_OF, (namespace, *page)), limit)

        return await self._store._read(work)

    async def note(self, audit: Audit) -> None:
        """Add a line to the audit log."""
        await self._store._write(Rank.CLAIM, lambda connection: connection.run(NOTE, audit))

    async def prune(self, before_ms: int, limit: int, *, audit_before_ms: int | None = None) -> int:
        """Delete idempotency keys and lines of the audit log, up to `limit`; return how many."""

        def work(connection: Connection) -> int:
            names = len(connection.run(PRUNE, (before_ms, limit)))
            if audit_before_ms is None:
                return names
            values = {"before": audit_before_ms, "limit": limit - names}
            return names + len(connection.run(OLD_LINES, values))

        return await self._store._write(Rank.SUBMIT, work)

    async def noted_times(self) -> NotedTimes:
        """Return the noted times."""

        def work(connection: Connection) -> NotedTimes:
            rows = {name: connection.run(SETTING, (name,)) for name in NotedTimes._fields}
            return NotedTimes(**{name: found[0][0] for name, found in rows.items() if found})

        return await self._store._read(work)

    async def note_times(self, times: NotedTimes) -> None:
        """Replace the noted times."""
        await self._store._write(Rank.SUBMIT, lambda connection: connection.run(NOTE_TIMES, times))


def record_change(connection: Connection, audit: Audit) -> None:
    """Record a change: raise the version, and add the line of the audit log."""
    connection.run(BUMP)
    connection.run(NOTE, audit)
