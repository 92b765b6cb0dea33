"""Request timeouts in an asyncio server: every one of them on a wheel.

The server answers "sleep 0.2" after that time, unless it is more than `REQUEST` seconds; and it
hangs up on a client that sends nothing for `SILENCE` seconds. Almost all of these timeouts are
cancelled, which on this loop frees them at once, with everything they refer to.

    python examples/request_timeouts.py
"""

import asyncio
import time

import tickwheel

REQUEST = 0.3
SILENCE = 0.5
STARTED = time.monotonic()


def say(text):
    """Print a message with the time."""
    print(f"{time.monotonic() - STARTED:5.2f} s  {text}", flush=True)


async def serve(reader, writer):
    """Answer one client until it disconnects or falls silent."""
    try:
        while line := await asyncio.wait_for(reader.readline(), SILENCE):
            writer.write(await answer(float(line.split()[1])) + b"\n")
            await writer.drain()
    except TimeoutError:
        say("server: a client fell silent, hanging up")
    finally:
        writer.close()


async def answer(seconds):
    """Do the work of a request, within its timeout."""
    try:
        async with asyncio.timeout(REQUEST):
            await asyncio.sleep(seconds)
    except TimeoutError:
        return b"503 took too long"
    return b"200 ok"


async def client(name, port, *requests):
    """Send each of `requests`, then wait until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for seconds in requests:
        writer.write(b"sleep %f\n" % seconds)
        say(f"{name}: sleep {seconds} -> {(await reader.readline()).decode().strip()}")
    assert await reader.read() == b""
    say(f"{name}: the server hung up")
    writer.close()


async def burst(port, clients, requests):
    """Run many clients at once, all of them answered in time."""

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests):
            writer.write(b"sleep 0.001\n")
            assert await reader.readline() == b"200 ok\n"
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(one() for _ in range(clients)))
    say(f"burst: {clients} clients, {clients * requests} requests, no timeout fired")


async def main():
    """Run two clients, one of which asks for too much; then many."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        await asyncio.gather(client("alice", port, 0.1, 0.2), client("bob", port, 0.05, 9.0, 0.1))
        await burst(port, clients=50, requests=20)
    say("closed")


with asyncio.Runner(loop_factory=tickwheel.new_event_loop) as runner:
    runner.run(main())
