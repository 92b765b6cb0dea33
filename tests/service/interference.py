"""Do misbehaving services delay a healthy one? Measures its lateness without and with them.

    python tests/service/interference.py [--store URL] [--rate N] [--seconds S]

- All tasks are stored before the first is due. The lateness of a call is the time between its due
  time and its arrival at the receiver.
- The misbehaving receivers run in another process, so that they do not slow the healthy one down.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from receivers import PATIENCE, Receiver, answering, date
from service.harness import Server, Watcher

AHEAD = 1.0  # seconds before the first is due, to store all
QUICK = {"first": 0.05, "factor": 2, "max": 1, "jitter": 0.1}
BREAKER = {"failures": 5, "pause": 0.2, "max_pause": 1}

FAULTS = {
    "/down": {"breaker": BREAKER},  # nothing listens there
    "/slow": {"timeout": 0.5, "concurrency": 50},
    "/stuck": {"timeout": 0.5, "concurrency": 50},
    "/flapping": {"breaker": BREAKER},
    "/broken": {},
    "/busy-date": {},
    "/busy-one": {},
    "/unavailable": {"breaker": BREAKER},
    "/accepted": {"feedback_timeout": 0.5},
    "/gone": {},
    "/moved": {},
    "/endless": {},
    "/endless-chunks": {},
    "/garbage": {},
    "/closed": {},
    "/reset": {},
    "/half": {},
    "/huge-headers": {},
    "/endless-headers": {},
}
TASKS_PER_FAULT = 20


class Lateness(NamedTuple):
    """The lateness of calls in seconds."""

    calls: int
    p50: float
    p99: float
    most: float

    @classmethod
    def of(cls, arrivals):
        late = sorted(one.late for one in arrivals)
        return cls(len(late), late[len(late) // 2], late[len(late) * 99 // 100], late[-1])

    def __str__(self):
        ms = [f"{1000 * one:.1f}" for one in (self.p50, self.p99, self.most)]
        return f"{self.calls} calls, late by p50 {ms[0]} ms, p99 {ms[1]} ms, most {ms[2]} ms"


def interfere(server, *, rate, seconds):
    """Return the lateness of a healthy service alone and with all faults, and the faulty calls."""
    with Watcher() as healthy:
        endpoint = healthy.watch("/healthy")
        server.service("healthy", endpoint)
        measure(server, healthy, 50, 0.5)  # connections are made, code is warm
        alone = measure(server, healthy, rate, seconds)
        with faulty_receivers() as urls:
            names = [put_faulty(server, path, url) for path, url in urls.items()]
            with_faults = measure(server, healthy, rate, seconds, names)
            calls = sum(server.calls(name) for name in names)
            for name in names:
                server.post("/v1/tasks/cancel", {"service": name}, status=200)
                server.put(f"/v1/services/{name}", {"endpoint": endpoint, "enabled": False})
    return alone, with_faults, calls


def measure(server, healthy, rate, seconds, faulty=()):
    """Measure `rate` healthy tasks per second, with tasks of the faulty services if any."""
    seen = len(healthy.of("/healthy"))
    start = datetime.now(UTC) + timedelta(seconds=AHEAD)
    number = int(rate * seconds)
    bodies = [task("healthy", start, one / rate) for one in range(number)]
    for name in faulty:
        bodies += [
            task(name, start, seconds * one / TASKS_PER_FAULT) for one in range(TASKS_PER_FAULT)
        ]
    stored = server.post("/v1/tasks/batch", bodies, status=200).json
    assert stored["refused"] == 0, stored
    healthy.wait(lambda: len(healthy.arrivals) >= seen + number)
    return Lateness.of(healthy.of("/healthy")[seen:])


def task(service, start, after):
    due_at = (start + timedelta(seconds=after)).isoformat()
    return {"service": service, "payload": {}, "due_at": due_at, "max_attempts": 50}


def put_faulty(server, path, url):
    name = f"faulty{path.replace('/', '-')}"
    server.service(name, url, **{"backoff": QUICK, "timeout": 5} | FAULTS[path])
    return name


@contextmanager
def faulty_receivers():
    """Run faulty receivers in another process; yield the URL of each fault."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=misbehave, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
        here.send("stop")
        process.join(PATIENCE)
    finally:
        process.kill()
        process.join()
        here.close()
        there.close()


def misbehave(pipe):
    """Run the faulty receivers until a message arrives."""
    with Receiver() as receiver, Receiver() as down:
        down.down()
        receiver.on("/busy-one", answering(429, retry_after=1))
        receiver.on("/busy-date", answering(503, retry_after=date(time.time() + 2)))
        urls = {path: receiver.url(path) for path in FAULTS}
        pipe.send(urls | {"/down": down.url("/down")})
        pipe.recv()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", help="a URL; by default a new SQLite file")
    parser.add_argument("--rate", type=float, default=200, help="healthy tasks per second")
    parser.add_argument("--seconds", type=float, default=20, help="for how long, each time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = given.store or f"sqlite:///{directory}/tasks.db"
        with Server(store, Path(directory)) as server:
            alone, with_faults, calls = interfere(server, rate=given.rate, seconds=given.seconds)
    print(f"a healthy service at {given.rate:g} tasks/s")
    print(f"  alone:                     {alone}")
    print(f"  with {len(FAULTS)} faulty ones:     {with_faults}; those were called {calls} times")


if __name__ == "__main__":
    main()
