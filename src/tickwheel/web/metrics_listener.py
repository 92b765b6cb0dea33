"""Answers Prometheus in a process without a web server: GET /metrics, and nothing else.

It needs no package. It has no TLS and no tokens: listen on loopback, or in a network of your own.
On loopback the Host header must be a loopback name, so that no web page can read the metrics
through a name that it points here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import re
import socket
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.durable.exposition import MEDIA_TYPE, collect_families, exposition, store_counts
from tickwheel.errors import NotStarted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from tickwheel.config import Listen
    from tickwheel.durable.scheduler import Scheduler

    Render = Callable[[], Awaitable[str]]

TIMEOUT_SECONDS = 10.0  # for a request and its response
MAX_CONNECTIONS = 32
LISTEN_BACKLOG = 128
LOOPBACK_HOST = re.compile(rb"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?", re.IGNORECASE)
HOST_HEADER = re.compile(rb"\r\nhost:[ \t]*([^\r\n]*?)[ \t]*\r\n", re.IGNORECASE)


class Shared(NamedTuple):
    """The part of one worker in the metrics of several: each of them accepts from `listener`."""

    listener: int
    number: int
    workers: int
    directory: str

    @classmethod
    def from_text(cls, text: str) -> Shared:
        """Return it from its fields, separated by commas."""
        listener, number, workers, directory = text.split(",", 3)
        return cls(int(listener), int(number), int(workers), directory)

    def to_text(self) -> str:
        """Return it for a command line."""
        return ",".join(map(str, self))


def bind_listener(
    address: Listen, backlog: int = LISTEN_BACKLOG, *, flag: str = "--listen"
) -> socket.socket:
    """Return a socket that listens on an address; an error names the address."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server(tuple(address), family=family, backlog=backlog)
    except OSError as error:
        raise listen_error(address, error, flag) from error


def listen_error(address: Listen, error: OSError, flag: str) -> OSError:
    """Return the error for an address that cannot be listened on; it names the address."""
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        why = f"{os.strerror(error.errno)}: `{flag} HOST:PORT` chooses another"
    return OSError(f"{address}: {why}")


def metrics_url(address: Listen, listener: socket.socket) -> str:
    """Return the URL for Prometheus."""
    return f"http://{address._replace(port=listener.getsockname()[1])}/metrics"


@contextlib.contextmanager
def share_listener(address: Listen) -> Iterator[tuple[socket.socket, str]]:
    """Give the listener and the directory that several workers share."""
    try:
        from tickwheel.web.worker_metrics import socket_directory  # noqa: PLC0415 - needs msgspec
    except ImportError as missing:
        text = f"{missing}; metrics of several processes need: pip install 'tickwheel[server]'"
        raise ImportError(text) from missing
    bound = bind_listener(address, flag="--metrics-listen")
    with bound as listener, socket_directory() as directory:
        yield listener, directory


@contextlib.asynccontextmanager
async def answer_as_worker(
    scheduler: Scheduler, shared: Shared, orphaned: Callable[[], bool]
) -> AsyncIterator[None]:
    """Answer with the metrics of all workers; if `orphaned` at the end, remove the directory."""
    from tickwheel.web.worker_metrics import WorkerMetrics  # noqa: PLC0415 - needs msgspec

    node, number = scheduler.node, shared.number
    workers = WorkerMetrics(
        number, shared.workers, shared.directory,
        lambda within, counts: collect_families(node, counts, within, number),
    )  # fmt: skip

    async def render() -> str:
        return exposition(await workers.merge(None, store_counts(node.store)))

    await workers.open()
    try:
        async with answer_scrapes(socket.socket(fileno=shared.listener), render):
            yield
    finally:
        workers.close(last=orphaned())


@contextlib.asynccontextmanager
async def answer_scrapes(listener: socket.socket, render: Render) -> AsyncIterator[None]:
    """Answer requests on a socket with the text that `render` returns, until the end."""
    loopback_only = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    connections = 0

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            if connections > MAX_CONNECTIONS:
                raise ConnectionRefusedError
            async with asyncio.timeout(TIMEOUT_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await response_to(head, render, loopback_only=loopback_only))
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):  # TimeoutError is an OSError
            pass
        finally:
            writer.transport.abort()  # whatever the client has not read by now
            connections -= 1

    server = await asyncio.start_server(respond, sock=listener)
    try:
        yield
    finally:
        server.close()


async def response_to(head: bytes, render: Render, *, loopback_only: bool) -> bytes:
    """Return the response to the head of a request."""
    method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    status, body = "404 Not Found", b"the metrics are at /metrics\n"
    host = HOST_HEADER.search(head)
    if loopback_only and not (host and LOOPBACK_HOST.fullmatch(host[1])):
        status, body = "403 Forbidden", b"the host header must be localhost or 127.0.0.1\n"
    elif method not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed", b"GET /metrics\n"
    elif path == b"/metrics":
        try:
            status, body = "200 OK", (await render()).encode()
        except NotStarted as error:
            status, body = "503 Service Unavailable", f"{error}\n".encode()
    lines = [
        f"HTTP/1.1 {status}", f"Content-Type: {MEDIA_TYPE}", f"Content-Length: {len(body)}",
        "Connection: close", "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + (b"" if method == b"HEAD" else body)
