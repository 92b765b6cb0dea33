"""Several processes on one socket, scraped as one: real processes, on PostgreSQL.

- A connection to one worker is made while all others are paused: only that one can accept it.
- A scrape may omit a live worker only if it waited for the full timeout.
"""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import servers
from tickwheel.supervisor import send_signal
from tickwheel.web.server import INHERITED_VARIABLE, Inherited
from tickwheel.web.worker_metrics import TIMEOUT_SECONDS
from web.serving import PATIENCE, Served, create_token, on_store, revoked, wait_until

SHARED = {
    "tickwheel_tasks",
    "tickwheel_store_up",
    "tickwheel_nodes",
    "tickwheel_sqlite_log_bytes",
}
COUNTS = ("_total", "_count", "_sum", "_bucket")


@contextlib.contextmanager
def standing_still(*pids):
    """Pause processes, and resume them at the end."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda pid=pid: servers._stopped(pid), f"process {pid} stands still")
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Scrape:
    """One scrape: its workers, and every sample by name and labels."""

    def __init__(self, text, took):
        self.took = took
        self.families = {one.name: one for one in text_string_to_metric_families(text)}
        self.up = {
            int(one.labels["worker"]): one.value == 1
            for one in self.families.pop("tickwheel_worker_up").samples
        }
        samples = [one for family in self.families.values() for one in family.samples]
        self.samples = {(s.name, *sorted(s.labels.items())): s.value for s in samples}
        assert len(self.samples) == len(samples), "a series comes twice"
        heads = [line for line in text.splitlines() if line.startswith("#")]
        assert len(heads) == len(set(heads)), "a head comes twice"
        self._check()

    def _check(self):
        """Check that each worker that is up is in every per-worker family, and no other is."""
        up = {str(number) for number, there in self.up.items() if there}
        totals = {"tickwheel_submitted", "tickwheel_lateness_seconds"}  # not in one namespace
        for name in {"tickwheel_info"} | (totals & self.families.keys()):
            assert {one.labels["worker"] for one in self.families[name].samples} == up
        for name, family in self.families.items():
            for one in family.samples:
                if name in SHARED:
                    assert "worker" not in one.labels
                else:
                    assert one.labels["worker"] in up

    def whole(self):
        return all(self.up.values()) and self.samples["tickwheel_store_up",] == 1

    def lacks(self, *numbers):
        """Check that these workers are missing; others may be after the full timeout only."""
        missing = {number for number, there in self.up.items() if not there}
        assert missing >= set(numbers)
        assert missing == set(numbers) or self.took > 0.9 * TIMEOUT_SECONDS, self.took

    def of(self, name, **labels):
        """Return the values of all samples with these labels, by worker."""
        return {
            int(found["worker"]): number
            for (sample, *pairs), number in self.samples.items()
            if sample == name and labels.items() <= (found := dict(pairs)).items()
        }


class Crew:
    """A server with workers, and a connection to each."""

    def __init__(self, server, workers):
        self.server = server
        wait_until(lambda: self.serving() == set(range(workers)), "all serve")
        self.connections = {number: self.connected(number) for number in range(workers)}

    def inherited(self):
        """Return the `Inherited` values of each live worker, by process."""
        found = {}
        for pid in servers._descendants(self.server.pid):
            # Only root may read that of a process that is ending.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
                given = [line for line in lines if line.startswith(f"{INHERITED_VARIABLE}=")]
                if given and not servers._gone(pid):
                    found[pid] = Inherited.from_text(given[0].partition("=")[2])
        return found

    def pids(self):
        """Return the processes of the workers, by number."""
        return {given.number: pid for pid, given in self.inherited().items()}

    def directory(self):
        """Return the directory of the workers' sockets."""
        (found,) = {given.directory for given in self.inherited().values()}
        return Path(found)

    def serving(self):
        """Return the workers in a scrape of any worker."""
        self.server.hang_up()
        scrape = Scrape(self.server.get("/metrics", status=200).body.decode(), 0)
        return {number for number, there in scrape.up.items() if there}

    def connected(self, number):
        """Open a new connection to one worker."""
        others = [pid for other, pid in self.pids().items() if other != number]
        with standing_still(*others):
            connection = http.client.HTTPConnection(*self.server.address, timeout=PATIENCE)
            self._ask(connection, "GET", "/healthz")
        return connection

    def _ask(self, connection, method, path, body=None, token=None):
        headers = {"content-type": "application/json"} if body else {}
        if token:
            headers["authorization"] = f"Bearer {token}"
        connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status in (200, 201), text
        return text

    def submit(self, number, **task):
        """Submit a task to one worker."""
        task.setdefault("delay", 3600)
        self._ask(self.connections[number], "POST", "/v1/tasks", {"service": "mail", **task})

    def scrape(self, number, token=None):
        """Scrape one worker."""
        began = time.monotonic()
        text = self._ask(self.connections[number], "GET", "/metrics", token=token)
        return Scrape(text, time.monotonic() - began)

    def whole(self, number, token=None):
        """Scrape one worker until all are in it; a busy machine may need several scrapes."""
        limit = time.monotonic() + PATIENCE
        while not (scrape := self.scrape(number, token)).whole():
            assert time.monotonic() < limit, scrape.up
        return scrape

    def close(self):
        for connection in self.connections.values():
            connection.close()


class Rising:
    """Checks that no counter decreases, except when its worker was replaced."""

    def __init__(self):
        self._seen = defaultdict(float)

    def check(self, scrape):
        for series, number in scrape.samples.items():
            if series[0].endswith(COUNTS):
                assert number >= self._seen[series], series
                self._seen[series] = number

    def forget(self, number):
        gone = ("worker", str(number))
        self._seen = defaultdict(
            float, {series: n for series, n in self._seen.items() if gone not in series}
        )


@pytest.fixture
def make_crew(postgres_url, serve):
    made = []

    def make(workers=3, token=None, **options):
        words = ("--workers", str(workers), "--grace", "2")
        server = serve(*words, store=postgres_url, **options)
        server.token = token
        made.append(Crew(server, workers))
        return made[-1]

    yield make
    for crew in made:
        crew.close()


def test_every_scrape_has_all_workers_and_counters_never_decrease(make_crew):
    crew, rising = make_crew(), Rising()
    crew.server.service(enabled=False)
    for turn in range(20):
        crew.submit(turn % 3)
        for scrape in (crew.scrape(turn % 3), crew.scrape((turn + 1) % 3)):
            assert scrape.up.keys() == {0, 1, 2}
            scrape.lacks()
            rising.check(scrape)
    for number in range(3):
        scrape = crew.whole(number)
        rising.check(scrape)
        assert scrape.of("tickwheel_submitted_total") == {0: 7, 1: 7, 2: 6}
        submits = scrape.of("tickwheel_http_requests_total", route="/v1/tasks", status="201")
        assert submits == {0: 7, 1: 7, 2: 6}


def test_metrics_of_the_store_appear_once(make_crew):
    crew = make_crew(2)
    crew.server.service(enabled=False)
    crew.submit(0)
    for number in range(2):
        families = crew.whole(number).families
        assert [one.value for one in families["tickwheel_store_up"].samples] == [1]
        assert [one.labels for one in families["tickwheel_nodes"].samples] == [{}]
        tasks = {one.labels["state"]: one.value for one in families["tickwheel_tasks"].samples}
        assert tasks == {"live": 1, "final": 0}
    # All workers have one address, and whichever accepts a request asks the others.
    listed = lambda: crew.server.get("/v1/nodes", status=200).json["items"]  # noqa: E731
    wait_until(lambda: len(listed()) == 2, "both have joined")
    nodes = listed()
    assert [node["address"] for node in nodes] == [crew.server.url] * 2
    for scope in ("server", "cluster"):
        found = crew.server.get(f"/v1/stats?scope={scope}", status=200).json
        assert found["submitted"] == 1
        assert {row["name"]: row["error"] for row in found["by_node"]} == {
            node["name"]: None for node in nodes
        }


def test_a_killed_worker_is_omitted_until_it_is_replaced(make_crew):
    crew, rising = make_crew(), Rising()
    crew.server.service(enabled=False)
    for number in range(3):
        crew.submit(number)
    rising.check(crew.whole(0))

    victim, directory = crew.pids()[1], crew.directory()
    with standing_still(crew.server.pid):  # no worker is replaced during the test
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: servers._gone(victim), "the worker is gone")
        assert (directory / "1").is_socket()
        for number in (0, 2) * 5:
            crew.submit(number)
            scrape = crew.scrape(number)
            scrape.lacks(1)
            rising.check(scrape)

    rising.forget(1)
    for number in (0, 2):
        scrape = crew.whole(number)
        rising.check(scrape)
        assert scrape.of("tickwheel_submitted_total") == {0: 6, 1: 0, 2: 6}
    assert crew.pids()[1] != victim
    crew.connections[1].close()
    crew.connections[1] = crew.connected(1)
    crew.submit(1)
    scrape = crew.whole(1)
    rising.check(scrape)
    assert scrape.of("tickwheel_submitted_total") == {0: 6, 1: 1, 2: 6}


def test_a_replaced_worker_requires_a_token_after_the_last_was_revoked(make_crew, postgres_url):
    crew = make_crew(2)
    token = create_token(postgres_url, "admin")
    on_store(postgres_url, lambda store: revoked(store, token))
    before = crew.pids()
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: crew.pids().get(0, before[0]) != before[0], "it is replaced")
    wait_until(lambda: "every token of this store was revoked" in crew.server.log(), "it serves")
    crew.server.hang_up()
    with standing_still(crew.pids()[1]):
        crew.server.get("/v1/tasks").refused(401, "unauthorized")


def test_a_paused_worker_does_not_delay_a_scrape(make_crew):
    crew, rising = make_crew(), Rising()
    rising.check(crew.whole(2))
    with standing_still(crew.pids()[0]):
        for number in (1, 2):
            scrape = crew.scrape(number)
            scrape.lacks(0)
            rising.check(scrape)
    for number in range(3):
        rising.check(crew.whole(number))


def test_a_token_of_a_namespace_sees_its_services_on_all_workers(make_crew, postgres_url):
    own = create_token(postgres_url, "read", namespace="acme")
    every = create_token(postgres_url, "admin", namespace="*")
    crew = make_crew(token=every)
    for namespace in ("acme", "other"):
        headers = {"tickwheel-namespace": namespace}
        for name in ("mail", "bills"):
            service = {"endpoint": "http://127.0.0.1:9/", "enabled": False}
            crew.server.put(f"/v1/services/{name}", service, headers=headers, status=201)

    def services(token):
        """Return which workers show which service."""
        found = [dict(series[1:]) for series in crew.whole(0, token).samples]
        return {(one["worker"], one["service"]) for one in found if "service" in one}

    def shown_by_all(*names):
        return {(worker, name) for worker in "012" for name in names}

    acme, others = ("acme/mail", "acme/bills"), ("other/mail", "other/bills")
    wait_until(lambda: services(every) == shown_by_all(*acme, *others), "all know all services")
    assert services(own) == shown_by_all(*acme)


class TestDirectory:
    @pytest.fixture
    def parent(self):
        made = Path(tempfile.mkdtemp(prefix="tw-test-"))  # the path of pytest's may be too long
        yield made
        shutil.rmtree(made)

    def test_it_is_private_and_removed_with_the_server(self, make_crew, parent):
        crew = make_crew(2, environment={"TMPDIR": str(parent)})
        (directory,) = parent.glob("tw-*")
        assert directory == crew.directory()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {path.name for path in directory.iterdir() if path.is_socket()} == {"0", "1"}
        assert crew.server.stop() == 0
        assert list(parent.glob("tw-*")) == []

    def test_it_is_removed_by_the_workers_when_the_supervisor_is_killed(self, make_crew, parent):
        crew = make_crew(2, environment={"TMPDIR": str(parent)}, errors=True)
        workers = crew.pids().values()
        try:
            crew.server.process.kill()
            wait_until(lambda: all(map(servers._gone, workers)), "the workers have ended")
        finally:
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert list(parent.glob("tw-*")) == []

    def test_one_with_too_long_a_path_is_reported(self, tmp_path):
        parent = tmp_path / ("x" * 100)
        parent.mkdir()
        server = Served(
            "--store", "postgresql://u@127.0.0.1:1/nothing", "--workers", "2", cwd=tmp_path,
            environment={"TMPDIR": str(parent)},
        ).launch()  # fmt: skip
        try:
            out, _ = server.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()
            raise
        assert (server.process.returncode, out) == (1, b"")
        (line,) = server.lines()
        assert "Set TMPDIR to a directory with a shorter path" in line["message"]
        assert list(parent.iterdir()) == []


def test_a_signal_to_an_ended_worker_keeps_its_exit_code(monkeypatch):
    signalled = threading.Event()
    waitpid = os.waitpid

    def wait_late(*args):
        if threading.current_thread() is not threading.main_thread():
            signalled.wait()  # a thread of asyncio's, on some Pythons
        return waitpid(*args)

    async def run():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(3)")
        # It has ended, and asyncio has not waited for it yet.
        wait_until(lambda: servers._gone(process.pid), "it has ended")
        send_signal(process, signal.SIGTERM)
        signalled.set()
        return await process.wait()

    monkeypatch.setattr(os, "waitpid", wait_late)
    assert asyncio.run(run()) == 3
