"""A real server as a child process, and a real receiver that it calls."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from servers import free_port
from tickwheel.receiver import Accepted, Receiver
from tickwheel.values.signature import new_secret

PATIENCE = 50.0


def until(condition):
    """Wait until a condition on another process is true; return its value."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen")


class Service:
    """`tickwheel serve` on SQLite, on the same port through kills and restarts."""

    def __init__(self, folder):
        self._store = f"sqlite:///{folder}/tasks.db"
        self._log = (folder / "server.log").open("ab")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = [
            sys.executable, "-m", "tickwheel", "serve", "--store", self._store,
            "--listen", f"127.0.0.1:{self.port}", "--allow-private-targets",
        ]  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if "TICKWHEEL" not in name}
        self.process = subprocess.Popen(
            command, env=kept, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        line = self.process.stdout.readline()
        assert self.url in line, line

    def kill(self):
        self._end(signal.SIGKILL)

    def close(self):
        self._end(signal.SIGTERM)
        self._log.close()

    def _end(self, how):
        self.process.send_signal(how)
        self.process.wait(PATIENCE)
        self.process.stdout.close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        handler = self.server.handlers[urlsplit(self.path).path]
        try:
            reply = self.server.receiver.answer(self.headers.items(), body, handler)
        except LookupError:
            reply = (500, [], b"")
        self.send_response(reply[0])
        for name, value in reply[1]:
            self.send_header(name, value)
        if reply[0] != 204:
            self.send_header("content-length", str(len(reply[2])))
        self.end_headers()
        self.wfile.write(reply[2])

    def log_message(self, *_):
        pass


def double(delivery):
    return delivery.payload * 2


def fail(_):
    raise LookupError


class Callee:
    """A receiver of signed calls: /double, /accept and /fail."""

    def __init__(self):
        self.secret = new_secret()
        self.accepted = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.receiver = Receiver(self.secret)
        self._server.handlers = {"/double": double, "/accept": self._accept, "/fail": fail}
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def _accept(self, delivery):
        self.accepted[delivery.task_id] = delivery
        return Accepted()

    def endpoint(self, path):
        return f"http://127.0.0.1:{self._server.server_port}/{path}"

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Forwarder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        inner = HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        inner.request(self.command, self.path, body, dict(self.headers.items()))
        with contextlib.closing(inner), inner.getresponse() as answer:
            document = answer.read()
        if self.server.lose:
            self.server.lose = False
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(document)

    do_GET = do_POST = do_PUT = do_DELETE = forward  # noqa: N815

    def log_message(self, *_):
        pass


class Lossy:
    """A proxy between a client and a server that can lose an answer."""

    def __init__(self, port):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Forwarder)
        self._server.daemon_threads = True
        self._server.port = port
        self._server.lose = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def lose_one(self):
        """Forward the next request, and close the client's connection without the answer."""
        self._server.lose = True

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
