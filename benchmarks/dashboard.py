"""Measure the dashboard: pages with 10^6 tasks in the store, and what an open browser costs.

    .venv/bin/python benchmarks/dashboard.py [--tasks 1000000] [--rate 1000] [--seconds 20]
        [--rounds 3] [--store postgresql://...]

A server on a new SQLite file, or on an empty database of PostgreSQL, holds the tasks and fires
`rate` of them a second at a callee. The script times the first page in a headless Chromium, and the
lists. Then it compares the server's CPU time and lateness in turns: nobody looks, a program
reads the stream, the overview is open in Chromium. The program shows what the server spends for a
browser on another machine: on a small one, a browser that draws competes for the cores. An interval
is as long as the time between two large reads of the loader, so that each has one. It prints
figures; nothing is written.
"""

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from tickwheel.durable.histogram import Histogram
from tickwheel.durable.stores.postgres.store import PostgresStore
from tickwheel.durable.stores.sqlite.store import SqliteStore
from tickwheel.values.task import Ids, State, Submission, Task

SINK = """
import asyncio
class Sink(asyncio.Protocol):
    def connection_made(self, transport): self.transport, self.rest = transport, b""
    def data_received(self, data):
        self.rest += data
        while True:
            head, found, body = self.rest.partition(b"\\r\\n\\r\\n")
            if not found: return
            size = int(head.lower().partition(b"content-length:")[2].split(b"\\r\\n")[0] or 0)
            if len(body) < size: return
            self.rest = body[size:]
            self.transport.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
async def main():
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
STORE_RATE = 10_000  # tasks that are stored a second, at least: those that fire begin later
SETTLE_SECONDS = 3  # after a watcher has come or gone, before an interval begins
WATCHERS = ("nobody", "a stream", "a browser")
LISTS = {
    "tasks": "/v1/tasks?limit=50&truncate=0",
    "tasks of a service": "/v1/tasks?limit=50&truncate=0&service=bulk",
    "ready tasks": "/v1/tasks?limit=50&truncate=0&state=ready",
    "delayed tasks due in an hour": "/v1/tasks?limit=50&truncate=0&state=delay&due_before={hour}",
    "tasks due in an hour": "/v1/tasks?limit=50&truncate=0&due_before={hour}",
    "backlog": "/v1/backlog?limit=50&truncate=0",
    "services": "/v1/services",
    "errors of a service": "/v1/services/work/errors",
    "due times, week": "/v1/due?span=week",
}


async def fill(url, number, rate, seconds):
    """Store the tasks: `number` of one service, due within a week, then those that will fire."""
    path = url.removeprefix("sqlite:///")
    store = SqliteStore(path) if path != url else PostgresStore(url)
    await store.open()
    ids, chance = Ids(), random.Random(1)
    later = int(store.now_ms()) + 3_600_000
    await insert(
        store, ids, [("bulk", later + chance.randrange(604_800_000)) for _ in range(number)]
    )
    start = int(store.now_ms()) + 10_000 + rate * seconds * 1000 // STORE_RATE
    await insert(store, ids, [("work", start + n * 1000 // rate) for n in range(rate * seconds)])
    if isinstance(store, PostgresStore):  # what it would do after so many rows, at any time
        await store.fetch("VACUUM (ANALYZE) task")
        await store.fetch("CHECKPOINT")
    await store.close()
    return start


async def insert(store, ids, dues):
    """Store tasks, given by service and due time."""
    now = int(store.now_ms())
    for first in range(0, len(dues), 300):
        batch = []
        for n, (service, due) in enumerate(dues[first : first + 300]):
            shard = (first + n) % store.shards
            task = Task(
                ids.make(now, shard), service, b'{"a":1}', None, State.DELAY, due, shard, 0, 0, 0,
                3, None, None, now, now,
            )  # fmt: skip
            batch.append(Submission(task))
        await store.insert(batch, {})


def cpu_seconds(pid):
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Stream:
    """Reads the stream, as a browser does, and draws nothing."""

    def __init__(self, address):
        self.socket = socket.create_connection(address)
        host = f"{address[0]}:{address[1]}"
        self.socket.sendall(f"GET /v1/live HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        self.bytes = 0
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        while data := self.socket.recv(65_536):
            self.bytes += len(data)

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=1_000)
    parser.add_argument("--seconds", type=int, default=20, help="of each interval")
    parser.add_argument("--rounds", type=int, default=3, help="intervals of each kind")
    parser.add_argument("--store", help="an empty database; by default a new SQLite file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.store or f"sqlite:///{folder}/tasks.db"
        seconds = 30 + options.rounds * len(WATCHERS) * (options.seconds + SETTLE_SECONDS + 1)
        start = asyncio.run(fill(url, options.tasks, options.rate, seconds))
        sink = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE)
        port = int(sink.stdout.readline())
        command = [sys.executable, "-m", "tickwheel", "serve", "--store", url,
                   "--listen", "127.0.0.1:0", "--allow-private-targets"]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            line = server.stdout.readline().decode()
            address = re.search(r"http://([\d.]+):(\d+)/", line)
            measure((address[1], int(address[2])), server.pid, port, start, options)
        finally:
            for process in (server, sink):
                process.terminate()
                process.wait(60)


def measure(address, pid, sink, start, options):
    connection = http.client.HTTPConnection(*address, timeout=60)

    def ask(method, target, body=None):
        began = time.perf_counter()
        connection.request(method, target, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status < 300, (target, answer.status, data[:300])
        return time.perf_counter() - began, data

    for name in ("work", "bulk"):
        config = {"endpoint": f"http://127.0.0.1:{sink}/", "concurrency": 500}
        ask("PUT", f"/v1/services/{name}", json.dumps(config | {"enabled": name == "work"}))
    while time.time() * 1000 < start + 3_000:
        time.sleep(0.2)
    hour = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium-headless-shell", args=["--no-sandbox"]
        )
        first_page(browser, address)
        for name, target in LISTS.items():
            took = [ask("GET", target.format(hour=hour))[0] for _ in range(9)]
            middle, most = statistics.median(took) * 1000, max(took) * 1000
            print(f"{name:<30} median {middle:6.0f} ms   slowest {most:6.0f} ms")
        intervals = {kind: [] for kind in WATCHERS}
        for _ in range(options.rounds):
            for kind in WATCHERS:
                watcher = watch(kind, browser, address)
                time.sleep(SETTLE_SECONDS)
                intervals[kind].append(interval(ask, pid, options.seconds))
                if watcher is not None:
                    watcher.close()
        browser.close()
    report(intervals)


def watch(kind, browser, address):
    """Begin to look at the overview, as `kind` says."""
    if kind == "a browser":
        return open_overview(browser, address)[0].context
    return Stream(address) if kind == "a stream" else None


def interval(ask, pid, seconds):
    """Return the server's rate, CPU time per second, lateness p50 and p99 over some seconds."""
    stats = lambda: json.loads(ask("GET", "/v1/stats")[1])  # noqa: E731
    before, cpu, began = stats(), cpu_seconds(pid), time.perf_counter()
    time.sleep(seconds)
    used, passed, after = cpu_seconds(pid) - cpu, time.perf_counter() - began, stats()
    late = Histogram()
    both = zip(before["lateness"]["buckets"], after["lateness"]["buckets"], strict=True)
    late.add([then[1] - first[1] for first, then in both], 0)
    p50, p99 = (late.quantile(part) or 0.0 for part in (0.5, 0.99))
    return (after["sent"] - before["sent"]) / passed, used / passed, p50, p99


def report(intervals):
    """Print what was measured while each kind of watcher looked, and what it cost."""
    shown = lambda values, unit=1: " ".join(f"{unit * one:.1f}" for one in values)  # noqa: E731
    usual = statistics.median(cpu for _, cpu, _, _ in intervals["nobody"])
    for kind, found in intervals.items():
        rates, cpus, p50s, p99s = zip(*found, strict=True)
        cost = statistics.median(cpus) - usual
        print(
            f"{kind} looks: {statistics.median(rates):.0f} fired/s; CPU {shown(cpus, 100)} % of a"
            f" core ({100 * cost:+.1f}); lateness p50 {shown(p50s, 1000)} ms,"
            f" p99 {shown(p99s, 1000)} ms"
        )


def open_overview(browser, address):
    """Return a page of a new profile that shows figures, and how long it took from its address."""
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    began = time.perf_counter()
    page.goto(f"http://{address[0]}:{address[1]}/", wait_until="commit")
    page.locator(".ring-legend b").first.wait_for()
    return page, time.perf_counter() - began


def first_page(browser, address):
    """Print how long a browser with an empty cache needs until the overview shows figures."""
    times = []
    for _ in range(5):
        page, took = open_overview(browser, address)
        times.append(took)
        page.context.close()
    print(f"first page with figures: {', '.join(f'{one * 1000:.0f} ms' for one in times)}")


if __name__ == "__main__":
    main()
