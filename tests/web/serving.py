"""The API for tests, in two ways: the application alone in this process, and a real server.

    with Api("sqlite:///tasks.db") as api:                 # fast: no socket, a loop of its own
        task = api.post("/v1/tasks", {"service": "mail"}, status=201).json

    with Served("--store", url, cwd=tmp_path) as server:   # `python -m tickwheel serve`
        server.get("/healthz", status=200)

- Both check every answer: it has a request id, and an error is a problem document.
- The event loop of an `Api` runs only during a request and within `until`.
- A server ends with the test process, even if that is killed.
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import servers
from tickwheel.durable.directory.tokens import new_token
from tickwheel.durable.implementations import store_at
from tickwheel.durable.registry import Audit, Token
from tickwheel.durable.scheduler import Scheduler
from tickwheel.web.access import Guard
from tickwheel.web.app import App

PATIENCE = 30.0  # seconds until a test gives up waiting
PATCHED = str(Path(__file__).parent.parent / "service" / "patched")  # see its sitecustomize
JSON = "application/json"
PROBLEM = "application/problem+json"
HOST = "127.0.0.1:7380"
SECRET = "whsec_" + "c2VjcmV0LW9mLXRoZS10ZXN0cy10aGF0LW5vYm9keS1zZWVz"
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
UNKNOWN_ID = "0" * 32


class Answer:
    """An answer: its status, headers by lower-case name, and body."""

    def __init__(self, status, headers, body, *, bare=False):
        self.status = status
        self.bare = bare  # the answer to a HEAD request has no body
        self.headers = {name.lower(): value for name, value in headers}
        self.body = body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def media(self):
        return self.headers.get("content-type", "").partition(";")[0]

    @property
    def code(self):
        """The stable code of a problem, or None."""
        return self.json["code"] if self.media == PROBLEM else None

    @property
    def detail(self):
        return self.json["detail"]

    def check(self, status=None):
        """Check what holds for every answer of the API, and the status if one is given."""
        assert self.headers.get("x-request-id"), self
        if self.status >= 400 and self.media != JSON and not self.bare:
            check_problem(self)  # /readyz answers 503 with its own type
        if status is not None:
            assert self.status == status, self
        return self

    def refused(self, status, code):
        """Check that it is this problem; return it."""
        assert (self.status, self.code) == (status, code), self
        return self.json

    def __repr__(self):
        return f"<{self.status} {self.headers} {self.body[:2000]!r}>"


def check_problem(answer):
    """Check that an error is a problem document (RFC 9457) with a detail."""
    assert answer.media == PROBLEM, answer
    problem = answer.json
    assert problem["status"] == answer.status, answer
    assert re.fullmatch(r"[a-z_]+", problem["code"]), answer
    assert problem["type"] == f"urn:tickwheel:problem:{problem['code']}", answer
    assert problem["title"], answer
    assert len(problem["detail"]) > 5, answer


class Verbs:
    """Requests by method, for `Api` and `Served`."""

    def get(self, target, **options):
        return self.request("GET", target, **options)

    def post(self, target, body=None, **options):
        return self.request("POST", target, body, **options)

    def put(self, target, body=None, **options):
        return self.request("PUT", target, body, **options)

    def delete(self, target, **options):
        return self.request("DELETE", target, **options)

    def service(self, name="mail", endpoint="http://127.0.0.1:9/", **config):
        """Put a service; nothing listens at the default endpoint."""
        options = {key: config.pop(key) for key in ("token",) if key in config}
        answer = self.put(f"/v1/services/{name}", {"endpoint": endpoint, **config}, **options)
        assert answer.status in (200, 201), answer
        return answer.json

    def submit(self, service="mail", payload=None, **options):
        """Submit a task, by default due in an hour; return it."""
        given = {key: options.pop(key) for key in ("token",) if key in options}
        if "due_at" not in options:
            options.setdefault("delay", 3600)
        body = {"service": service, "payload": payload, **options}
        return self.post("/v1/tasks", body, status=201, **given).json


def nested(depth):
    """Return JSON of this nesting depth; brackets in strings do not count."""
    both, one = divmod(depth, 2)
    return b'{"[":[' * both + b"[" * one + b'"]"' + b"]" * one + b"]}" * both


def encoded(body, media, headers):
    """Return a body as bytes, and the headers that go with it."""
    found = {name.lower(): value for name, value in (headers or {}).items()}
    if body is not None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if media is not None:
            found.setdefault("content-type", media)
    return body, found


class Api(Verbs):
    """The application and its scheduler in this process, on a loop that only tests run."""

    def __init__(
        self, url, *, local=True, open_access=False, rate=None, loopback_only=True, limits=None,
        tracing=None, **options,
    ):  # fmt: skip
        options.setdefault("allow_private_targets", True)
        options.setdefault("grace", 0.5)
        self.runner = asyncio.Runner()
        self.scheduler = Scheduler(url, **options)
        self.run(self.scheduler.start())
        try:
            directory = self.scheduler.node.directory
            guard = Guard(directory, local=local, open_access=open_access, rate=rate)
            self.app = App(
                self.scheduler, guard, limits, loopback_only=loopback_only, tracing=tracing
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    @property
    def node(self):
        return self.scheduler.node

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def close(self):
        try:
            self.run(self.scheduler.stop())
        finally:
            self.runner.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def request(self, method, target, body=None, *, status=None, **options):
        answer = self.run(self.asked(method, target, body, **options))
        return answer.check(status)

    def together(self, *requests):
        """Make requests at the same time, each as (method, target, body, options)."""

        async def all_of_them():
            return await asyncio.gather(*(
                self.asked(method, target, body, **options)
                for method, target, body, options in requests
            ))  # fmt: skip

        return [answer.check() for answer in self.run(all_of_them())]

    async def asked(
        self, method, target, body=None, *, media=JSON, headers=None, token=None, parts=None
    ):
        """Send the application one request, as a server would, and return its answer."""
        body, found = encoded(body, media, headers)
        found.setdefault("host", HOST)
        if token is not None:
            found["authorization"] = f"Bearer {token}"
        if body is not None and parts is None:
            found.setdefault("content-length", str(len(body)))
        path, _, query = target.partition("?")
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode("latin-1"), "http_version": "1.1", "scheme": "http",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in found.items()],
        }  # fmt: skip
        chunks = list(parts) if parts is not None else [body or b""]
        sent = []

        async def receive():
            if not chunks:
                return {"type": "http.disconnect"}
            chunk = chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

        async def send(message):
            sent.append(message)

        await self.app(scope, receive, send)
        start, *rest = sent
        headers = [(name.decode(), value.decode("latin-1")) for name, value in start["headers"]]
        return Answer(start["status"], headers, b"".join(one["body"] for one in rest))

    def until(self, condition, what="the condition of the test"):
        """Run the loop until `condition()` is true, and return its value."""

        async def wait():
            async with asyncio.timeout(PATIENCE):
                while True:
                    found = condition()
                    if asyncio.iscoroutine(found):
                        found = await found
                    if found:
                        return found
                    await asyncio.sleep(0.002)

        try:
            return self.run(wait())
        except TimeoutError:
            raise AssertionError(f"not within {PATIENCE:g} s: {what}") from None

    def task_in(self, task_id, *states):
        """Wait until a task is in one of these states, and return it."""

        async def look():
            task = (await self.asked("GET", f"/v1/tasks/{task_id}")).json
            return task if task["state"] in states else None

        return self.until(look, f"task {task_id} is {' or '.join(states)}")

    def token(self, *scopes, **options):
        """Create a token, which is valid at once; return its text."""
        token, text = made_token(*scopes, **options)
        self.run(stored(self.node.store, token))
        self.run(self.node.directory.refresh())
        return text

    def revoke(self, text):
        """Revoke a token, which is refused at once."""
        self.run(revoked(self.node.store, text))
        self.run(self.node.directory.refresh())


def made_token(*scopes, namespace="*", rate=None, expires_at_ms=None, name="test"):
    """Return a token as it is stored, and its text."""
    token_id, digest, text = new_token()
    scopes = scopes or ("admin",)
    return Token(token_id, name, digest, namespace, scopes, rate, 1, expires_at_ms), text


async def stored(store, token):
    audit = Audit(1, "local", token.namespace, "token.create", token.id)
    await store.registry.put_token(token, audit)


async def revoked(store, text):
    token_id = text.split("_")[1]
    audit = Audit(1, "local", "", "token.revoke", token_id)
    assert await store.registry.delete_token(token_id, audit)


def on_store(url, work):
    """Run a coroutine function on a store, as the command line does."""

    async def do():
        store = store_at(url, shards=64)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(do())


def create_token(url, *scopes, **options):
    """Create a token in a store that a server may be using."""
    token, text = made_token(*scopes, **options)
    on_store(url, lambda store: stored(store, token))
    return text


class Served(Verbs):
    """A server: `python -m tickwheel serve` with some arguments, on any free port of loopback.

    - `constants`: values that replace constants of the package, by module and name.
    """

    def __init__(
        self, *arguments, cwd, listen="127.0.0.1:0", environment=None, ca=None, errors=False,
        descriptors=None, constants=None, namespace="",
    ):  # fmt: skip
        self.directory = Path(cwd)
        self.arguments = [*map(str, arguments), *(["--listen", listen] if listen else [])]
        self.environment = dict(environment or {})
        if constants:
            self.environment |= {"PYTHONPATH": PATCHED, "TEST_CONSTANTS": json.dumps(constants)}
        self.ca = ca
        self.errors = errors  # whether it may log errors
        self.descriptors = descriptors  # the limit of its file descriptors, or None
        self.namespace = namespace  # the path of its network namespace; empty: this one
        self.url = None
        self.token = None  # for requests without one of their own
        self.stderr = None  # a file descriptor to use instead of the log
        self.process = None
        self._local = threading.local()
        self._connections = []

    def launch(self):
        """Start it without waiting."""
        command = [sys.executable, "-m", "tickwheel", "serve", *self.arguments]
        if self.descriptors is not None:
            limit = f'ulimit -n {self.descriptors}; exec "$@"'
            command = ["/bin/sh", "-c", limit, "sh", *command]
        kept = {
            name: value
            for name, value in servers.clean_environment().items()
            if not name.startswith(("TICKWHEEL_", "OTEL_"))
        }
        with (self.directory / "server.log").open("ab") as log:
            self.process = servers.launch(
                command, namespace=self.namespace, stdout=subprocess.PIPE,
                stderr=log if self.stderr is None else self.stderr, cwd=self.directory,
                env=kept | self.environment,
            )  # fmt: skip
        return self

    def start(self):
        """Start it, and return once it has printed its URL."""
        self.launch()
        line = self.process.stdout.readline().decode()
        found = re.fullmatch(r"tickwheel: (https?://\S+)/\n", line)
        if not found:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"it does not start: {line!r}\n{self.log()}")
        self.url = found[1]
        return self

    @property
    def pid(self):
        return self.process.pid

    @property
    def address(self):
        parts = urlsplit(self.url)
        return parts.hostname, parts.port

    def log(self):
        """Return its log as text."""
        path = self.directory / "server.log"
        return path.read_text() if path.exists() else ""

    def lines(self):
        """Return the lines of its log, decoded from JSON."""
        return [json.loads(line) for line in self.log().splitlines()]

    def rss(self):
        """Return its resident memory in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, seconds=PATIENCE):
        """Wait for its end, and return the exit code."""
        return self.process.wait(seconds)

    def stop(self):
        """Stop it with SIGTERM, and return the exit code."""
        self.hang_up()
        if self.process.poll() is None:
            self.signal()
        return self.wait()

    def kill(self):
        """Kill it and all its descendants."""
        if self.process.poll() is None:
            for pid in [self.pid, *servers._descendants(self.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)

    def hang_up(self):
        """Close the kept connections."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._local = threading.local()

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, *_):
        try:
            code = self.stop()
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self.process.stdout.close()
        if kind is None and not self.errors:
            assert code == 0, self.log()
            assert '"level": "error"' not in self.log(), self.log()

    def connect(self):
        """Open a new plain connection."""
        return socket.create_connection(self.address, PATIENCE)

    def request(
        self, method, target, body=None, *, status=None, media=JSON, headers=None, token=None
    ):
        """Make a request on the kept connection of this thread."""
        body, found = encoded(body, media, headers)
        token = token or self.token
        if token is not None:
            found["authorization"] = f"Bearer {token}"
        for last in (False, True):
            connection = getattr(self._local, "connection", None)
            fresh = connection is None
            if fresh:
                connection = self._local.connection = self._connection()
            try:
                connection.request(method, target, body, found)
                response = connection.getresponse()
                headers, text = response.getheaders(), response.read()
                answer = Answer(response.status, headers, text, bare=method == "HEAD")
            except (ConnectionError, http.client.HTTPException):
                connection.close()
                self._local.connection = None
                if fresh or last:
                    raise
                continue  # the server closed an idle connection
            if response.will_close:
                connection.close()
                self._local.connection = None
            return answer.check(status)
        raise AssertionError

    def _connection(self):
        host, port = self.address
        if self.url.startswith("https"):
            context = ssl.create_default_context(cafile=self.ca)
            made = http.client.HTTPSConnection(host, port, timeout=PATIENCE, context=context)
        else:
            made = http.client.HTTPConnection(host, port, timeout=PATIENCE)
        self._connections.append(made)
        return made

    def task_in(self, task_id, *states, **options):
        """Wait until a task is in one of these states, and return it."""
        limit = time.monotonic() + PATIENCE
        while True:
            task = self.get(f"/v1/tasks/{task_id}", status=200, **options).json
            if task["state"] in states:
                return task
            assert time.monotonic() < limit, f"{task}\n{self.log()[-5000:]}"
            time.sleep(0.005)


def ended(server):
    """Return the exit code of a server that ends by itself, and its last log line."""
    server.launch()
    try:
        out, _ = server.process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()
        raise
    assert out == b""
    lines = server.log().splitlines()
    last = lines[-1] if lines else ""
    return server.process.returncode, json.loads(last)["message"] if last[:1] == "{" else last


def wait_until(condition, what):
    """Wait until a condition holds that another process fulfils."""
    servers.wait_until(condition, what, PATIENCE)
