"""Fixtures: the application in this process, on either store, and servers."""

import faulthandler
import json
import shutil

import pytest
from playwright.sync_api import sync_playwright

from receivers import Receiver, answering
from web.serving import Api, Served

WATCHDOG = 60.0
TRACEBACK = (
    'Traceback (most recent call last):\n  File "job.py", line 3\nValueError: order 17 is bad'
)
PROBLEM = json.dumps({"error": TRACEBACK}).encode()


@pytest.fixture(autouse=True)
def watched(request):
    """Ends a run that hangs; a module with long tests sets its own WATCHDOG."""
    seconds = getattr(request.module, "WATCHDOG", WATCHDOG)
    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path}/tasks.db"


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request):
    """A new store, on SQLite and on PostgreSQL."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def make_api(sqlite_url):
    """Makes applications in this process, by default on one SQLite file."""
    made = []

    def make(url=sqlite_url, **options):
        made.append(Api(url, **options))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture
def api(make_api):
    """The application with open access, on SQLite."""
    return make_api()


@pytest.fixture
def mail(api):
    """The application with a service `mail` whose endpoint does not answer."""
    api.service("mail", enabled=False)
    return api


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """An application with one task, for requests that are refused and change nothing."""
    with Api(f"sqlite:///{tmp_path_factory.mktemp('strict')}/tasks.db") as api:
        api.service("mail", enabled=False)
        api.task = api.submit()
        api.untouched = lambda: api.get("/v1/tasks").json["items"] == [api.task]
        yield api


@pytest.fixture
def either_api(store_url, make_api):
    """The application with open access, on SQLite and on PostgreSQL."""
    return make_api(store_url)


@pytest.fixture
def serve(tmp_path, sqlite_url):
    """Starts servers, by default on one SQLite file, and stops them."""
    made = []

    def start(*arguments, store=sqlite_url, **options):
        always = ("--store", store, "--allow-private-targets")
        server = Served(*always, *arguments, cwd=tmp_path, **options)
        made.append(server)
        server.start()
        return server

    yield start
    for server in made:
        if server.process is not None:
            server.__exit__(None)


@pytest.fixture
def receiver():
    with Receiver() as made:
        yield made


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium-headless-shell")
    assert path, "chromium is missing: apt-get install chromium-headless-shell"
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def callee():
    with Receiver() as made:
        made.on("/bad", answering(500, PROBLEM, content_type="application/json"))
        yield made
