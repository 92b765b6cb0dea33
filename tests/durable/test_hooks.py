"""Covers durable.channels.local: hooks around attempts, and the recipes of their page."""

import asyncio
import gzip
import json
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import sentry_sdk

from tickwheel.durable import Scheduler, State, current_task

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "durable-observe.md"
LONG = 60


def recipe(heading):
    text = PAGE.read_text("utf-8").split(f"## {heading}\n")[1]
    return re.search(r"```py\n(.*?)```", text, re.DOTALL)[1]


@pytest.fixture
def app(tmp_path):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")

    @app.task(name="plain", max_attempts=2, backoff=0)
    def plain(what):
        return 1 / what

    @app.task(name="coroutine", max_attempts=2, backoff=0)
    async def coroutine(what):
        return 1 / what

    return app


def run(app, *payload):
    """Run each function with this payload, and return the tasks."""
    with app.blocking() as b:
        tasks = [b.submit(app._functions[name], *payload) for name in ("plain", "coroutine")]
        return [b.wait(task, timeout=LONG) for task in tasks]


def test_hooks_nest_and_see_the_task_and_the_exception(app):
    seen = []
    for name in ("outer", "inner"):

        @app.around
        @contextmanager
        def hook(task, name=name):
            assert (task.id, task.attempt) == (current_task().id, current_task().attempt)
            mine = (task.service, task.attempt, name)
            seen.append((*mine, "before"))
            try:
                yield
            except ZeroDivisionError:
                seen.append((*mine, "failure"))
                raise
            seen.append((*mine, "after"))

    assert [task.result for task in run(app, 4)] == [0.25, 0.25]
    for name in ("plain", "coroutine"):
        assert [words[2:] for words in seen if words[0] == name] == [
            ("outer", "before"), ("inner", "before"), ("inner", "after"), ("outer", "after"),
        ]  # fmt: skip
    seen.clear()
    failed = run(app, 0)
    assert {task.state for task in failed} == {State.FAILED}
    for task in failed:
        assert [words[1:] for words in seen if words[0] == task.service] == [
            (attempt, *words)
            for attempt in (1, 2)
            for words in (("outer", "before"), ("inner", "before"), ("inner", "failure"),
                          ("outer", "failure"))
        ]  # fmt: skip
        assert "local.py" not in task.error  # the traceback is the user's own
        assert "contextlib" not in task.error


def test_a_hook_cannot_hide_a_failure_and_its_own_error_is_one(app):
    @app.around
    @contextmanager
    def hide(task):
        try:
            yield
        except ZeroDivisionError:
            pass
        if task.payload == [7]:
            raise ValueError("from the hook")

    for payload, error in ((0, "ZeroDivisionError"), (7, "from the hook")):
        for task in run(app, payload):
            assert (task.state, task.attempt) == (State.FAILED, 2)
            assert error in task.error


def test_a_cancelled_coroutine_function_passes_its_hook(app):
    seen = []

    @app.around
    @contextmanager
    def watch(task):
        try:
            yield
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    @app.task(timeout=0.05, max_attempts=1)
    async def sleep():
        await asyncio.Event().wait()

    with app.blocking() as b:
        assert b.wait(sleep.submit_sync(), timeout=LONG).state is State.FAILED
    assert seen == ["cancelled"]


def test_the_example_of_the_page_prints_what_it_shows(tmp_path):
    text = PAGE.read_text("utf-8")
    code = re.search(r"```py\n(.*?)```", text, re.DOTALL)[1]
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)[1]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == shown


class Collector(BaseHTTPRequestHandler):
    """A server of Sentry, as far as it takes reports."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.reports.append([json.loads(line) for line in body.splitlines()])
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def test_the_recipe_for_sentry_reports_the_exception_with_its_task(app):
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.reports = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        sentry_sdk.init(f"http://key@127.0.0.1:{port}/1", default_integrations=False)
        try:
            exec(recipe("Sentry"), {"app": app})
            failed = run(app, 0)
            sentry_sdk.flush(LONG)
        finally:
            sentry_sdk.get_client().close()
            sentry_sdk.init()
            server.shutdown()
    events = [line for report in server.reports for line in report if "exception" in line]
    found = {
        (event["contexts"]["task"]["id"], event["contexts"]["task"]["attempt"],
         event["tags"]["task_function"], event["exception"]["values"][0]["type"])
        for event in events
    }  # fmt: skip
    assert found == {
        (task.id, attempt, task.service, "ZeroDivisionError")
        for task in failed
        for attempt in (1, 2)
    }
