"""A manual clock in place of the database's, for tests: each statement has its time as a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg  # type: ignore[import-untyped]

from tickwheel.durable.stores.postgres.clock import DatabaseClock
from tickwheel.durable.stores.postgres.statements import EPOCH

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.clock import Clock

SECOND_NS = 1_000_000_000


def at_time_of(clock: Clock | None, statement: str) -> str:
    """Return a statement with the clock's time instead of the database's; None changes nothing."""
    if clock is None:
        return statement
    seconds, rest = divmod(clock.time_ns(), SECOND_NS)
    return statement.replace(EPOCH, f"{seconds}.{rest:09}")


class ManualDatabaseClock(DatabaseClock):
    """The time of a manual clock, which the statements have as well."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._ahead_ms = self._most_ahead_ms = 0.0

    def sample(self, database_ms: float, sent_ms: float) -> None:
        """Do nothing: the clock is known exactly."""


def connection_class_at(clock: Clock) -> type[Any]:
    """Return a class of connections whose statements have the clock's time."""

    class ManualConnection(asyncpg.Connection):  # type: ignore[misc]
        async def execute(self, query: str, *args: Any, **options: Any) -> Any:
            return await super().execute(at_time_of(clock, query), *args, **options)

        async def executemany(self, command: str, args: Iterable[Any], **options: Any) -> Any:
            return await super().executemany(at_time_of(clock, command), args, **options)

        async def fetch(self, query: str, *args: Any, **options: Any) -> Any:
            return await super().fetch(at_time_of(clock, query), *args, **options)

    return ManualConnection
