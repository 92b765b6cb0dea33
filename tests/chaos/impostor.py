"""An impostor: claims tasks with old epochs, as a node would that has lost its shards unawares."""

import asyncio
import threading

import psycopg

from tickwheel.durable.implementations import store_at
from tickwheel.errors import TickwheelError
from tickwheel.values.task import Due

SHARDS = 64
PAUSE_SECONDS = 0.5
DUE = """
    SELECT replace(t.id::text, '-', ''), t.due_at_ms, t.service, t.priority, t.shard, s.epoch
    FROM tickwheel.task t JOIN tickwheel.shard s ON s.shard = t.shard
    WHERE t.state = 'delay' AND s.epoch > 1
        AND t.due_at_ms <= floor(extract(epoch FROM clock_timestamp()) * 1000)
    ORDER BY random() LIMIT 100
"""


class Impostor:
    """Tries again and again on a thread, while it is entered.

    - `refused`: the claims that got nothing.
    - `won`: tasks that it got; there must be none.
    """

    def __init__(self, databases):
        self._databases = databases
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True)
        self.refused = 0
        self.won = []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    async def _work(self):
        store = store_at(self._databases.url(), shards=SHARDS)
        await store.open()
        while not self._over.is_set():
            try:
                await self._try(store)
            except (TickwheelError, psycopg.Error):
                pass  # the database is down: a fault
            await asyncio.sleep(PAUSE_SECONDS)
        await store.close()

    async def _try(self, store):
        url = self._databases.url() + "?target_session_attrs=read-write&connect_timeout=3"
        with psycopg.connect(url, autocommit=True) as connection:
            rows = connection.execute(DUE).fetchall()
        wanted = [Due(*row[:5]) for row in rows]
        claims = await store.claim(wanted, "impostor", {row[4]: row[5] - 1 for row in rows})
        self.won += [task.id for task in claims.tasks]
        self.refused += len(wanted) - len(claims.tasks)
