"""Implementations by name: what is chosen, and what is said when a package is missing."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tickwheel.durable import Scheduler
from tickwheel.durable.implementations import BROKERS, channels_for, coordinator_for, store_at
from tickwheel.durable.permits import descriptors
from tickwheel.durable.permits.descriptors import (
    BROKERS_SHARE,
    CALLS_SHARE,
    CONNECTIONS_SHARE,
    LOOKUPS_SHARE,
    limit,
)
from tickwheel.values.service import Service

ROOT = Path(__file__).parents[2]
HTTP = "tickwheel.durable.channels.http.channel"
URL = "https://example.org/hook"


def channels():
    return channels_for(
        {}, lambda: 0.0, threads=1, allow_private=False, allow=(), own_port=None, max_calls=10,
        own={},
    )  # fmt: skip


def hide(monkeypatch, package, *importers):
    """Have `package` missing, and forget the modules that import it.

    A module that is imported again also becomes an attribute of its package: both are undone.
    """
    for name in list(sys.modules):
        if name.startswith(importers):
            parent, _, attribute = name.rpartition(".")
            monkeypatch.setattr(sys.modules[parent], attribute, sys.modules[name])
    for name in list(sys.modules):
        if name.startswith(importers):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def hide_httptools(monkeypatch):
    hide(monkeypatch, "httptools", "tickwheel.durable.channels.http", "tickwheel.http")


@pytest.fixture
def without_httptools(monkeypatch):
    """An installation without the package of the HTTP channel."""
    hide_httptools(monkeypatch)


def test_every_protocol_has_a_channel():
    assert channels().keys() == {
        "local", "http", "rabbitmq", "redis", "celery", "kafka", "nats", "grpc",
    }  # fmt: skip


def test_open_connections_have_one_limit_over_http_and_grpc_and_one_for_all_brokers():
    made = channels()
    assert made["grpc"]._connections is made["http"].connections
    assert made["http"].connections.limit == made["http"].calls.permits
    assert len({id(made[name]._connections) for name in BROKERS}) == 1
    assert made["kafka"]._connections.limit == min(1000, int(limit() * BROKERS_SHARE))
    shares = CONNECTIONS_SHARE, CALLS_SHARE, BROKERS_SHARE, LOOKUPS_SHARE
    assert round(sum(shares), 6) <= 0.9


@pytest.mark.asyncio
async def test_a_low_limit_of_calls_is_logged_once_if_there_is_a_service(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(descriptors, "limit", lambda: 2000)
    caplog.set_level("INFO", "tickwheel")
    url = f"sqlite:///{tmp_path}/tasks.db"
    async with Scheduler(url) as app:
        assert "calls at once" not in caplog.text
        for name in ("mail", "sms"):
            await app.put_service(name, endpoint=URL)
    async with Scheduler(url):
        logged = [record for record in caplog.messages if "calls at once" in record]
    assert logged == 2 * [
        "400 calls at once instead of 10000: this process may have 2000 file descriptors"
    ]


def test_the_extra_of_each_channel_has_the_package_that_all_of_them_import():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in ("grpc", *BROKERS):
        assert "tickwheel[client]" in project["optional-dependencies"][extra], extra


@pytest.mark.parametrize("package", ["grpc", "google.protobuf.message", "google.rpc.status_pb2"])
def test_without_one_of_the_packages_of_grpc_its_services_are_refused(monkeypatch, package):
    hide(monkeypatch, package, "tickwheel.durable.channels.grpc.calls")
    with pytest.raises(ImportError, match=r"protocol 'grpc' .*pip install 'tickwheel\[grpc\]'"):
        channels()["grpc"].check(Service("mail", "grpc", endpoint="grpc://example.org:443"))


PACKAGES = {
    "rabbitmq": "aiormq", "celery": "kombu", "redis": "redis.asyncio.connection",
    "kafka": "aiokafka", "nats": "nats.aio.client",
}  # fmt: skip


@pytest.mark.parametrize("protocol", BROKERS)
def test_without_its_package_the_services_of_a_broker_are_refused(monkeypatch, protocol):
    module, _ = BROKERS[protocol]
    importlib.import_module(module)
    hide(monkeypatch, PACKAGES[protocol], module)
    expected = rf"protocol '{protocol}' .*pip install 'tickwheel\[{protocol}\]'"
    with pytest.raises(ImportError, match=expected):
        channels()[protocol].check(Service("mail", protocol, endpoint="any://example.org"))


def test_a_scheduler_that_calls_nothing_over_grpc_does_not_load_it(tmp_path):
    program = (
        "import asyncio, sys\n"
        "from tickwheel.durable import Scheduler\n"
        "async def main():\n"
        f"    async with Scheduler('sqlite:///{tmp_path}/tasks.db'):\n"
        "        print('grpc' in sys.modules)\n"
        "asyncio.run(main())\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert found.stdout == b"False\n"


@pytest.mark.usefixtures("without_httptools")
def test_a_channel_without_its_package_names_the_extra_to_install():
    with pytest.raises(ImportError, match=r"protocol 'http' .*pip install 'tickwheel\[client\]'"):
        channels()["http"].check(Service("mail", "http", endpoint=URL))


@pytest.mark.asyncio
@pytest.mark.usefixtures("without_httptools")
async def test_so_does_the_service_that_is_put_and_the_one_that_is_stored(
    tmp_path, caplog, monkeypatch
):
    url = f"sqlite:///{tmp_path}/tasks.db"
    async with Scheduler(url) as app:
        with pytest.raises(ImportError, match=r"tickwheel\[client\]"):
            await app.put_service("mail", endpoint=URL)
    monkeypatch.undo()
    async with Scheduler(url) as app:
        await app.put_service("mail", endpoint=URL)
    hide_httptools(monkeypatch)
    caplog.clear()
    async with Scheduler(url) as app:
        assert "tickwheel[client]" in caplog.text
        await app.submit("mail", b"held until the package is there")


def test_a_store_without_its_driver_names_the_extra_to_install(monkeypatch):
    hide(monkeypatch, "asyncpg", "tickwheel.durable.stores.postgres")
    with pytest.raises(ImportError, match=r"pip install 'tickwheel\[postgres\]'"):
        store_at("postgresql://h/d", shards=8)


@pytest.mark.parametrize("name", ["postgres", "zookeeper", ""])
def test_a_coordinator_that_does_not_fit_the_store_is_refused(name):
    with pytest.raises(ValueError, match="coordinator must be 'solo', or on PostgreSQL 'postgres'"):
        coordinator_for("sqlite:///tasks.db", name)
