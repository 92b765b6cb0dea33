"""The sync client's connections: `http.client`, with a list of idle connections."""

from __future__ import annotations

import select
import ssl
import threading
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPSConnection,
    IncompleteRead,
    RemoteDisconnected,
)
from ssl import SSLCertVerificationError
from typing import TYPE_CHECKING

from tickwheel.client.errors import ServerTimedOut, ServerUnavailable
from tickwheel.client.requests import (
    CONNECT_TIMEOUT_SECONDS,
    MAX_ANSWER_BYTES,
    Answer,
    answer_too_large,
)
from tickwheel.clock import SystemClock, forkable
from tickwheel.errors import certificate_reason

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from tickwheel.client.requests import Request, Server

MAX_IDLE_CONNECTIONS = 16
MAX_IDLE_SECONDS = 60.0  # a firewall may silently drop a connection that is idle for longer
READ_BYTES = 1 << 18


class Connections:
    """Send requests from any thread over connections that are kept for reuse.

    - Before reuse, a connection is checked: one that the server has closed is not used.
    - If a reused connection breaks before an answer begins, and the request is safe to repeat, it
      is sent again at once on a new one: the server may have closed it just then.
    - The child of a fork starts without connections: the parent's are left to the parent.
    """

    def __init__(self, server: Server, context: ssl.SSLContext | None) -> None:
        self._server = server
        self._context = context  # created on first use: loading certificates is slow
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._free: list[tuple[HTTPConnection, float]] = []
        self._closed = False
        forkable.add(self)

    def send(self, request: Request, timeout: float) -> Answer:
        """Send a request and return its answer, or raise `ServerUnavailable`."""
        until = self._clock.time() + timeout
        kept = self._take() if request.safe else None
        if kept is None:
            return self._exchange(self._connect(until), request, until)
        try:
            return self._exchange(kept, request, until)
        except ServerTimedOut:
            raise
        except ServerUnavailable:
            pass
        try:
            answer = self._exchange(self._connect(until), request, until)
        except ServerUnavailable as failure:
            failure.sent = True  # the first try was sent
            raise
        return answer._replace(resent=True)

    def _take(self) -> HTTPConnection | None:
        while True:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the client is closed")
                if not self._free:
                    return None
                connection, since = self._free.pop()
            fresh = self._clock.time() - since < MAX_IDLE_SECONDS
            if fresh and has_nothing_to_read(connection.sock):
                return connection
            connection.close()

    def _keep(self, connection: HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._free) < MAX_IDLE_CONNECTIONS:
                self._free.append((connection, self._clock.time()))
                return
        connection.close()

    def _connect(self, until: float) -> HTTPConnection:
        if self._closed:
            raise RuntimeError("the client is closed")
        server = self._server
        timeout = min(CONNECT_TIMEOUT_SECONDS, max(until - self._clock.time(), 0.001))
        connection: HTTPConnection
        if server.scheme == "https":
            if self._context is None:
                self._context = ssl.create_default_context()
            connection = HTTPSConnection(
                server.host, server.port, timeout=timeout, context=self._context
            )
        else:
            connection = HTTPConnection(server.host, server.port, timeout=timeout)
        try:
            connection.connect()
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | UnicodeError):
                where = f"{server.host}:{server.port}"
                raise ServerUnavailable(f"cannot connect to {where}: {reason_of(error)}") from error
            raise
        return connection

    def _exchange(self, connection: HTTPConnection, request: Request, until: float) -> Answer:
        try:
            answer, kept = self._send_and_receive(connection, request, until)
        except BaseException as error:
            connection.close()
            url = self._server.url
            if isinstance(error, TimeoutError):
                raise ServerTimedOut(f"{url} did not answer in time", sent=True) from error
            if isinstance(error, OSError | HTTPException):
                hint = ""
                if isinstance(error, RemoteDisconnected) and url.startswith("http:"):
                    hint = "; does it speak https?"
                raise ServerUnavailable(
                    f"the connection to {url} broke: {reason_of(error)}{hint}", sent=True
                ) from error
            raise
        if kept:
            self._keep(connection)
        else:
            connection.close()
        return answer

    def _send_and_receive(
        self, connection: HTTPConnection, request: Request, until: float
    ) -> tuple[Answer, bool]:
        """Send and receive; return the answer, and whether the connection can be reused."""
        server, sock = self._server, connection.sock
        sock.settimeout(self._seconds_left(until))
        connection.putrequest(
            request.method, server.prefix + request.path, skip_accept_encoding=True
        )
        put_headers(connection, server.headers(request))
        if request.body or request.method in ("POST", "PUT"):
            connection.putheader("content-length", str(len(request.body)))
        connection.endheaders(request.body or None)
        with connection.getresponse() as response:
            body = bytearray()
            while not response.isclosed():
                sock.settimeout(self._seconds_left(until))
                body += response.read(READ_BYTES)
                if len(body) > MAX_ANSWER_BYTES:
                    raise answer_too_large(response.status)
            if response.length:  # read(n) does not report a truncated body
                raise IncompleteRead(bytes(body), response.length)
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, bytes(body)), not response.will_close

    def _seconds_left(self, until: float) -> float:
        left = until - self._clock.time()
        if left <= 0:
            raise TimeoutError
        return left

    def close(self) -> None:
        """Close idle connections; those in use are closed after their answer."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for connection, _ in free:
            connection.close()

    def _after_fork_in_child(self) -> None:
        """In the child of a fork, close our copies; the parent's connections stay open."""
        self._lock = threading.Lock()
        free, self._free = self._free, []
        for connection, _ in free:
            connection.close()


def reason_of(error: BaseException) -> str:
    """Return an error's reason, or its type's name, without text that a server may have sent."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, SSLCertVerificationError):
        return certificate_reason(error)
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak https; does it speak http?"
    return getattr(error, "strerror", None) or type(error).__name__


def put_headers(connection: HTTPConnection, headers: Sequence[tuple[str, str]]) -> None:
    """Write the headers of a request."""
    for name, value in headers:
        connection.putheader(name, value)


def has_nothing_to_read(sock: socket.socket) -> bool:
    """Return whether an idle connection is still usable: no end of stream, no unexpected data."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return not poll.poll(0)
    return not select.select([sock], [], [], 0)[0]
