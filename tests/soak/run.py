"""The soak: mixed load on all layers at once, samples of every process, a plot and a verdict.

    python -m soak.run [--seconds 1800] [--directory build/soak]

- `library`: timers, loops, purgatories and idle trackers in one process.
- `embedded`: a scheduler on SQLite in one process.
- `node1`, `node2`: `tickwheel serve` on one PostgreSQL; `traffic` is their client and callee.

The programs count what they expect and what happens: nothing may be lost, early, or done twice.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import servers
from service.harness import Server
from soak import embedded, samples
from soak.verdict import BOUNDS, MIB, judge
from web.serving import create_token

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SAMPLE_SECONDS = 5.0
PATIENCE = 180.0  # seconds for each scene to be played once, or for a program to end
SERVE = ["--retention", "60s", "--audit-retention", "60s"]
VACUUM = {"autovacuum_naptime": "10s"}  # rows live for a minute, and not for a week


class Program:
    """One of the programs, and what it has reported."""

    def __init__(self, name, directory, *arguments):
        self.name = name
        self.line = {"counts": {}, "faults": []}
        self._scenes = None
        self._changed = threading.Condition()
        self._log = (directory / f"{name}.log").open("wb")
        self._process = servers.launch(
            [sys.executable, "-m", f"soak.{name}", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=self._log, cwd=directory,
            env=os.environ | {"PYTHONPATH": f"{TESTS}:{ROOT / 'src'}"},
        )  # fmt: skip
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for text in self._process.stdout:
            line = json.loads(text)
            with self._changed:
                self._scenes = line.get("scenes", self._scenes)
                self.line = line
                self._changed.notify_all()
        with self._changed:
            self.line = {"ended": False, **self.line}
            self._changed.notify_all()

    def wait_for_scenes(self):
        """Wait until each scene was played to its end at least once."""
        with self._changed:
            self._changed.wait_for(lambda: self._all_played() or "ended" in self.line, PATIENCE)

    def _all_played(self):
        return self._scenes and all(f"scene {one}" in self.line["counts"] for one in self._scenes)

    def lateness(self):
        return {name: self.line[name] for name in ("p50", "p99") if name in self.line}

    def stop(self):
        """Let it end what is under way."""
        self._process.send_signal(signal.SIGTERM)

    def end(self):
        """Wait for its end, and return its faults."""
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = "no exit"
        self._reader.join(PATIENCE)
        faults = [*self.line["faults"]]
        if code != 0 or not self.line.get("ended"):
            text = Path(self._log.name).read_text(errors="replace")
            faults.append(f"{code}: {text[-2000:]}")
        if not self._all_played():
            faults.append(f"not all scenes were played: {self.line['counts']}")
        return [f"{self.name}: {text}" for text in faults]

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


class Soak:
    """All processes of a run, and their samples by (source, measure)."""

    def __init__(self, directory, postgres, url, redis):
        self.series = defaultdict(list)
        self.faults = []
        self._directory = directory
        self._postgres = postgres
        self._url = url
        self._redis = redis
        self._stack = ExitStack()

    def __enter__(self):
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def _start(self, stack):
        grpc = [f"127.0.0.1:{servers.free_port()}" for _ in range(2)]
        options = {"constants": embedded.QUICK, "errors": True}
        nodes = [
            Server(self._url, self._directory / f"node{number}", *SERVE,
                   "--grpc-listen", address, **options)
            for number, address in enumerate(grpc, 1)
        ]  # fmt: skip
        token = create_token(self._url, "admin")
        self.nodes = [stack.enter_context(node) for node in nodes]
        path = self._directory / "tasks.db"
        addresses = [f"{node.url},{one}" for node, one in zip(nodes, grpc, strict=True)]
        given = {"library": [], "embedded": [path], "traffic": [token, self._redis.url, *addresses]}
        self.programs = {}
        for name, arguments in given.items():
            self.programs[name] = Program(name, self._directory, *arguments)
            stack.callback(self.programs[name].close)
        self._path = path
        self.pids = {name: one.pid for name, one in self.programs.items()}
        self.pids |= {f"node{number}": node.pid for number, node in enumerate(nodes, 1)}
        self._database = samples.Postgres(self._postgres, self._url)
        stack.callback(self._database.close)
        self._began = time.monotonic()

    def run(self, seconds, sample_seconds):
        """Sample until the time is over, and each scene was played."""
        turns = 0
        while (elapsed := time.monotonic() - self._began) < seconds:
            turns += 1
            time.sleep(max(min(turns * sample_seconds, seconds) - elapsed, 0))
            self.sample()
        for one in self.programs.values():
            one.wait_for_scenes()
        self.sample()
        self.cpu = self._cpu_shares()
        for one in self.programs.values():
            one.stop()
        for one in self.programs.values():
            self.faults += one.end()
        for number, node in enumerate(self.nodes, 1):
            errors = [line for line in node.lines() if line["level"] in ("error", "critical")]
            self.faults += [f"node{number}: {line}" for line in errors[:5]]

    def sample(self):
        found = self._of_running(samples.process)
        for name in found.keys() & self.programs.keys():
            found[name] |= self.programs[name].lateness()
        at = time.monotonic() - self._began
        for source, values in (
            found | self._database.sample() | samples.sqlite(self._path)
        ).items():  # fmt: skip
            for measure, value in values.items():
                self.series[source, measure].append((round(at, 1), value))

    def _of_running(self, measure):
        """Return what `measure` says of each process; one that has ended is a fault, once."""
        found = {}
        for name, pid in [*self.pids.items()]:
            try:
                found[name] = measure(pid)
            except (FileNotFoundError, ProcessLookupError):
                del self.pids[name]
                at = time.monotonic() - self._began
                self.faults.append(f"{name}: it ended after {at:.0f} s, before the run did")
        return found

    def _cpu_shares(self):
        """Return the share of one core that each process has used."""
        used = self._of_running(samples.cpu_seconds)
        used["postgres"] = self._database.cpu_seconds()
        elapsed = time.monotonic() - self._began
        return {name: round(seconds / elapsed, 3) for name, seconds in used.items()}

    def counts(self):
        return {name: one.line["counts"] for name, one in self.programs.items()}

    def __exit__(self, *_):
        self._stack.close()


def soak(directory, seconds, postgres, url, redis, sample_seconds=SAMPLE_SECONDS):
    """Run a soak; return its samples, counts and faults, which are also in a file."""
    directory.mkdir(parents=True, exist_ok=True)
    with Soak(directory, postgres, url, redis) as run:
        run.run(seconds, sample_seconds)
    found = {
        "seconds": seconds,
        "cpu": run.cpu,
        "counts": run.counts(),
        "faults": run.faults,
        "series": [[*name, points] for name, points in run.series.items()],
    }
    (directory / "soak.json").write_text(json.dumps(found))
    return found


def table(found):
    """Return the series as a table, and the faults, growth included."""
    rows = [("", "measure", "warm-up, most", "then, median", "end, median", "per hour", "")]
    faults = [*found["faults"]]
    for source, measure, points in found["series"]:
        finding = judge(measure, points)
        if finding is None:
            continue
        show = formatter(measure)
        figures = (finding.warm_up, finding.before, finding.after)
        verdict = "" if measure not in BOUNDS else finding.fault or "flat"
        rows.append((source, measure, *map(show, figures), show(finding.per_hour), verdict))
        if finding.fault:
            faults.append(f"{source}: {measure} {finding.fault}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if number in (0, 1, 6) else cell.rjust(width)
                 for number, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines), faults


def formatter(measure):
    """Return how values of a measure are shown."""
    if measure in ("memory", "bytes"):
        return lambda value: f"{value / MIB:.2f} MiB"
    if measure in ("p50", "p99"):
        return lambda value: f"{value * 1000:.1f} ms"
    return lambda value: f"{value:.0f}"


def describe(found):
    """Return the whole report as text, and the faults."""
    text, faults = table(found)
    lines = [text, ""] if "\n" in text else []
    for name, counts in found["counts"].items():
        lines.append(f"{name}: " + ", ".join(f"{one} {number}" for one, number in counts.items()))
    cpu = found["cpu"]
    lines.append(f"of one core: {sum(cpu.values()):.0%}; " + ", ".join(
        f"{name} {share:.0%}" for name, share in cpu.items()
    ))  # fmt: skip
    return "\n".join([*lines, *faults, f"{len(faults)} faults"]), faults


def draw(directory):
    """Draw the plot with the benchmarks' program."""
    program = ROOT / "benchmarks" / "soak_plot.py"
    plot = directory / "soak.svg"
    subprocess.run([sys.executable, program, directory / "soak.json", plot], check=True)
    return plot


def run_alone(directory, seconds):
    """Run a soak with servers of its own, and draw it; return the report and the faults."""
    with (
        servers.PostgresServer(options=VACUUM) as postgres,
        servers.RedisServer(options={"appendonly": "no"}) as redis,
    ):
        found = soak(directory, seconds, postgres, postgres.url, redis)
    text, faults = describe(found)
    return f"{text}\n{draw(directory)}", faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--directory", type=Path, default=Path("build/soak"))
    given = parser.parse_args()
    text, faults = run_alone(given.directory.resolve(), given.seconds)
    print(text)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
