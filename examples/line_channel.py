"""A channel of your own: due tasks reach a service over a line protocol on TCP.

    python examples/line_channel.py

A request is a line with the task's id, its attempt and the length of the payload, and then the
payload. The answer is one line: "ok", or "no" and a reason. `tests/test_line_channel.py` runs the
conformance suite over this channel.
"""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections import defaultdict
from urllib.parse import urlsplit

from tickwheel.durable import Scheduler
from tickwheel.durable.channel import UNSENT, Answer
from tickwheel.durable.histogram import Histogram
from tickwheel.values.task import Event


class LineChannel:
    """Sends each task on a connection of its own; an endpoint is line://host:port."""

    remote = True  # a task that was sent goes on elsewhere, whatever happens here
    trace = None

    def __init__(self):
        self.latencies = defaultdict(Histogram)
        self._calls = set()

    def semaphore(self, service):
        """Share nothing: each service has its own limit of calls."""
        return

    def interruptible(self, service):
        """Cancelling a call closes its connection."""
        return True

    def check(self, service):
        """Refuse an endpoint that cannot be called, when the service is put."""
        address_of(service)

    async def send(self, task, service, may_send):
        """Send a task; whatever goes wrong is an answer, never an exception."""
        started = time.perf_counter()
        call = asyncio.ensure_future(self._send(task, service, may_send))
        self._calls.add(call)
        tracing = contextlib.nullcontext() if self.trace is None else self.trace(task, service)
        try:
            with tracing as trace:
                answer = await wait_for(call)
                if trace is not None:
                    trace.end(answer)
                return answer
        finally:
            self._calls.discard(call)
            self.latencies[service.name].observe(time.perf_counter() - started)

    async def _send(self, task, service, may_send):
        try:
            reader, writer = await asyncio.open_connection(*address_of(service))
        except OSError as error:
            return Answer(Event.RETRY, error=f"no connection: {error}", healthy=False)
        try:
            if not may_send():  # another node may have the task by now
                return UNSENT
            writer.write(b"%s %d %d\n" % (task.id.encode(), task.attempt, len(task.body)))
            writer.write(task.body)
            word, _, reason = (await reader.readline()).decode().strip().partition(" ")
        except OSError as error:
            return Answer(Event.RETRY, error=f"no answer: {error}", healthy=False)
        finally:
            writer.close()
        if word == "ok":
            return Answer(Event.FINISH, healthy=True)
        return Answer(Event.RETRY, error=reason or "the connection was closed", healthy=False)

    def forget(self, name):
        """Drop the latencies of a service that was deleted."""
        self.latencies.pop(name, None)

    async def close(self):
        """End the calls that are under way."""
        for call in self._calls:
            call.cancel()


async def wait_for(call):
    """Return a call's answer, also if closing the channel has ended the call."""
    try:
        return await call
    except asyncio.CancelledError:
        if call.cancelled() and not asyncio.current_task().cancelling():
            return Answer(Event.RETRY, error="the channel was closed", healthy=None)
        raise


def address_of(service):
    """Return host and port of an endpoint."""
    parts = urlsplit(service.endpoint)
    if parts.scheme != "line" or not parts.hostname or not parts.port or parts.username:
        raise ValueError("the endpoint must be line://host:port")
    return parts.hostname, parts.port


async def serve(work):
    """Start a service: `work(id, payload)` returns the answer to each task."""

    async def answer(reader, writer):
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            task_id, _, length = (await reader.readline()).split()
            payload = await reader.readexactly(int(length))
            writer.write((await work(task_id.decode(), payload)).encode() + b"\n")
            await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


async def main():
    """Send a task to a service that refuses it once."""
    seen = set()

    async def work(task_id, payload):
        if task_id not in seen:
            seen.add(task_id)
            return "no the warehouse is closed"
        print(f"the warehouse got {payload.decode()}")
        return "ok"

    server = await serve(work)
    port = server.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        app = Scheduler(f"sqlite:///{folder}/tasks.db", channels={"line": LineChannel()})
        async with app:
            await app.put_service(
                "ship", protocol="line", endpoint=f"line://127.0.0.1:{port}", backoff=0.1
            )
            task = await app.submit("ship", {"order": 7}, delay=0.1)
            final = await app.wait(task.id)
            for attempt in await app.attempts(task.id):
                print(f"attempt {attempt.attempt}: {attempt.event}, {attempt.error}")
            print(f"the task is {final.state}")
    server.close()


if __name__ == "__main__":
    logging.getLogger("tickwheel").setLevel(logging.ERROR)  # the failure here is intended
    asyncio.run(main())
