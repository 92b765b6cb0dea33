"""Measure the bare driver on the store's own tables, and generate rows to fill them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tickwheel.durable.stores.rows import inserted
from tickwheel.durable.stores.sqlite import statements as sqlite_statements
from tickwheel.durable.stores.sqlite.connection import DRIVERS, SAFE, default_driver, insert_many
from tickwheel.durable.stores.sqlite.file import SMALL_WAL_PAGES, WAL_PAGES
from tickwheel.values.task import SHARDS, Ids, State, Task

SERVICE = "noop"
CHUNK = 1_000
DAY_MS = 86_400_000
COLUMNS = [name.strip() for name in sqlite_statements.GIVEN.split(",")]
"""Columns that a submit provides, the same on both databases."""

Row = tuple[Any, ...]


def make_rows(count: int, days: tuple[int, int] = (1, 2)) -> list[Row]:
    """Return `count` tasks as a submit would insert them, due at random within these days."""
    ids, now = Ids(), int(time.time() * 1000)
    chance = random.Random(5)
    made = []
    for number in range(count):
        shard = chance.randrange(SHARDS)
        due = now + chance.randrange(days[0] * DAY_MS, days[1] * DAY_MS)
        made.append(
            inserted(
                Task(
                    id=ids.make(now + number // 100, shard), service=SERVICE,
                    body=b"[%d]" % number, key=None, state=State.DELAY, due_at_ms=due,
                    shard=shard, priority=0, attempt=0, failures=0, max_attempts=5,
                    timeout_ms=None, deadline_at_ms=None, created_at_ms=now, updated_at_ms=now,
                )
            )
        )  # fmt: skip
    return made


def chunks(all_rows: list[Row]) -> Iterator[list[Row]]:
    """Yield the rows of one commit at a time."""
    for start in range(0, len(all_rows), CHUNK):
        yield all_rows[start : start + CHUNK]


class SqliteFloor:
    """SQLite through the store's driver, with the store's settings: WAL, synchronous=FULL."""

    def __init__(self, url: str) -> None:
        self._path = str(Path(url.partition(":///")[2]))
        self._connection = DRIVERS[default_driver()](self._path)
        for pragma in sqlite_statements.PRAGMAS:
            self._connection.run(pragma)
        apart = self._connection.version >= SAFE
        pages = WAL_PAGES if apart else SMALL_WAL_PAGES
        self._connection.run(f"PRAGMA wal_autocheckpoint = {pages}")
        holes = ",".join("?" * len(COLUMNS))
        self._insert = f"INSERT INTO task ({', '.join(COLUMNS)}) VALUES ({holes})"

    async def many(self, all_rows: list[Row]) -> None:
        """Insert 50 rows at a time, and commit after each thousand."""
        for part in chunks(all_rows):
            self._connection.run("BEGIN IMMEDIATE")
            insert_many(self._connection, self._insert, part)
            self._connection.run("COMMIT")

    async def each(self, all_rows: list[Row], seconds: float) -> int:
        """Insert one row per commit on one connection until the time is up; return the count."""
        until, done = time.perf_counter() + seconds, 0
        for row in all_rows:
            self._connection.run(self._insert, row)
            done += 1
            if time.perf_counter() > until:
                break
        return done

    async def settle(self) -> None:
        """Checkpoint, so that the work does not fall into a later measurement."""
        self._connection.run("PRAGMA wal_checkpoint(TRUNCATE)")


class PostgresFloor:
    """PostgreSQL through asyncpg."""

    def __init__(self, url: str) -> None:
        self._url = url
        names = ", ".join(COLUMNS)
        holes = ", ".join(f"${n + 1}" for n in range(len(COLUMNS)))
        self._insert = f"INSERT INTO task ({names}) VALUES ({holes})"

    async def many(self, all_rows: list[Row]) -> None:
        """COPY the rows, a thousand per commit."""
        import asyncpg

        connection = await asyncpg.connect(self._url)
        for part in chunks(all_rows):
            await connection.copy_records_to_table("task", records=part, columns=COLUMNS)
        await connection.close()

    async def each(self, all_rows: list[Row], seconds: float, connections: int = 1) -> int:
        """Insert one row per commit on `connections` until the time is up; return the count."""
        import asyncpg

        pool = [await asyncpg.connect(self._url) for _ in range(connections)]
        left, done = iter(all_rows), 0
        for connection in pool:
            await connection.execute(self._insert, *next(left))
        until = time.perf_counter() + seconds

        async def insert(connection: Any) -> None:
            nonlocal done
            for row in left:
                await connection.execute(self._insert, *row)
                done += 1
                if time.perf_counter() > until:
                    break

        await asyncio.gather(*map(insert, pool))
        for connection in pool:
            await connection.close()
        return done

    async def settle(self) -> None:
        """Vacuum and checkpoint, so that the work does not fall into a later measurement."""
        import asyncpg

        connection = await asyncpg.connect(self._url)
        await connection.execute("VACUUM ANALYZE task")
        await connection.execute("CHECKPOINT")
        await connection.close()


def floor_at(url: str) -> SqliteFloor | PostgresFloor:
    """Return the floor for a store's URL; the store's tables must exist."""
    return SqliteFloor(url) if url.startswith("sqlite") else PostgresFloor(url)
