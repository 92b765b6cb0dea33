"""Measure beanstalkd, the system closest to the service: a server of delayed jobs, in C.

    python benchmarks/service_beanstalkd.py HOST:PORT

As a program it is the worker: it reserves, records the time, and deletes, on several connections.
beanstalkd's delays are whole seconds, so jobs for lateness are put one after another with the same
delay, and a burst is a paused tube that resumes.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from durable_peers import Amount
from durable_stage import Stage
from jvm import Missing
from service_load import quantile

sys.path.append(str(Path(__file__).parent / "peers"))

import ledger

LABEL = "beanstalkd, log on disk"
DURABILITY = "fsync per write"
GUARANTEE = "at least once: reserved again if a worker dies; outcomes not recorded; whole seconds"
THREADS = 8
DELAY = 2  # seconds
PAUSE = 8
"""Seconds for which a tube is paused while a burst is put into it."""

START_SECONDS = 10.0
PATIENCE = 20.0


class Client:
    """One connection, with the few commands of the protocol."""

    def __init__(self, host: str) -> None:
        address, _, port = host.partition(":")
        self._socket = socket.create_connection((address, int(port)), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._socket.makefile("rb")

    def put(self, number: int, delay: int) -> None:
        """Put a job; it is in the log when this returns."""
        body = b"%d" % number
        self._say(b"put 0 %d 60 %d\r\n%b" % (delay, len(body), body), b"INSERTED")

    def pause(self, seconds: int) -> None:
        self._say(b"pause-tube default %d" % seconds, b"PAUSED")

    def reserve(self) -> tuple[bytes, int]:
        """Return the id and the number of the next due job."""
        _, job, length = self._say(b"reserve", b"RESERVED").split()
        return job, int(self._lines.read(int(length) + 2))

    def delete(self, job: bytes) -> None:
        self._say(b"delete " + job, b"DELETED")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _say(self, words: bytes, expected: bytes) -> bytes:
        self._socket.sendall(words + b"\r\n")
        answer = self._lines.readline()
        if not answer.startswith(expected):
            raise Missing(f"it answered {answer.decode().strip()!r} to {words.decode()[:40]!r}")
        return answer


def measure(stage: Stage, amount: Amount) -> dict[str, Any]:
    """Measure submits by one client, lateness, and a burst."""
    program = shutil.which("beanstalkd") or raise_missing()
    ledger_path = stage.path()
    os.environ[ledger.NAME] = str(ledger_path)
    with running_server(program, stage.path()) as host:
        client = Client(host)
        rate = submit_rate(client, amount.submit_seconds)
        figures: dict[str, Any] = {"one_caller": rate}
        worker = subprocess.Popen([sys.executable, __file__, host])
        try:
            figures |= lateness(client, amount.count, amount.seconds)
            figures["burst"], figures["burst_unrun"] = burst_rate(
                client, max(200, min(amount.burst, int(rate * PAUSE * 0.7)))
            )
        finally:
            worker.kill()
            worker.wait()
            client.close()
    version = subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d[\d.]+\d", version)
    return figures | {"version": found[0] if found else "?"}


def raise_missing() -> str:
    raise Missing("not installed: apt-get install beanstalkd")


@contextmanager
def running_server(program: str, folder: Path) -> Iterator[str]:
    """Run a server with its log in a new folder, synced on every write."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    words = ["-l", "127.0.0.1", "-p", str(port), "-b", str(folder), "-f0"]
    process = subprocess.Popen([program, *words], stderr=subprocess.DEVNULL)
    with ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        wait_for_port(port)
        yield f"127.0.0.1:{port}"


def wait_for_port(port: int) -> None:
    limit = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > limit:
                raise Missing("it does not start") from None
            time.sleep(0.02)
        else:
            return


def submit_rate(client: Client, seconds: float) -> float:
    """Return jobs per second by one client, one after another, due in an hour."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        client.put(-1, 3600)
        count += 1
    return count / (time.perf_counter() - began)


def lateness(client: Client, count: int, seconds: float) -> dict[str, Any]:
    """Measure how late jobs start, which are due in sequence, counted from before the put."""
    began, dues = time.time(), dict[int, float]()
    for number in range(count):
        time.sleep(max(0.0, began + number * seconds / count - time.time()))
        dues[number] = time.time() + DELAY
        client.put(number, DELAY)
    ran = ledger.wait_for(dues, time.time() + DELAY + PATIENCE)
    late = sorted((at - dues[number]) * 1000 for number, at in ran.items())
    quantiles = {"p50_ms": quantile(late, 0.50), "p99_ms": quantile(late, 0.99)}
    return quantiles | {
        "early": sum(one < 0 for one in late),
        "unrun": count - len(ran),
    }


def burst_rate(client: Client, count: int) -> tuple[float, int]:
    """Return jobs per second from the instant at which a full tube resumes."""
    numbers = range(1_000_000, 1_000_000 + count)
    due = time.time() + PAUSE
    client.pause(PAUSE)
    for number in numbers:
        client.put(number, 0)
    if time.time() > due:
        raise Missing("the submits of the burst took longer than expected")
    ran = ledger.wait_for(numbers, due + PATIENCE)
    if not ran:
        raise Missing("no job of the burst has run")
    return len(ran) / (max(ran.values()) - due), count - len(ran)


def work(host: str) -> None:
    """Reserve, record and delete in an endless loop."""
    client = Client(host)
    while True:
        job, number = client.reserve()
        ledger.note(number)
        client.delete(job)


if __name__ == "__main__":
    for _ in range(THREADS - 1):
        threading.Thread(target=work, args=(sys.argv[1],), daemon=True).start()
    work(sys.argv[1])
