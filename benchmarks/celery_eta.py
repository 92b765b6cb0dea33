"""Compare a Celery app that keeps `eta` in its workers with the same app on tickwheel.

    python benchmarks/celery_eta.py [--tasks 100000] [--only visibility kill revoke memory]

Each part starts a Redis, ordinary `celery worker` processes and, for the second column, a tickwheel
server on SQLite. It prints a table with both columns. `benchmarks/channels.py` measures how fast
due messages reach the broker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))

from redis import Redis  # noqa: E402

import servers  # noqa: E402
from web.serving import Served  # noqa: E402

PARTS = ("visibility", "kill", "revoke", "memory")
SENDERS = 8  # threads that call apply_async
# At its defaults kombu looks for overdue messages only about every 100 seconds.
QUICK_RESTORE = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


class Stage:
    """One app with its broker, its workers and perhaps a tickwheel server."""

    def __init__(self, redis: Any, server: Any, transport: dict[str, Any], folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.counts = Redis.from_url(redis.url_for(1))
        self.environment = os.environ | {
            "BENCH_BROKER": redis.url_for(0), "BENCH_COUNTS": redis.url_for(1),
            "BENCH_TRANSPORT": json.dumps(transport), "PYTHONPATH": str(HERE),
            "BENCH_SERVER": server.url if server else "",
        }  # fmt: skip
        self.workers: list[subprocess.Popen[bytes]] = []

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start a worker with two processes, and return it when it is ready."""
        log = self.folder / f"worker-{len(self.workers)}.log"
        name = f"w{len(self.workers)}@bench"
        command = [sys.executable, "-m", "celery", "-A", "celery_app", "worker", "-c", "2"]
        with log.open("wb") as output:
            worker = subprocess.Popen(
                [*command, "-n", name, "-l", "INFO"], stdout=output, stderr=output, cwd=HERE,
                env=self.environment, start_new_session=True,
            )  # fmt: skip
        self.workers.append(worker)
        servers.wait_until(lambda: " ready." in log.read_text(), f"{name} is ready")
        return worker

    def app(self, code: str) -> str:
        """Run code with the app in a process of its own, and return what it prints."""
        begin = "from celery_app import app, count\n"
        done = subprocess.run(
            [sys.executable, "-c", begin + code], env=self.environment, check=True, cwd=HERE,
            capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    def send(self, tasks: int, countdown: float, *, names: str = "task") -> float:
        """Send tasks with a countdown; return the seconds that it took."""
        each = f"count.apply_async(('{names}-%d' % n,), countdown={countdown})"
        begin = time.monotonic()
        self.app(
            "from concurrent.futures import ThreadPoolExecutor\n"
            f"with ThreadPoolExecutor({SENDERS}) as pool:\n"
            f"    list(pool.map(lambda n: {each}, range({tasks})))"
        )
        return time.monotonic() - begin

    def runs(self) -> list[int]:
        """Return how often each task ran that ran at all."""
        names = self.counts.keys("*")
        return [int(value or 0) for value in self.counts.mget(names)] if names else []

    def memory(self) -> float:
        """Return the memory of all workers in MB: what they share is counted once."""
        pids = [worker.pid for worker in self.workers if worker.poll() is None]
        pids += [pid for one in pids for pid in servers._descendants(one)]
        return sum(pss(pid) for pid in pids)

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """Kill a worker and its children."""
        for pid in [*servers._descendants(worker.pid), worker.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        worker.wait()

    def close(self) -> None:
        for worker in self.workers:
            self.kill(worker)
        self.counts.close()


def pss(pid: int) -> float:
    """Return the proportional memory of a process in MB."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


@contextlib.contextmanager
def stage(ours: bool, transport: dict[str, Any] | None = None) -> Iterator[Stage]:
    """Give a fresh stage, with tickwheel or without."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(servers.RedisServer())
        server = None
        if ours:
            store = f"sqlite:///{folder}/tasks.db"
            server = Served("--store", store, "--allow-private-targets", cwd=folder, errors=True)
            stack.enter_context(server)
        made = Stage(redis, server, transport or {}, folder)
        stack.callback(made.close)
        yield made


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def visibility(ours: bool) -> dict[str, object]:
    """Run one task with an eta of four visibility timeouts, with two workers."""
    with stage(ours, QUICK_RESTORE) as made:
        made.start_worker()
        made.start_worker()
        begin = time.monotonic()
        made.send(1, 12)
        sleep_until(begin + 12 + 8)
        return {"runs of one task: eta 12 s, visibility timeout 3 s": sum(made.runs())}


def kill(ours: bool) -> dict[str, object]:
    """Kill the only worker 3 s after 1,000 tasks were sent, and start another one."""
    tasks, countdown = 1_000, 20.0
    with stage(ours) as made:
        worker = made.start_worker()
        begin = time.monotonic()
        made.send(tasks, countdown)
        last_due = time.monotonic() + countdown
        sleep_until(begin + 3)
        made.kill(worker)
        made.start_worker()
        sleep_until(last_due + 10)
        runs = made.runs()
        late = f"of {tasks:,} tasks, run 10 s after the last was due; worker killed"
        return {late: len(runs), "of them run twice": sum(1 for one in runs if one > 1)}


def revoke(ours: bool) -> dict[str, object]:
    """Revoke a pending task, once with a worker that stays and once with one that restarts."""
    found: dict[str, object] = {}
    for restart in (False, True):
        with stage(ours) as made:
            worker = made.start_worker()
            made.app(
                "sent = count.apply_async(('one',), countdown=12)\n"
                "import time; time.sleep(2); sent.revoke()"
            )
            begin = time.monotonic()
            if restart:
                worker.send_signal(signal.SIGTERM)  # it gives back what it holds
                worker.wait()
                made.start_worker()
            sleep_until(begin + 16)
            after = ", then the worker restarts" if restart else ""
            found[f"runs of a revoked task{after}"] = sum(made.runs())
    return found


def memory(ours: bool, tasks: int) -> dict[str, object]:
    """Send tasks for tomorrow to two workers, and see how much memory these take."""
    with stage(ours) as made:
        made.start_worker()
        before = made.memory()
        seconds = made.send(tasks, 86_400)
        settle(made.memory)
        server = pss(made.server.pid) if made.server else None
        return {
            f"memory of a worker before {tasks:,} tasks, MB": round(before),
            "the same with the tasks pending, MB": round(made.memory()),
            "memory of the tickwheel server, MB": "-" if server is None else round(server),
            "apply_async per second, 8 threads": round(tasks / seconds),
        }


def settle(read: Callable[[], float], seconds: float = 10.0, limit: float = 240.0) -> None:
    """Wait until a figure grows no more."""
    end, last = time.monotonic() + limit, read()
    while time.monotonic() < end:
        time.sleep(seconds)
        now = read()
        if now < last + 1:
            return
        last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tasks", type=int, default=100_000, help="pending tasks of `memory`")
    given = parser.parse_args()
    parts: dict[str, Callable[[bool], dict[str, object]]] = {
        "visibility": visibility, "kill": kill, "revoke": revoke,
        "memory": lambda ours: memory(ours, given.tasks),
    }  # fmt: skip
    print(f"{'':<64} {'Celery':>10} {'tickwheel':>10}")
    for name, part in parts.items():
        if name in given.only:
            with ThreadPoolExecutor(1) as pool:  # one column at a time
                plain, ours = pool.map(part, (False, True))
            for row, value in plain.items():
                print(f"{row:<64} {value!s:>10} {ours[row]!s:>10}", flush=True)


if __name__ == "__main__":
    main()
