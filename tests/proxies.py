"""A TCP proxy between a client and a server, with faults that a test sets while it runs."""

import asyncio
import random
import threading
from urllib.parse import urlsplit

import servers

CHUNK = 4096  # bytes that are forwarded at a time


class Proxy:
    """Forwards connections to a port, on a thread, while it is entered.

    - `target`: the address that it forwards to; `host`: the address that it listens on.
    - `delays`: the seconds that each piece waits on its way to the server, and back.
    - `rate`: bytes per second from the server to all clients together; None: no limit.
    - `loses`: the share of lost answers: the request has reached the server, but the connection is
      closed instead of answered. An answer is what arrives in one piece.
    - `silent`: nothing is forwarded in either direction, and connections stay open.
    - `passed`: the bytes received from the server so far; `sent`: those from the clients.
    """

    def __init__(self, port, *, seed=0, target="127.0.0.1", host="127.0.0.1"):
        self.host = host
        self.delays = (0.0, 0.0)
        self.rate = None
        self.loses = 0.0
        self.silent = False
        self.passed = 0
        self.sent = 0
        self.port = 0
        self._target = (target, port)
        self._chance = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server = None
        self._writers = set()
        self._readers = set()
        self._muted = set()
        self._tasks = set()
        self._turn = None

    def __enter__(self):
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *_):
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def url_for(self, url):
        """Return a server's URL with the address of the proxy."""
        parts = urlsplit(url)
        user = parts.netloc.rpartition("@")[0]
        place = f"{self.host}:{self.port}"
        return parts._replace(netloc=f"{user}@{place}" if user else place).geturl()

    def heal(self):
        """End all faults; open connections stay open."""
        self.rate, self.loses, self.silent, self.delays = None, 0.0, False, (0.0, 0.0)

    def cut(self):
        """Close all connections."""
        self._run(self._cut())

    def mute(self):
        """Forward nothing more on the connections that are open now, as a forgetful NAT does."""
        self._muted |= self._readers

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self):
        self._turn = asyncio.Lock()
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self):
        await servers.close_listener(self._server)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # new ones may arrive
            await self._cut()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)

    async def _cut(self):
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        self._readers |= {reader, there}
        passing = (self._pass(reader, back, self._request), self._pass(there, writer, self._answer))
        ways = {asyncio.ensure_future(way) for way in passing}
        self._tasks |= ways
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self._tasks -= ways
            self._readers -= {reader, there}
            self._muted -= {reader, there}
            for one in (writer, back):
                self._writers.discard(one)
                one.transport.abort()
            self._tasks.discard(asyncio.current_task())

    async def _pass(self, reader, writer, faulty):
        try:
            while data := await reader.read(CHUNK):
                while self.silent or reader in self._muted:
                    await asyncio.sleep(0.01)
                if await faulty(len(data)):
                    return
                writer.write(data)
                await writer.drain()
        except OSError:
            return

    async def _request(self, size):
        self.sent += size
        await asyncio.sleep(self.delays[0])
        return False

    async def _answer(self, size):
        """Wait for the time that the bytes take; return whether they are lost."""
        self.passed += size
        await asyncio.sleep(self.delays[1])
        if self.rate is not None:
            async with self._turn:
                await asyncio.sleep(size / self.rate)
        return self._chance.random() < self.loses
