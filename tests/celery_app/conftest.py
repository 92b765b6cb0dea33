"""A tickwheel server, brokers, apps and real workers."""

import contextlib
import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import kombu.pools
import pytest
from redis import Redis

import servers
from durable.stage import watchdog
from tickwheel.client import Client
from web.serving import Served

HERE = Path(__file__).parent
# Celery and kombu call what redis-py has deprecated, and leave connections open.
CELERY_WARNINGS = [
    pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LATER = 3600  # seconds: a message that stays in tickwheel during the test


@pytest.fixture(autouse=True)
def watched():
    """End a test that hangs."""
    with watchdog():
        yield


@pytest.fixture(scope="session")
def redis(redis_server):
    return redis_server


@pytest.fixture
def broker(redis):
    """A client of Redis, which is empty when a test has ended."""
    with Redis(port=redis.port) as client:
        yield client
        client.flushall()


def redis_url(redis, database=0):
    return f"redis://127.0.0.1:{redis.port}/{database}"


def queued(broker, queue="celery"):
    """How many messages are in a queue of the broker."""
    return broker.llen(queue)


@pytest.fixture(scope="session")
def rabbitmq(rabbit_server):
    return rabbit_server


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A tickwheel server."""
    path = tmp_path_factory.mktemp("server")
    store = f"sqlite:///{path}/tasks.db"
    with Served("--store", store, "--allow-private-targets", cwd=path) as server:
        yield server


@pytest.fixture
def client(server):
    """A client of the server, which has no tasks when a test begins and none when it has ended."""
    with Client(server.url) as client:
        yield client
        for service in client.services():
            client.cancel_where(service=service.name)


@contextlib.contextmanager
def shop(broker, backend, server="", service="celery"):
    """The app of `shop.py` with these servers, and the environment for workers of it."""
    settings = {
        "SHOP_BROKER": broker,
        "SHOP_BACKEND": backend,
        "SHOP_SERVER": server,
        "SHOP_SERVICE": service,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        spec = importlib.util.spec_from_file_location("shop", HERE / "shop.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "shop", module)
        spec.loader.exec_module(module)
        try:
            yield module
        finally:
            gc.collect()  # while the backend of its results is there
            module.app.close()
            kombu.pools.reset()


class Worker:
    """An ordinary `celery worker`, by default for the app of the environment."""

    def __init__(self, path, *options, app="shop", folder=HERE):
        self.log_path = path / "worker.log"
        self._app = app
        self._folder = folder
        self._options = options
        self._process = None

    def __enter__(self):
        name = f"w{os.getpid()}@test"
        options = ["worker", "-c", "1", "-l", "INFO", "-n", name, *self._options]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", self._app, *options],
                stdout=log, stderr=log, cwd=self._folder, start_new_session=True,
                env=os.environ | {"PYTHONPATH": str(self._folder)},
            )  # fmt: skip
        servers.wait_until(self._is_ready, "the worker is ready")
        return self

    def _is_ready(self):
        assert self._process.poll() is None, self.log_path.read_text()
        return " ready." in self.log_path.read_text()

    def kill(self):
        """Kill it and its children."""
        for pid in [*servers._descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.wait(servers.PATIENCE)

    def __exit__(self, *_):
        self.kill()
