"""Processes of the service benchmark: the server, the sink that it calls, and the load.

All listen on loopback, and end with the run. They print JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self

from jvm import last_line

HERE = Path(__file__).resolve().parent
START_SECONDS = 20.0
STOP_SECONDS = 30.0
ASK_SECONDS = 30.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if "TICKWHEEL_" not in name}
"""The environment without variables that would configure the server."""


class Listener:
    """A process that prints its port, and answers requests there."""

    def __init__(self, command: list[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd="/", env=ENVIRONMENT, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        assert self._process.stdout is not None
        output = self._process.stdout.readline()
        if not output:
            self.kill()
            sys.exit(f"{command[-1]} does not start: {last_line(self.errors())}")
        self.host = f"127.0.0.1:{output.strip().strip('/').rpartition(':')[2]}"

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer to a request, on a new connection."""
        connection = HTTPConnection(self.host, timeout=ASK_SECONDS)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"content-type": "application/json"})
            answer = connection.getresponse()
            output = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            sys.exit(f"{method} {path}: {answer.status} {output.decode()[:500]}")
        return json.loads(output)

    def cpu_seconds(self) -> float:
        """Return its processor time so far, all threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def errors(self) -> str:
        """Return the end of its standard error."""
        self._errors.seek(0)
        return self._errors.read()[-4000:]

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


class Server(Listener):
    """`tickwheel serve` on a store, one process."""

    def __init__(self, store: str) -> None:
        words = ["--store", store, "--listen", "127.0.0.1:0", "--allow-private-targets"]
        super().__init__(["-m", "tickwheel", "serve", *words])

    def put_service(self, name: str, endpoint: str, **settings: object) -> None:
        """Create a service whose tasks are sent to the endpoint."""
        service = {"protocol": "http", "endpoint": endpoint, **settings}
        self.ask("PUT", f"/v1/services/{name}", service)

    def state(self) -> str:
        """Return the server's statistics and errors, for an error message."""
        stats = self.ask("GET", "/v1/stats")
        stats.pop("wheel", None)
        return f"{json.dumps(stats)}\n{self.errors()}"

    def finished(self) -> int:
        """Return how many tasks are recorded as finished."""
        return int(self.ask("GET", "/v1/stats")["ended"].get("finish", 0))


class Sink(Listener):
    """The sink; see service_sink.py."""

    def __init__(self) -> None:
        super().__init__([str(HERE / "service_sink.py")])

    def url(self, path: str) -> str:
        """Return the URL of a path."""
        return f"http://{self.host}{path}"


def load(kind: str, server: Server, service: str, **options: object) -> dict[str, Any]:
    """Return the figures of one load; exit if any request was refused."""
    command = [str(HERE / "service_load.py"), kind, server.host, "--service", service]
    figures = run_for_json(command, options)
    if figures["refused"]:
        sys.exit(f"{kind}: refused, by status: {figures['refused']}")
    return figures


def bare_client(name: str, url: str, **options: object) -> dict[str, Any]:
    """Return the figures of an HTTP client alone; empty if it is not installed."""
    return run_for_json([str(HERE / "service_client.py"), name, url], options)


def run_for_json(command: list[str], options: dict[str, object]) -> dict[str, Any]:
    """Run a process and return the JSON that it prints."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, *command, *words],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed: {done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def sleep_until(instant: float) -> None:
    """Sleep until a time of day."""
    time.sleep(max(0.0, instant - time.time()))
