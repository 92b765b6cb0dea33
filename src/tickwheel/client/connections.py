"""Kept connections of the sync client: `http.client`, and a list of those that are free."""

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
from tickwheel.client.requests import CONNECT_TIMEOUT, MAX_ANSWER, Answer, too_long
from tickwheel.clock import SystemClock, forkable

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from tickwheel.client.requests import Request, Server

KEPT = 16
KEPT_SECONDS = 60.0  # after which a firewall on the way may have forgotten it, and tells nobody
PIECE = 1 << 18


class Connections:
    """Sends requests of any thread over connections that are kept for the next.

    - A kept connection that the server has closed is not used: it is looked at before.
    - One that breaks before an answer began is replaced by a fresh one at once, when the request is
      safe to repeat: the server may have closed it while the request was on its way.
    - In the child of a fork there are none yet: the parent's are left to the parent.
    """

    def __init__(self, server: Server, context: ssl.SSLContext | None) -> None:
        self._server = server
        self._context = context  # made when it is needed: reading the authorities takes a while
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._free: list[tuple[HTTPConnection, float]] = []
        self._closed = False
        forkable.add(self)

    def send(self, request: Request, timeout: float) -> Answer:
        """Send a request and return its answer; else `ServerUnavailable`."""
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
            failure.sent = True  # the first was
            raise
        return answer._replace(again=True)

    def _take(self) -> HTTPConnection | None:
        while True:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the client is closed")
                if not self._free:
                    return None
                connection, since = self._free.pop()
            if self._clock.time() - since < KEPT_SECONDS and is_quiet(connection.sock):
                return connection
            connection.close()

    def _keep(self, connection: HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._free) < KEPT:
                self._free.append((connection, self._clock.time()))
                return
        connection.close()

    def _connect(self, until: float) -> HTTPConnection:
        if self._closed:
            raise RuntimeError("the client is closed")
        server = self._server
        timeout = min(CONNECT_TIMEOUT, max(until - self._clock.time(), 0.001))
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
            answer, kept = self._talk(connection, request, until)
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

    def _talk(
        self, connection: HTTPConnection, request: Request, until: float
    ) -> tuple[Answer, bool]:
        """Send and receive; the answer, and whether the connection is as good as new."""
        server, sock = self._server, connection.sock
        sock.settimeout(self._left(until))
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
                sock.settimeout(self._left(until))
                body += response.read(PIECE)
                if len(body) > MAX_ANSWER:
                    raise too_long(response.status)
            if response.length:  # read() of a part does not tell that the rest never came
                raise IncompleteRead(bytes(body), response.length)
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, bytes(body)), not response.will_close

    def _left(self, until: float) -> float:
        left = until - self._clock.time()
        if left <= 0:
            raise TimeoutError
        return left

    def close(self) -> None:
        """Close all that are free; those in use are closed after their answer."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for connection, _ in free:
            connection.close()

    def _forked(self) -> None:
        """In the child of a fork: close our ends, which the parent does not notice."""
        self._lock = threading.Lock()
        free, self._free = self._free, []
        for connection, _ in free:
            connection.close()


def reason_of(error: BaseException) -> str:
    """Return what an error says, without what a server may have sent: its type says enough."""
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak https; does it speak http?"
    return getattr(error, "strerror", None) or type(error).__name__


def put_headers(connection: HTTPConnection, headers: Sequence[tuple[str, str]]) -> None:
    """Write the headers of a request."""
    for name, value in headers:
        connection.putheader(name, value)


def is_quiet(sock: socket.socket) -> bool:
    """Say whether a connection that waits has nothing to read: an end, or what nobody asked for."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return not poll.poll(0)
    return not select.select([sock], [], [], 0)[0]
