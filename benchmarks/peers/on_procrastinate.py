"""Procrastinate on PostgreSQL: `configure(schedule_at=…)`, a worker with a hundred jobs at once."""

from __future__ import annotations

import asyncio

import ledger
from peer import BROKER, Peer, aware
from procrastinate import App, PsycopgConnector

app = App(connector=PsycopgConnector(conninfo=BROKER))


@app.task(name="note")
async def note(number: int) -> None:
    """Record the task."""
    ledger.note(number)


class ProcrastinatePeer(Peer):
    """Submits on its own loop."""

    command = ("procrastinate", "--app", "on_procrastinate.app", "worker", "--concurrency", "100")

    def prepare(self) -> None:
        asyncio.run(self._prepare())

    async def _prepare(self) -> None:
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    def submit(self, dues: dict[int, float]) -> None:
        asyncio.run(self._submit(dues))

    async def _submit(self, dues: dict[int, float]) -> None:
        async with app.open_async():
            for number, due in dues.items():
                await note.configure(schedule_at=aware(due)).defer_async(number=number)

    def clear(self) -> None:
        asyncio.run(self._clear())

    async def _clear(self) -> None:
        async with app.open_async():
            await app.connector.execute_query_async("TRUNCATE procrastinate_jobs CASCADE")


peer = ProcrastinatePeer
