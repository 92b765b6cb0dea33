"""`tickwheel worker`: real processes, as a user starts them."""

import contextlib
import http.client
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from servers import wait_until
from tickwheel.cli import exit_codes
from tickwheel.durable import Scheduler, State

SHOP = """
from tickwheel.durable import Scheduler

VERSION = 1
app = Scheduler("sqlite:///tasks.db", dispatch=False)  # a web process imports this, too
number = 3


@app.task
def resize(picture):
    return f"{picture} {VERSION}"


@app.task
def mail(to):
    return to
"""
SLOW = """
import asyncio
from tickwheel.durable import Scheduler

app = Scheduler("sqlite:///tasks.db", dispatch=False, grace=3600)


@app.task
async def hold():
    await asyncio.Event().wait()
"""
URL = "sqlite:///tasks.db"
LOG = Path("log")  # in the current directory
LONG = 60


class Worker:
    """A worker that was started in this directory."""

    def __init__(self, *words, stderr=None):
        command = [sys.executable, "-m", "tickwheel", "worker", *words]
        environ = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        with LOG.open("w") as log:
            self.process = subprocess.Popen(
                command, stderr=stderr or log, env=environ, start_new_session=True
            )

    @property
    def pids(self):
        """The processes that have begun to run tasks."""
        return [
            int(pid) for pid in re.findall(r"^worker (\d+) runs", LOG.read_text(), re.MULTILINE)
        ]

    def scrape(self, path="/metrics", method="GET", **headers):
        """Return the answer to a scrape: its status and its text."""
        port = re.search(
            r"^metrics: http://127.0.0.1:(\d+)/metrics$", LOG.read_text(), re.MULTILINE
        )
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", int(port[1]))
        ) as connection:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def wait_for(self, number):
        wait_until(lambda: len(self.pids) >= number, f"{number} workers have started")

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(LONG)


@pytest.fixture
def start(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)  # the current directory
    with contextlib.ExitStack() as stack:

        def start(*words, **options):
            worker = Worker(*words, **options)
            stack.callback(worker.process.wait, LONG)
            stack.callback(worker.process.kill)  # its own workers notice, and stop
            return worker

        yield start


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["shop"], "write module:name, such as shop:app; got 'shop'"),
        (["shpo:app"], "no module is named 'shpo'"),
        (["shop.sub:app"], "no module is named 'shop.sub'"),
        (["shop:ap"], "module 'shop' has nothing named 'ap'; it has shop:app"),
        (["shop:number"], "has a int, not a Scheduler, named 'number'; it has shop:app"),
        (["broken:app"], "ZeroDivisionError"),
        (["needy:app"], "No module named 'not_installed'"),
        (["shop:app", "--only", "mial"], "got ['mial']; there are ['mail', 'resize']"),
        (["shop:app", "--processes", "2", "--only", "mial"], "there are ['mail', 'resize']"),
        (["shop:app", "--reload", "--processes", "2"], "--reload needs --processes 1"),
        (["shop:app", "--metrics-listen", "9464"], "must be HOST:PORT"),
        (["shop:app", "--metrics-listen", "192.0.2.1:9464"], "192.0.2.1:9464: "),
        (
            ["shop:app", "--processes", "2", "--metrics-listen", "192.0.2.1:9464"],
            "192.0.2.1:9464: ",
        ),
    ],
)
def test_a_wrong_argument_is_a_usage_error(start, tmp_path, words, why):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "needy.py").write_text("import not_installed")
    worker = start(*words)
    assert worker.process.wait(LONG) == exit_codes.USAGE
    assert why in (tmp_path / "log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_runs_tasks_until_a_signal(start, number):
    worker = start("shop:app")
    with Scheduler(URL, dispatch=False).blocking() as b:
        assert b.wait(b.submit("resize", ["cat"]).id, timeout=LONG).result == "cat 1"
    assert worker.stop(number) == exit_codes.OK


def has_handled_signal(pid):
    """Return whether the next SIGTERM ends a process, or it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
    caught = int(re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    return not caught & 1 << signal.SIGTERM - 1


FORMS = pytest.mark.parametrize(
    "words", [[], ["--processes", "2"], ["--reload"]], ids=["one", "several", "reload"]
)


@FORMS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(start, tmp_path, words, number):
    (tmp_path / "slow.py").write_text(SLOW)
    worker = start("slow:app", *words)
    worker.wait_for(2 if "--processes" in words else 1)
    with Scheduler(URL, dispatch=False).blocking() as b:
        task = b.submit("hold")
        wait_until(lambda: b.get(task.id).state is State.RUNNING, "the function runs")
        worker.process.send_signal(number)
        wait_until(lambda: all(map(has_handled_signal, worker.pids)), "all have the first signal")
        assert worker.process.poll() is None
        worker.stop(number)
        for pid in worker.pids:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"worker {pid} has ended")
        assert b.get(task.id).state is State.RUNNING


@FORMS
def test_without_a_terminal_sighup_is_ignored(start, words):
    worker, number = start("shop:app", *words), 2 if "--processes" in words else 1
    worker.wait_for(number)
    worker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: LOG.read_text().count("ignoring SIGHUP") >= number, "they say so")
    with Scheduler(URL, dispatch=False).blocking() as b:
        assert b.wait(b.submit("resize", ["cat"]).id, timeout=LONG).result == "cat 1"
    assert worker.stop() == exit_codes.OK
    assert len(worker.pids) == number


@FORMS
def test_a_terminal_that_is_closed_stops_it(start, words):
    leader, follower = pty.openpty()
    try:
        worker = start("shop:app", *words, stderr=follower)
        with Scheduler(URL, dispatch=False).blocking() as b:
            assert b.wait(b.submit("resize", ["cat"]).id, timeout=LONG).result == "cat 1"
        assert worker.stop(signal.SIGHUP) == exit_codes.OK
    finally:
        os.close(leader)
        os.close(follower)


def test_only_some_functions_run(start, tmp_path):
    worker = start("shop:app", "--only", "mail")
    with Scheduler(URL, dispatch=False).blocking() as b:
        left = b.submit("resize", ["cat"])
        assert b.wait(b.submit("mail", ["ann"]).id, timeout=LONG).result == "ann"
        assert b.get(left.id).state is State.READY
        assert worker.stop() == exit_codes.OK
        start("shop:app")
        assert b.wait(left.id, timeout=LONG).result == "cat 1"


def test_a_process_that_dies_is_replaced_and_all_stop_together(start):
    worker = start("shop:app", "--processes", "2")
    worker.wait_for(2)
    os.kill(worker.pids[0], signal.SIGKILL)
    worker.wait_for(3)
    with Scheduler(URL, dispatch=False).blocking() as b:
        assert b.wait(b.submit("resize", ["cat"]).id, timeout=LONG).result == "cat 1"
    assert worker.stop() == exit_codes.OK
    for pid in worker.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_reload_runs_the_new_code_and_survives_a_mistake(start, tmp_path):
    worker = start("shop:app", "--reload")
    worker.wait_for(1)
    (tmp_path / "shop.py").write_text("this is no Python")
    wait_until(lambda: "SyntaxError" in (tmp_path / "log").read_text(), "it has read the mistake")
    (tmp_path / "shop.py").write_text(SHOP.replace("VERSION = 1", "VERSION = 2"))
    worker.wait_for(2)
    with Scheduler(URL, dispatch=False).blocking() as b:
        assert b.wait(b.submit("resize", ["cat"]).id, timeout=LONG).result == "cat 2"
    assert worker.stop(signal.SIGINT) == exit_codes.OK


def test_workers_stop_when_the_process_that_started_them_is_killed(start, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own has too long a path for sockets
        monkeypatch.setenv("TMPDIR", folder)
        worker = start("shop:app", "--processes", "2", "--metrics-listen", "127.0.0.1:0")
        worker.wait_for(2)
        assert [*Path(folder).iterdir()]
        worker.stop(signal.SIGKILL)
        for pid in worker.pids:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"worker {pid} has ended")
        assert [*Path(folder).iterdir()] == []


def test_prometheus_can_scrape_a_worker(start, tmp_path):
    worker = start("shop:app", "--metrics-listen", "127.0.0.1:0")
    worker.wait_for(1)
    with Scheduler(URL, dispatch=False).blocking() as b:
        b.wait(b.submit("mail", ["ann"]).id, timeout=LONG)
    status, text = worker.scrape()
    assert status == 200
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert [one.value for one in families["tickwheel_sent"].samples] == [1]
    latencies = families["tickwheel_channel_latency_seconds"].samples
    assert {one.labels["service"] for one in latencies} == {"mail"}
    assert worker.scrape("/")[0] == 404
    assert worker.scrape(method="POST")[0] == 405
    assert worker.scrape(method="HEAD") == (200, "")
    assert worker.scrape(Host="evil.example")[0] == 403
    assert worker.scrape(Host="localhost:9464")[0] == 200
    assert worker.stop() == exit_codes.OK


def test_several_processes_answer_a_scrape_as_one(start):
    worker = start("shop:app", "--processes", "2", "--metrics-listen", "127.0.0.1:0")
    worker.wait_for(2)
    with Scheduler(URL, dispatch=False).blocking() as b:
        b.wait(b.submit("mail", ["ann"]).id, timeout=LONG)
    _, text = worker.scrape()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert [one.value for one in families["tickwheel_worker_up"].samples] == [1, 1]
    assert sum(one.value for one in families["tickwheel_sent"].samples) == 1
    assert [one.labels for one in families["tickwheel_store_up"].samples] == [{}]
    assert worker.stop() == exit_codes.OK
