"""What a test of sources does with each broker: publish, make a source, read dead letters."""

import asyncio
import itertools
import json

import aiormq
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiormq import spec
from redis.asyncio import Redis

from tickwheel.consumer import source_at

WINDOW = 500  # messages that are published together

_names = itertools.count(1)


class Broker:
    """A queue of its own on a server that others use, too."""

    def __init__(self, server):
        self.server = server
        self.name = f"tasks-{next(_names)}"
        self.dead = f"{self.name}-dead"

    def source(self, *, dead_letter=False, **options):
        dead = self.dead if dead_letter else None
        return source_at(self.server.url, self.name, dead_letter=dead, **options)

    async def create(self):
        """Create what the source does not create itself."""

    async def publish(self, bodies):
        raise NotImplementedError

    async def dead_letters(self, count):
        """Return bodies and errors of the dead letters."""
        raise NotImplementedError


class KafkaBroker(Broker):
    async def create(self, partitions=2):
        await self.server._create_topic(self.name, partitions)
        await self.server._create_topic(self.dead, 1)

    async def publish(self, bodies):
        async with AIOKafkaProducer(bootstrap_servers=self.server.address) as producer:
            sent = [await producer.send(self.name, body) for body in bodies]
            await asyncio.gather(*sent)

    async def dead_letters(self, count):
        found = await self.dead_letter_records(count)
        return [(one.value, dict(one.headers)["tickwheel-error"].decode()) for one in found]

    async def dead_letter_records(self, count):
        consumer = AIOKafkaConsumer(
            self.dead, bootstrap_servers=self.server.address, auto_offset_reset="earliest"
        )
        async with consumer:
            return [await consumer.getone() for _ in range(count)]


class RabbitBroker(Broker):
    async def create(self):
        connection = await aiormq.connect(self.server.url)
        channel = await connection.channel()
        for queue in (self.name, self.dead):
            await channel.queue_declare(queue, durable=True)
        await connection.close()

    async def publish(self, bodies):
        connection = await aiormq.connect(self.server.url)
        channel = await connection.channel()

        async def publish(body):
            message_id = f"{self.name}-{next(_names)}"
            properties = spec.Basic.Properties(message_id=message_id, delivery_mode=2)
            await channel.basic_publish(body, routing_key=self.name, properties=properties)

        for start in range(0, len(bodies), WINDOW):
            await asyncio.gather(*map(publish, bodies[start : start + WINDOW]))
        await connection.close()

    async def dead_letters(self, count):
        connection = await aiormq.connect(self.server.url)
        channel = await connection.channel()
        found = [await channel.basic_get(self.dead, no_ack=True) for _ in range(count)]
        await connection.close()
        return [(one.body, one.header.properties.headers["tickwheel-error"]) for one in found]


class RedisBroker(Broker):
    async def publish(self, bodies):
        async with Redis.from_url(self.server.url) as redis:
            for start in range(0, len(bodies), WINDOW):
                pipeline = redis.pipeline(transaction=False)
                for body in bodies[start : start + WINDOW]:
                    pipeline.xadd(self.name, {"body": body})
                await pipeline.execute()

    async def dead_letters(self, count):
        async with Redis.from_url(self.server.url) as redis:
            found = [fields for _, fields in await redis.xrange(self.dead, count=count)]
        return [(one[b"body"], one[b"tickwheel-error"].decode()) for one in found]


BROKERS = {"kafka": KafkaBroker, "rabbit": RabbitBroker, "redis": RedisBroker}


def task(number, **options):
    """Return a message: the JSON of a task that is due in an hour."""
    return json.dumps({"service": "work", "payload": number, "delay": 3600, **options}).encode()
