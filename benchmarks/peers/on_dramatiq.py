"""Dramatiq on Redis: `send_with_options(delay=…)`, a process per core with eight threads."""

from __future__ import annotations

import math
import time

import dramatiq
import ledger
from dramatiq.brokers.redis import RedisBroker
from peer import BROKER, Peer

broker = RedisBroker(url=BROKER)
dramatiq.set_broker(broker)


@dramatiq.actor
def note(number: int) -> None:
    """Record the task."""
    ledger.note(number)


class DramatiqPeer(Peer):
    """Submits with a delay in milliseconds."""

    command = ("dramatiq", "on_dramatiq")

    def submit(self, dues: dict[int, float]) -> None:
        for number, due in dues.items():
            delay = max(0, math.ceil((due - time.time()) * 1000))
            note.send_with_options(args=(number,), delay=delay)

    def clear(self) -> None:
        broker.flush_all()


peer = DramatiqPeer
