"""How a node takes shards over from a process that hangs in the middle of a transaction.

Such a process keeps rows of shards locked until it continues. The server has no timeout for every
such wait: a session may hang in a COPY, or between Parse and Bind. So the node that takes over ends
the sessions that block it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.durable.log import logger
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKED_SECONDS = 0.5  # after which a statement that takes over looks for sessions that block it
MARK = "/* tickwheel: takeover */"  # in every statement that takes over: `EVICT` looks for it

# Sessions that block a takeover, and have waited for their own process for a second.
EVICT = f"""
    WITH asleep AS MATERIALIZED (
        SELECT DISTINCT a.pid
        FROM pg_stat_activity w CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS b (pid)
        JOIN pg_stat_activity a ON a.pid = b.pid
        WHERE w.datname = current_database() AND w.usename = current_user
            AND w.wait_event_type = 'Lock' AND w.query LIKE '%{MARK}%'
            AND a.usename = current_user AND a.wait_event_type = 'Client'
            AND a.state_change < clock_timestamp() - interval '1 second'
    )
    SELECT pid FROM asleep WHERE pg_terminate_backend(pid)
"""  # noqa: S608


class Fetch(Protocol):
    """The store's way to execute one statement."""

    async def __call__(self, statement: str, *values: Any, reserved: bool = ...) -> Any: ...


async def take_over(fetch: Fetch, statement: str, *values: Any) -> list[Sequence[Any]]:
    """Execute a statement that takes shards over, and end the sessions that block it."""
    taking = asyncio.ensure_future(fetch(f"{MARK} {statement}", *values))
    try:
        while not (await asyncio.wait([taking], timeout=BLOCKED_SECONDS))[0]:
            with contextlib.suppress(StoreUnavailable):  # the statement itself reports that
                for (pid,) in await fetch(EVICT):
                    logger.warning("ended session %d of a dead node: it kept shards locked", pid)
        rows: list[Sequence[Any]] = await taking
    finally:
        taking.cancel()
    return rows
