"""Measure the dashboard: pages with 10^6 tasks in the store, and what an open browser costs.

    .venv/bin/python benchmarks/dashboard.py [--tasks 1000000] [--rate 1000] [--seconds 20]
        [--store postgresql://...]

A server on a new SQLite file, or on an empty database of PostgreSQL, holds the tasks and fires
`rate` of them a second at a callee. The script times the first page and the lists, then compares
the server's CPU time and lateness without a reader and with one reader of the stream. It prints
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

from tickwheel.durable.metrics import Histogram
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
START_MS = 20_000  # after the last bulk task is stored, the first one fires
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
    start = int(store.now_ms()) + START_MS
    await insert(store, ids, [("work", start + n * 1000 // rate) for n in range(rate * seconds)])
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


class Reader(threading.Thread):
    """Reads the stream, as one browser does."""

    def __init__(self, address):
        super().__init__(daemon=True)
        self.socket = socket.create_connection(address)
        host = f"{address[0]}:{address[1]}"
        self.socket.sendall(f"GET /v1/live HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        self.bytes = 0

    def run(self):
        while data := self.socket.recv(65_536):
            self.bytes += len(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=1_000)
    parser.add_argument("--seconds", type=int, default=20, help="of each of the two phases")
    parser.add_argument("--store", help="an empty database; by default a new SQLite file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.store or f"sqlite:///{folder}/tasks.db"
        start = asyncio.run(fill(url, options.tasks, options.rate, 2 * options.seconds + 20))
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
    lateness = lambda: json.loads(ask("GET", "/v1/stats")[1])  # noqa: E731
    first_page(address)
    hour = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    for name, target in LISTS.items():
        took = [ask("GET", target.format(hour=hour))[0] for _ in range(9)]
        middle, most = statistics.median(took) * 1000, max(took) * 1000
        print(f"{name:<30} median {middle:6.0f} ms   slowest {most:6.0f} ms")
    for readers in (0, 1):
        opened = [Reader(address) for _ in range(readers)]
        for reader in opened:
            reader.start()
        before, cpu, began = lateness(), cpu_seconds(pid), time.perf_counter()
        time.sleep(options.seconds)
        seconds = time.perf_counter() - began
        used, after = cpu_seconds(pid) - cpu, lateness()
        late = Histogram()
        both = zip(before["lateness"]["buckets"], after["lateness"]["buckets"], strict=True)
        late.add([then[1] - first[1] for first, then in both], 0)
        fired = (after["sent"] - before["sent"]) / seconds
        p50, p99 = (late.quantile(part) or 0.0 for part in (0.5, 0.99))
        print(
            f"{readers} readers: {fired:.0f} fired/s, CPU {100 * used / seconds:.1f} % of a core,"
            f" lateness p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms"
            + "".join(f", {one.bytes / seconds / 1024:.1f} KiB/s" for one in opened)
        )
        for reader in opened:
            reader.socket.shutdown(socket.SHUT_RDWR)


def first_page(address):
    """Print how long a browser needs until the overview shows figures."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        times = []
        for _ in range(3):
            page = browser.new_context().new_page()
            began = time.perf_counter()
            page.goto(f"http://{address[0]}:{address[1]}/", wait_until="commit")
            page.locator(".ring-legend b").first.wait_for()
            times.append(time.perf_counter() - began)
            page.context.close()
        browser.close()
    print(f"first page with figures: {', '.join(f'{one * 1000:.0f} ms' for one in times)}")


if __name__ == "__main__":
    main()
