"""The sources by URL: the only module that names them. Each one is imported when it is needed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tickwheel.arguments import bounded
from tickwheel.consumer.core import DEFAULT_BATCH, MAX_BATCH
from tickwheel.consumer.source import Place
from tickwheel.values.service import check_name

if TYPE_CHECKING:
    from tickwheel.consumer.source import Source

FORMS = "kafka://host:9092, amqp://user:password@host/vhost or redis://host:6379/0"


def source_at(
    url: str,
    name: str,
    *,
    group: str = "tickwheel",
    dead_letter: str | None = None,
    identity: str | None = None,
    batch: int = DEFAULT_BATCH,
) -> Source:
    """Return the source that a broker's URL and the name of a topic, queue or stream give.

    - `group`: the consumer group, on Kafka and Redis. Each message goes to one of its consumers.
    - `dead_letter`: the topic, queue or stream for messages that cannot become tasks.
    - `identity`: replaces the source's own identity, which is part of each message's key.
    - `batch`: at most this many messages become tasks together.
    """
    scheme = url.partition("://")[0]
    if scheme not in SOURCES:
        got = f", got {scheme!r:.20}" if "://" in url else ""  # else it may be a password
        raise ValueError(f"a broker's URL is {FORMS}{got}")
    check_name("name", name)
    place = Place(url, name, group, dead_letter, identity, bounded("batch", batch, 1, MAX_BATCH))
    module, kind = SOURCES[scheme]
    try:
        made: Source = getattr(import_module(f"tickwheel.consumer.sources.{module}"), kind)(place)
    except ImportError as missing:
        package = f"pip install 'tickwheel[{module}]'"
        raise ImportError(f"{missing}; for {scheme}: {package}") from missing
    return made


SOURCES = {  # by scheme; a module has the name of its extra
    "kafka": ("kafka", "KafkaSource"),
    "kafkas": ("kafka", "KafkaSource"),
    "amqp": ("rabbitmq", "RabbitSource"),
    "amqps": ("rabbitmq", "RabbitSource"),
    "redis": ("redis", "RedisSource"),
    "rediss": ("redis", "RedisSource"),
}
