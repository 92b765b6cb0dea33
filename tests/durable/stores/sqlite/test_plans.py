"""Query plans on SQLite: every statement uses an index."""

import json
import re

import pytest

from contracts.stores import (
    ALL,
    HOUR,
    SHARDS,
    claim,
    ending,
    everything_that_a_store_does,
    lease,
    now,
    run,
    stored,
    task,
)
from durable.stores.sqlite.helpers import driver_of
from tickwheel.durable.stores.sqlite import registry as sqlite_registry
from tickwheel.durable.stores.sqlite import schedules as sqlite_schedules
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.durable.stores.sqlite.writer import Rank
from tickwheel.values.task import Filter

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class Statements:
    """Every statement that the store gives the driver, with the values of its first use."""

    def __init__(self, monkeypatch, driver):
        self.seen = {}
        run, run_until = driver.run, driver.run_until

        def noted(connection, statement, values=()):
            self.seen.setdefault(statement, values)
            return run(connection, statement, values)

        def noted_until(connection, full, statement, values):
            self.seen.setdefault(statement, values)
            return run_until(connection, full, statement, values)

        monkeypatch.setattr(driver, "run", noted)
        monkeypatch.setattr(driver, "run_until", noted_until)

    def plans(self, connection):
        """How each one is executed, by its text."""
        verbs = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")
        return {
            statement: [row[3] for row in connection.run(f"EXPLAIN QUERY PLAN {statement}", values)]
            for statement, values in list(self.seen.items())
            if statement.strip().upper().startswith(verbs)
        }


class TestPlans:
    @pytest.mark.parametrize("size", ["empty", "filled", "analyzed"])
    async def test_every_statement_uses_an_index(self, place, monkeypatch, size):
        driver = driver_of(place)
        statements = Statements(monkeypatch, driver)
        store = place.store()
        await store.open()
        if size != "empty":
            epochs = await store.take(ALL, "n1")
            tasks = [
                task(store, shard=n % SHARDS, service=f"s{n % 5}", key=f"f{n}" if n % 3 else None)
                for n in range(3_000)
            ]
            await stored(store, *tasks)
            running = await claim(store, tasks[::2], epochs)
            await store.record([ending(one) for one in running[::2]])
        await everything_that_a_store_does(store)
        if size == "analyzed":
            await store._write(Rank.CLAIM, lambda connection: connection.run("ANALYZE"))
        await store.close()
        monkeypatch.undo()

        connection = driver(place.address)
        for statement in sql.SCRATCH:
            connection.run(statement)
        plans = statements.plans(connection)
        connection.close()
        assert len(plans) > 60
        assert sql.ACCEPT in plans
        assert {sqlite_registry.PRUNE, sqlite_registry.OLD_LINES} < plans.keys()
        (step,) = plans[sqlite_schedules.TIMINGS]
        assert step.startswith("SEARCH schedule USING COVERING INDEX schedule_changed")
        assert {sql.find(table, "true", by_key=False) for table in sql.COLUMNS} < plans.keys()
        # These look at a bounded number of rows; the log's last lines are its last rows.
        counting = {*sql.COUNTS.values(), sqlite_registry.AUDIT}
        scans = [
            (statement, step)
            for statement, steps in plans.items()
            for step in steps
            if re.match(r"SCAN (task|t|backlog|b|attempt|a|idempotency|i|audit)\b", step)
            and statement not in counting
        ]
        assert scans == []

    @pytest.mark.parametrize("seen", [True, False], ids=["analyzed", "not analyzed"])
    async def test_what_runs_is_found_by_its_lease(self, store, seen):
        """The scan does not read tasks that wait for feedback for days."""
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, *[task(store) for _ in range(300)])
        await store.accept([lease(one, now(store) + HOUR) for one in running])
        if seen:
            await store._write(Rank.CLAIM, lambda connection: connection.run("ANALYZE"))

        def work(connection):
            values = {"shards": json.dumps([*ALL]), "until": 0}
            rows = connection.run(f"EXPLAIN QUERY PLAN {sql.RUNNING}", values)
            return [row[3] for row in rows]

        steps = await store._read(work)
        assert "SEARCH task USING INDEX task_lease (lease_until_ms<?)" in steps

    async def test_a_key_and_a_namespace_go_by_the_index_of_keys(self, store):
        where, values = sql.matching(Filter(key="k", namespace="acme"), 0)
        statement = sql.UNCLAIMED_BY_KEY.format(where=where, tagged="true")
        values |= {"after_service": "", "limit": 1}

        def work(connection):
            rows = connection.run(f"EXPLAIN QUERY PLAN {statement}", values)
            return [row[3] for row in rows]

        assert await store._read(work) == [
            "SEARCH task USING INDEX task_key (key=? AND service>? AND service<?)"
        ]

    async def test_a_walk_along_a_service_goes_on_where_it_ended_by_the_index(self, store):
        where, values = sql.matching(Filter(service="mail", unchanged_since_ms=5), 0)
        statement = sql.UNCLAIMED.format(where=where, tagged="true")
        values |= {"after_due": 5, "after_id": "", "limit": 1}

        def work(connection):
            rows = connection.run(f"EXPLAIN QUERY PLAN {statement}", values)
            return [row[3] for row in rows]

        assert await store._read(work) == [
            "SEARCH task USING INDEX task_due (service=? AND (due_at_ms,id)>(?,?))"
        ]

    async def test_what_is_due_is_read_in_the_order_of_the_index(self, store):
        def work(connection):
            rows = connection.run(
                f"EXPLAIN QUERY PLAN {sql.due(1, True)}", ["mail", -1, 5, 10, "mail", 5, 9, 10]
            )
            return [row[3] for row in rows]

        steps = await store._read(work)
        assert sum("USING INDEX task_due" in step for step in steps) == 2
        assert not [step for step in steps if "TEMP B-TREE" in step]
