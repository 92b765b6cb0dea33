"""Huey, on Redis or SQLite: `schedule(delay=…)`, a consumer with four threads."""

from __future__ import annotations

import time

import ledger
from huey import RedisHuey, SqliteHuey
from peer import BROKER, Peer

if BROKER.startswith("redis"):
    huey = RedisHuey("bench", url=BROKER, results=False)
else:
    huey = SqliteHuey("bench", filename=BROKER, fsync=True, results=False)


@huey.task()
def note(number: int) -> None:
    """Record the task."""
    ledger.note(number)


class HueyPeer(Peer):
    """Submits with a delay, because Huey rounds a due time."""

    command = ("huey_consumer", "on_huey.huey", "-w", "4", "-k", "thread", "-q")

    def submit(self, dues: dict[int, float]) -> None:
        for number, due in dues.items():
            note.schedule((number,), delay=max(0.0, due - time.time()))

    def clear(self) -> None:
        huey.flush()


peer = HueyPeer
