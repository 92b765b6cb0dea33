"""The processes of the service benchmark: the server, the sink that it calls, and those that load.

All are on loopback, and end with the run. What they say is JSON.
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
"""Without what would configure the server."""


class Listener:
    """A process that tells where it listens, and answers there."""

    def __init__(self, command: list[str]) -> None:
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd="/", env=ENVIRONMENT, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._complaints,
        )  # fmt: skip
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            self.kill()
            sys.exit(f"{command[-1]} does not start: {last_line(self.complaints())}")
        self.host = f"127.0.0.1:{said.strip().strip('/').rpartition(':')[2]}"

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """What it answers, on a connection of its own."""
        connection = HTTPConnection(self.host, timeout=ASK_SECONDS)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"content-type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            sys.exit(f"{method} {path}: {answer.status} {said.decode()[:500]}")
        return json.loads(said)

    def cpu_seconds(self) -> float:
        """Its processor time so far, all threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def complaints(self) -> str:
        """The end of what it wrote to its standard error."""
        self._complaints.seek(0)
        return self._complaints.read()[-4000:]

    def kill(self) -> None:
        """End it without a chance to do anything more."""
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
        self._complaints.close()


class Server(Listener):
    """`tickwheel serve` on a store, one process."""

    def __init__(self, store: str) -> None:
        words = ["--store", store, "--listen", "127.0.0.1:0", "--allow-private-targets"]
        super().__init__(["-m", "tickwheel", "serve", *words])

    def put_service(self, name: str, endpoint: str, **settings: object) -> None:
        """Make a service whose tasks are sent to the endpoint."""
        service = {"protocol": "http", "endpoint": endpoint, **settings}
        self.ask("PUT", f"/v1/services/{name}", service)

    def state(self) -> str:
        """What it says of itself, for a message when something went wrong."""
        stats = self.ask("GET", "/v1/stats")
        stats.pop("wheel", None)
        return f"{json.dumps(stats)}\n{self.complaints()}"

    def finished(self) -> int:
        """How many tasks have finished and are recorded so."""
        return int(self.ask("GET", "/v1/stats")["ended"].get("finish", 0))


class Sink(Listener):
    """The sink; see service_sink.py."""

    def __init__(self) -> None:
        super().__init__([str(HERE / "service_sink.py")])

    def url(self, path: str) -> str:
        """Where it is called."""
        return f"http://{self.host}{path}"


def load(kind: str, server: Server, service: str, **options: object) -> dict[str, Any]:
    """The figures of one load; whatever was refused ends the run."""
    command = [str(HERE / "service_load.py"), kind, server.host, "--service", service]
    figures = said_by(command, options)
    if figures["refused"]:
        sys.exit(f"{kind}: refused, by status: {figures['refused']}")
    return figures


def bare_client(name: str, url: str, **options: object) -> dict[str, Any]:
    """The figures of an HTTP client alone, empty when it is not installed."""
    return said_by([str(HERE / "service_client.py"), name, url], options)


def said_by(command: list[str], options: dict[str, object]) -> dict[str, Any]:
    """What a process printed before it ended."""
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
    """Wait for a time of day."""
    time.sleep(max(0.0, instant - time.time()))
