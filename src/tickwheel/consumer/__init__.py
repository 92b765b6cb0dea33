"""The consumer, for tasks that come from a queue: each message becomes one task.

    source = source_at("kafka://localhost:9092", "orders")

    async with AsyncClient() as client:
        await Consumer(source, client).run()

A message is acknowledged after its task is stored, so a crash loses none. A redelivered message
stores nothing: its source and id are the idempotency key of its task.
"""

from tickwheel.consumer.core import Consumer
from tickwheel.consumer.implementations import source_at
from tickwheel.consumer.source import Message, Source, SourceUnavailable

__all__ = ["Consumer", "Message", "Source", "SourceUnavailable", "source_at"]
