"""Stalled tasks, as a server shows them: log, metrics and `/readyz`."""

import re

import psycopg
import pytest

from tickwheel.durable.steps.health import Reason
from web.serving import wait_until

pytestmark = pytest.mark.usefixtures("watched")

QUICK = {
    "durable.steps.health.INTERVAL_SECONDS": 0.2,
    "durable.steps.health.IDLE_INTERVAL_SECONDS": 0.2,
    "durable.steps.health.STALLED_AFTER_SECONDS": 1.0,
}


def stalled(server):
    """Return for how long tasks have been stalled, by reason."""
    page = server.get("/metrics", status=200).body.decode()
    found = re.findall(r'^tickwheel_stalled_seconds\{reason="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {reason: float(seconds) for reason, seconds in found}


def is_ready(server):
    return server.get("/readyz").status == 200


def test_a_locked_task_is_in_the_log_and_the_metrics(serve, postgres_url, receiver):
    taker = serve("--submit-only", store=postgres_url, constants=QUICK)
    taker.service(endpoint=receiver.url("/ok"))
    task = taker.submit(delay=0)
    with psycopg.connect(postgres_url) as user:
        user.execute("SELECT 1 FROM task FOR UPDATE")
        server = serve("--log-format", "json", store=postgres_url, constants=QUICK)
        wait_until(lambda: stalled(server)["locked"] > 1, "the metric tells of it")
        assert stalled(server).keys() == {*Reason}
        assert server.get("/v1/stats").json["stalled"]["locked"] > 1
        assert is_ready(server)  # a lock held by others does not make the node unready
        lines = [line for line in server.lines() if "stalled (locked)" in line["message"]]
        assert [(line["level"], line["task"]) for line in lines] == [("warning", task["id"])]
        user.rollback()
    taker.task_in(task["id"], "finished")
    wait_until(lambda: not any(stalled(server).values()), "nothing stands still")


def test_without_a_dispatching_node_the_submitting_one_reports_it(serve, postgres_url):
    taker = serve("--submit-only", "--log-format", "json", store=postgres_url, constants=QUICK)
    taker.service()
    taker.submit(delay=0)
    wait_until(lambda: stalled(taker)["owner"] > 1, "the metric tells of it")
    assert "no node owns its shard" in taker.log()
    assert is_ready(taker)


def test_a_read_only_database_makes_it_unready(serve, postgres_url):
    server = serve(store=postgres_url, errors=True)
    wait_until(lambda: is_ready(server), "it can do its work")
    name = postgres_url.rpartition("/")[2]
    with psycopg.connect(postgres_url, autocommit=True) as user:
        others = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        user.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        user.execute(others)
        wait_until(lambda: not is_ready(server), "it cannot do its work")
        answer = server.get("/readyz").json
        assert answer["status"] == "unavailable"
        assert "cannot be written" in answer["reasons"][0] or "the store" in answer["reasons"][0]
        user.execute("SET default_transaction_read_only = off")
        user.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = off")
        user.execute(others)
    wait_until(lambda: is_ready(server), "it can do its work again")
