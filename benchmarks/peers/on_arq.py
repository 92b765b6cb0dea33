"""arq on Redis: `enqueue_job(_defer_until=…)`, a worker with a thousand jobs at once."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import ledger
from arq import create_pool
from arq.connections import RedisSettings
from peer import BROKER, Peer, aware


async def note(context: dict[str, Any], number: int) -> None:
    """Record the task."""
    ledger.note(number)


class WorkerSettings:
    """The settings that `arq` reads; its default of ten jobs at once is far slower in a burst."""

    functions: ClassVar = [note]
    redis_settings = RedisSettings.from_dsn(BROKER) if BROKER else None
    max_jobs = 1_000
    keep_result = 0


class ArqPeer(Peer):
    """Submits on its own loop."""

    command = ("arq", "on_arq.WorkerSettings")

    def submit(self, dues: dict[int, float]) -> None:
        asyncio.run(self._submit(dues))

    async def _submit(self, dues: dict[int, float]) -> None:
        pool = await create_pool(WorkerSettings.redis_settings)
        for number, due in dues.items():
            await pool.enqueue_job("note", number, _defer_until=aware(due))
        await pool.aclose()

    def clear(self) -> None:
        asyncio.run(self._clear())

    async def _clear(self) -> None:
        pool = await create_pool(WorkerSettings.redis_settings)
        await pool.flushdb()
        await pool.aclose()


peer = ArqPeer
