"""top --store: a store is shown without a server, and nothing in it changes."""

import asyncio
import sqlite3

import pytest

from tickwheel.durable import Scheduler

MINUTE = 60


def fill(url):
    async def main():
        app = Scheduler(url, dispatch=False, node="shop", allow_private_targets=True)
        async with app:
            await app.put_service("mail", endpoint="http://127.0.0.1:9/", concurrency=7, rate=5)
            for delay in (0, 0, 90, 2 * 60 * MINUTE):
                await app.submit("mail", {}, delay=delay)
            await app.submit("expire", "o-1", delay=3 * MINUTE)

    asyncio.run(main())


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path}/tasks.db"


def test_the_tasks_services_and_numbers_of_a_store(run, url):
    fill(url)
    shown = run("top", "--store", url, "--once", "--interval", "0.1").json
    assert shown["stats"]["store"] == {"live": 5, "final": 0}
    assert shown["stats"]["services"] == {
        "expire": {"running": 0, "waiting": 0},
        "mail": {"running": 0, "waiting": 2},
    }
    second, minute, hour = shown["wheel"]["levels"]
    assert sum(second["counts"]) == 0
    assert [sum(level["counts"]) for level in (minute, hour)] == [2, 3]
    assert {"name": "mail", "enabled": True, "concurrency": 7, "rate": 5.0} in shown["services"]
    assert shown["rates"] == {"submitted": None, "sent": None, "ended": None}
    text = run("top", "--store", url, "--once", "--table", "--interval", "0.1").out
    assert "mail" in text
    assert "level 2" in text


def test_a_running_node_is_shown(run, tmp_path):
    url = f"sqlite:///{tmp_path}/tasks.db"
    app = Scheduler(url, node="shop")
    with app.blocking() as b:
        while not b.nodes():
            pass
        shown = run("top", "--store", url, "--once", "--interval", "0.1").json
    assert [(one["name"], one["state"]) for one in shown["nodes"]] == [("shop", "active")]


def test_the_nodes_of_a_cluster_on_zookeeper_are_shown(run, postgres_url, zookeeper_url):
    app = Scheduler(postgres_url, coordinator=zookeeper_url, node="shop")
    with app.blocking() as b:
        while not b.nodes():
            pass
        words = ["--coordinator", zookeeper_url, "--once", "--interval", "0.1"]
        shown = run("top", "--store", postgres_url, *words).json
    assert [(one["name"], one["state"]) for one in shown["nodes"]] == [("shop", "active")]
    ran = run("top", "--coordinator", zookeeper_url)
    assert (ran.code, "--coordinator needs --store" in ran.err) == (2, True)


def test_a_store_is_neither_created_nor_migrated(run, tmp_path):
    path = tmp_path / "tasks.db"
    url = f"sqlite:///{path}"
    ran = run("top", "--store", url)
    assert (ran.code, path.exists()) == (2, False)
    assert "there is no store in" in ran.err
    fill(url)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    ran = run("top", "--store", url)
    assert ran.code == 2
    assert "have version 1, and this program needs" in ran.err


def test_no_password_is_shown(run):
    ran = run("top", "--store", "postgresql://me:hunter2@127.0.0.1:1/x")
    assert ran.code == 7
    assert "hunter2" not in ran.out + ran.err
