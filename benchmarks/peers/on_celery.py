"""Celery on Redis: `apply_async(eta=…)`, a prefork worker with a process per core."""

from __future__ import annotations

import ledger
from celery import Celery
from peer import BROKER, Peer, aware

app = Celery("bench", broker=BROKER)
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True


@app.task(name="note")
def note(number: int) -> None:
    """Record the task."""
    ledger.note(number)


class CeleryPeer(Peer):
    """Submits over one connection from the pool."""

    command = ("celery", "-A", "on_celery", "worker", "--loglevel", "ERROR")

    def submit(self, dues: dict[int, float]) -> None:
        for number, due in dues.items():
            note.apply_async((number,), eta=aware(due))

    def clear(self) -> None:
        app.control.purge()


peer = CeleryPeer
