"""A server on a real socket that answers by a script, and can misbehave."""

import json
import socket
import struct
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

TASK = {
    "id": "0" * 31 + "1",
    "service": "mail",
    "payload": {"to": "ada"},
    "key": None,
    "state": "delay",
    "due_at": "2026-11-15T12:00:00.000Z",
    "shard": 3,
    "attempt": 0,
    "failures": 0,
    "max_attempts": 5,
    "created_at": "2026-11-15T11:00:00.000Z",
    "updated_at": "2026-11-15T11:00:00.001Z",
    "result": None,
    "error": None,
    "priority": 0,
    "timeout": None,
    "deadline": None,
    "replay_of": None,
    "replayed_as": None,
    "node": None,
    "epoch": 0,
}


class Asked(NamedTuple):
    """A request as received."""

    method: str
    path: str
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Reply(NamedTuple):
    """An answer; `body` may be a document or bytes."""

    status: int = 200
    body: object = b""
    headers: dict = {}  # noqa: RUF012

    @property
    def sent(self):
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def problem(status, code, detail="it is so", headers=None, **extra):
    """Return a problem document as an answer."""
    document = {"type": f"urn:tickwheel:problem:{code}", "title": "No", "status": status}
    return Reply(status, {**document, "detail": detail, "code": code, **extra}, headers or {})


CLOSE, RESET, HALF, GARBAGE, HANG = "close", "reset", "half", "garbage", "hang"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def answer(self):
        fake = self.server.fake
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, self.path, headers, body)
        with fake.lock:
            fake.asked.append(asked)
            reply = fake.script.popleft() if fake.script else fake.otherwise
        if callable(reply):
            reply = reply(asked)
        if isinstance(reply, str):
            self.misbehave(reply)
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.status != 204:
            self.send_header("content-length", str(len(reply.sent)))
        self.end_headers()
        self.wfile.write(reply.sent)

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

    def misbehave(self, how):
        self.close_connection = True
        if how == RESET:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        elif how == HALF:
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
        elif how == GARBAGE:
            self.wfile.write(b"SMTP ready when you are\r\n\r\n")
        elif how == HANG:
            self.server.fake.stopping.wait(60)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 100

    def get_request(self):
        connection, address = super().get_request()
        with self.fake.lock:
            self.fake.accepted += 1
            self.fake.open.add(connection)
        return connection, address

    def shutdown_request(self, request):
        with self.fake.lock:
            self.fake.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        pass


class FakeServer:
    """Answers from `script`, in order, then `otherwise`; `asked` records the requests."""

    def __init__(self, tls=None):
        self._tls = tls
        self.lock = threading.Lock()
        self.asked = []
        self.script = deque()
        self.otherwise = Reply(200, {"items": [], "next_cursor": None})
        self.accepted = 0
        self.open = set()
        self.port = 0
        self.start()

    @property
    def url(self):
        return f"https://localhost:{self.port}" if self._tls else f"http://127.0.0.1:{self.port}"

    def say(self, *replies):
        """Append answers to the script."""
        self.script.extend(replies)

    def start(self):
        """Listen, on the same port as before."""
        self.stopping = threading.Event()
        self._server = Server(("127.0.0.1", self.port), Handler, bind_and_activate=True)
        self._server.fake = self
        if self._tls:
            self._server.socket = self._tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self):
        """Stop like a killed process, with all connections."""
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self.hang_up()
        self._server.server_close()

    def hang_up(self):
        """Close every connection from this side, and wait for their threads."""
        with self.lock:
            connections = list(self.open)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # already closed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
