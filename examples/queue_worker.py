"""Orders that expire, through a message broker: tickwheel publishes, a worker handles and reports.

    python examples/queue_worker.py nats://127.0.0.1:4222
    python examples/queue_worker.py kafka://127.0.0.1:9092
    python examples/queue_worker.py redis://127.0.0.1:6379/0
    python examples/queue_worker.py amqp://guest:guest@127.0.0.1:5672/

A due task becomes a signed message. The worker verifies it, handles each task once, and reports the
outcome; then it acknowledges the message. Here scheduler and worker are in one process; a worker
elsewhere takes `AsyncClient().feedback` instead of `app.feedback`.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import tempfile

from tickwheel.durable import Scheduler
from tickwheel.receiver import Receiver, Settlement
from tickwheel.values.signature import new_secret

SECRET = new_secret()
receiver = Receiver(SECRET, tolerance=None)  # a message may wait in the queue for long


async def close_order(delivery):
    """Handle a task; the return value is its result."""
    print(f"closing order {delivery.payload['order']}, attempt {delivery.attempt}", flush=True)
    return {"closed": delivery.payload["order"]}


async def nats_worker(url, app, ready):
    """Handle the messages of a subject, each by one worker of the group `workers`."""
    import nats  # noqa: PLC0415 - the other brokers need other packages

    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name="ORDERS", subjects=["orders.*"])
    messages = await stream.pull_subscribe("orders.due", durable="workers")
    ready.set_result(("nats", f"{url}?subject=orders.due"))
    while True:
        for message in await messages.fetch(100, timeout=60):
            settlement = await handle(message.headers, message.data, app)
            if settlement is Settlement.ACKNOWLEDGE:
                await message.ack()
            elif settlement is Settlement.RETRY:
                await message.nak(delay=1)
            else:
                await message.term()


async def kafka_worker(url, app, ready):
    """Handle the records of a topic."""
    from aiokafka import AIOKafkaConsumer  # noqa: PLC0415
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic  # noqa: PLC0415

    broker = url.removeprefix("kafka://")
    admin = AIOKafkaAdminClient(bootstrap_servers=broker)
    await admin.start()
    await admin.create_topics([NewTopic("orders", 1, 1)])
    await admin.close()
    consumer = AIOKafkaConsumer(
        "orders", bootstrap_servers=broker, group_id="workers", enable_auto_commit=False,
        auto_offset_reset="earliest",
    )  # fmt: skip
    async with consumer:
        ready.set_result(("kafka", f"{url}?topic=orders"))
        async for record in consumer:
            while await handle(record.headers, record.value, app) is Settlement.RETRY:
                await asyncio.sleep(1)  # later records of the partition wait
            await consumer.commit()


async def redis_worker(url, app, ready):
    """Handle the entries of a stream."""
    from redis.asyncio import Redis  # noqa: PLC0415
    from redis.exceptions import ResponseError  # noqa: PLC0415

    me, start = f"{socket.gethostname()}-{os.getpid()}", "0-0"
    async with Redis.from_url(url) as client:
        with contextlib.suppress(ResponseError):  # the group exists
            await client.xgroup_create("orders", "workers", id="0", mkstream=True)
        ready.set_result(("redis", f"{url}?stream=orders"))
        while True:
            # First the entries that a worker took a minute ago and has not acknowledged.
            start, entries, *_ = await client.xautoclaim(
                "orders", "workers", me, min_idle_time=60_000, start_id=start, count=100
            )
            if not entries:
                read = await client.xreadgroup(
                    "workers", me, {"orders": ">"}, count=100, block=1000
                )
                entries = [entry for _, found in read or () for entry in found]
            for entry_id, fields in entries:
                if await handle(fields, fields[b"payload"], app) is not Settlement.RETRY:
                    await client.xack("orders", "workers", entry_id)


async def rabbitmq_worker(url, app, ready):
    """Handle the messages of a queue."""
    import aiormq  # noqa: PLC0415

    async with await aiormq.connect(url) as connection:
        channel = await connection.channel()

        async def receive(message):
            headers, tag = message.header.properties.headers, message.delivery_tag
            settlement = await handle(headers, message.body, app)
            if settlement is Settlement.ACKNOWLEDGE:
                await channel.basic_ack(tag)
            elif settlement is Settlement.RETRY:
                await asyncio.sleep(1)
                await channel.basic_nack(tag, requeue=True)
            else:
                await channel.basic_reject(tag, requeue=False)

        await channel.queue_declare("orders.due", durable=True)
        await channel.basic_qos(prefetch_count=100)
        await channel.basic_consume("orders.due", receive)
        ready.set_result(("rabbitmq", f"{url}?routing_key=orders.due"))
        await asyncio.wait([connection.closing])


async def handle(headers, body, app):
    """Handle a message, report the outcome of its task, and return what to do with the message."""
    settlement = await receiver.consume_async(headers, body, close_order, feedback=app.feedback)
    print(f"the message: {settlement.value}", flush=True)
    return settlement


WORKERS = {
    "nats": nats_worker, "kafka": kafka_worker, "redis": redis_worker, "amqp": rabbitmq_worker,
}  # fmt: skip


async def main(url):
    """Submit an order that is due in a second, and print what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        app = Scheduler(f"sqlite:///{folder}/tasks.db", allow_private_targets=True)
        async with app:
            ready = asyncio.get_running_loop().create_future()
            worker = WORKERS[url.partition("://")[0]]
            working = asyncio.ensure_future(worker(url, app, ready))
            await asyncio.wait([working, ready], return_when=asyncio.FIRST_COMPLETED)
            protocol, endpoint = ready.result() if ready.done() else working.result()
            await app.put_service(
                "close-order", protocol=protocol, endpoint=endpoint, secret=SECRET,
                confirmed="running", feedback_timeout=60,
            )  # fmt: skip
            task = await app.submit("close-order", {"order": "o-1"}, delay=1)
            ended = await app.wait(task.id, timeout=60)
            print(f"the task: {ended.state}, {ended.result}", flush=True)
            await asyncio.sleep(0.1)  # the worker acknowledges
            working.cancel()
            await asyncio.wait([working], timeout=5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Handle the tasks of a queue.")
    parser.add_argument(
        "broker",
        help="nats://HOST:PORT, kafka://HOST:PORT, redis://HOST:PORT/0 or amqp://USER:PASSWORD@HOST:PORT/",
    )
    asyncio.run(main(parser.parse_args().broker))
