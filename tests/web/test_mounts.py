"""Covers web.embedded: the dashboard in FastAPI and Django, mounted as in the docs, on uvicorn."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from playwright.sync_api import expect

import servers
from tickwheel.web import embedded
from tickwheel.web.embedded import uvicorn_stops
from web.browsing import confirm, elsewhere, expects, opened, press, sign_in
from web.serving import create_token

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "service-dashboard.md").read_text("utf-8")
CODE = dict(re.findall(r"^`(\S+)`\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
SETTINGS = """
SECRET_KEY = "x"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "mysite.urls"
INSTALLED_APPS = ["tickwheel.django", "mysite"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
"""
TASKS = """
from tickwheel.django import scheduler

@scheduler.task
def expire():
    pass
"""
URLS = """
from django.http import HttpResponse
from django.urls import path
from mysite.tasks import expire

urlpatterns = [
    path("own", lambda request: HttpResponse("own page")),
    path("order", lambda request: HttpResponse(expire.submit_sync().id)),
]
"""
FASTAPI = "with_fastapi:web"
DJANGO = "mysite.asgi:application"
PROJECT = {"__init__": "", "settings": SETTINGS, "tasks": TASKS, "urls": URLS}
STORES = {FASTAPI: "orders.db", DJANGO: "tickwheel.db"}
SECONDS = 60
NAME = '<img src=x onerror="document.title=1"> \u05e9\u05dc\u05d5\u05dd \U0001f480 ?#%2F'
SUBMIT = """async (service) => {
    const { post } = await import(new URL("static/api.js", document.baseURI));
    return (await post("v1/tasks", { service, delay: 3600 })).id;
}"""


@pytest.fixture
def site(tmp_path):
    (tmp_path / "mysite").mkdir()
    files = {f"mysite/{name}.py": text for name, text in PROJECT.items()} | CODE
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@contextmanager
def served(site, application):
    """Run uvicorn on a free port, until the end; give the process and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", application, "--fd", str(listening.fileno())],
            cwd=site, pass_fds=[listening.fileno()], env=servers.clean_environment(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        address = listening.getsockname()
    try:
        yield process, address
    finally:
        process.kill()
        process.wait()


@contextmanager
def asked(address, path, token=None):
    """Send a GET; give the response, whose body can be read as it comes."""
    with closing(http.client.HTTPConnection(*address, timeout=SECONDS)) as connection:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as response:
            yield response


def ask(address, path, token=None):
    """Return the status, a header and the body of the answer to a GET."""
    with asked(address, path, token) as response:
        return response.status, response.headers.get("location"), response.read()


@pytest.mark.parametrize("application", STORES)
def test_a_page_that_is_open_does_not_keep_the_server_from_stopping(site, application):
    token = elsewhere(create_token, f"sqlite:///{site}/{STORES[application]}", "read")
    with served(site, application) as (process, address):
        assert b"static/dashboard.js" in ask(address, "/jobs/")[2]
        assert ask(address, "/jobs/static/dashboard.js")[0] == 200
        assert ask(address, "/jobs/v1/tasks")[0] == 401
        assert ask(address, "/jobs/v1/tasks", token)[0] == 200
        assert ask(address, "/jobsite")[0] == 404
        with asked(address, "/jobs/v1/live", token) as stream:
            while b"event: figures" not in stream.readline():
                pass
            process.send_signal(signal.SIGTERM)
            stream.read()  # to its end
        assert process.wait(SECONDS) in (0, -signal.SIGTERM)


def test_a_task_is_cancelled_in_a_browser_below_the_mount(site, browser):
    functions = f"@app.task\ndef run():\n    pass\n\n\napp.task(name={NAME!r})(lambda: None)\n"
    module = site / "with_fastapi.py"
    module.write_text(f"{module.read_text()}\n\n{functions}")
    token = elsewhere(create_token, f"sqlite:///{site}/orders.db", "admin")
    with served(site, FASTAPI) as (_, address):
        url = "http://{}:{}/jobs".format(*address)
        with opened(browser, url) as page:
            expects(page, 401)
            page.go("services")
            sign_in(page, token)
            expect(page.get_by_role("link", name=NAME)).to_be_visible()  # as text
            task = page.evaluate(SUBMIT, "run")
            page.go(f"tasks/{task}")
            press(page, "Cancel")
            confirm(page, "Cancel the task")
            expect(page.locator(".page-head .pill")).to_have_text("cancelled")
            assert {one["path"] for one in page.context.cookies(f"{url}/v1/session")} == {
                "/jobs/v1"
            }
            page.close()


def test_django_answers_what_is_not_below_the_mount(site):
    with served(site, DJANGO) as (_, address):
        assert ask(address, "/own")[2] == b"own page"
        assert ask(address, "/jobs")[:2] == (308, "jobs/")


def test_the_mount_in_django_shows_the_tasks_that_its_views_submit_and_runs_none(site):
    token = elsewhere(create_token, f"sqlite:///{site}/{STORES[DJANGO]}", "read")
    with served(site, DJANGO) as (_, address):
        status, _, order = ask(address, "/order")
        assert status == 200, order
        status, _, shown = ask(address, f"/jobs/v1/tasks/{order.decode()}", token)
        assert (status, json.loads(shown)["service"]) == (200, "expire")
        assert json.loads(ask(address, "/jobs/v1/stats", token)[2])["owned"] == 0


def test_a_stream_ends_after_a_while_on_a_server_that_tells_nothing(site):
    text = "from tickwheel.web import embedded\nembedded.STREAM_SECONDS = 0.5\n"
    module = site / "with_fastapi.py"
    module.write_text(text + module.read_text())
    token = elsewhere(create_token, f"sqlite:///{site}/orders.db", "read")
    with served(site, FASTAPI) as (_, address):
        assert b"retry: " in ask(address, "/jobs/v1/live", token)[2]


def test_only_a_server_that_has_been_told_to_stop_is_stopping(monkeypatch):
    class Server:
        should_exit = False

        def handle_exit(self):
            pass

    server = Server()
    handlers = {signal.SIGTERM: server.handle_exit, signal.SIGINT: signal.SIG_DFL}
    monkeypatch.setattr(embedded, "signal", SimpleNamespace(
        getsignal=handlers.get, SIGTERM=signal.SIGTERM, SIGINT=signal.SIGINT,
    ))  # fmt: skip
    assert not uvicorn_stops()
    server.should_exit = True
    assert uvicorn_stops()
