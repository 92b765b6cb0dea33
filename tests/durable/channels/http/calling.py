"""Calls of the HTTP channel, for its tests."""

from durable.stage import a_task
from tickwheel.values.service import Service


def now_ms_of(clock):
    """The store's time, which is this clock's."""
    return lambda: clock.time_ns() / 1e6


def task(body=b"{}", attempt=1, **more):
    return a_task(service="orders", body=body, attempt=attempt, **more)


def service(endpoint, **options):
    return Service(options.pop("name", "orders"), "http", endpoint=endpoint, **options)


async def sent(channel, receiver, path="/ok", **options):
    """The answer of the service at a path of the receiver."""
    return await channel.send(task(), service(receiver.url(path), **options))
