"""Which rows the statements on PostgreSQL look at, whatever the planner knows of the tables."""

import contextlib
import json
import os
import re
from typing import Any

import pytest
import pytest_asyncio

from contracts.stores import (
    BELIEVED,
    HOUR,
    NOBODY,
    SECOND,
    believe,
    claim,
    lease,
    now,
    stored,
    task,
)
from durable.postgres_stage import ALL, SHARDS, connected, opened
from tickwheel.durable.store import ERROR_WEIGHT
from tickwheel.durable.stores.postgres import filters, transaction
from tickwheel.durable.stores.postgres import registry as postgres_registry
from tickwheel.durable.stores.postgres import schedules as postgres_schedules
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres.transaction import insert_statement
from tickwheel.values.task import Filter, State, Submission

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest_asyncio.fixture
async def store(postgres_url):
    async with opened(postgres_url) as store:
        yield store


@pytest_asyncio.fixture
async def user(postgres_url, store):
    async with connected(postgres_url) as user:
        yield user


FILTERS = {
    "key": Filter(key="k"),
    "key_and_service": Filter(key="k", service="mail"),
    "service": Filter(service="mail"),
    "service_ready": Filter(service="mail", state=State.READY),
    "service_due": Filter(service="mail", due_before_ms=0),
    "key_in_namespace": Filter(key="k", namespace="acme"),
    "key_in_none": Filter(key="k", namespace=""),
    "service_in_namespace": Filter(service="acme/mail", namespace="acme"),
    "service_tagged": Filter(service="mail", tags=("a", "b")),
    "key_tagged": Filter(key="k", tags=("a",)),
}
LISTS = FILTERS | {
    "all": Filter(),
    "failed": Filter(State.FAILED),
    "namespace": Filter(namespace="acme"),
}


RANGES = {name: LISTS[name] for name in ("all", "namespace", "service", "service_tagged")}
PAGE: dict[str, Any] = {"now_ms": 0, "before": "f" * 32, "scan": 9, "limit": 9, "most_bytes": 9}


def found_in(table, which):
    return filters.find(table, which, **PAGE)[0]


def of_user(statement):
    """A statement for the user's connection, as one of the store's."""
    return statement.format("$1", "$2", "$3", schema="tickwheel")


STATEMENTS = {
    "insert": sql.INSERT,
    "insert_keyed": sql.INSERT_KEYED,
    "lock_holder": sql.LOCK_HOLDER,
    "replace_keyed": sql.REPLACE_KEYED,
    "holders": sql.HOLDERS,
    "use": sql.USE,
    "used": sql.USED,
    "used_for": sql.USED_FOR,
    "unused": sql.UNUSED,
    "due": sql.DUE,
    "claim": sql.CLAIM,
    "unclaimed": sql.UNCLAIMED,
    "record": sql.RECORD,
    "locked": sql.LOCKED,
    "renew": sql.RENEW,
    "accept": sql.ACCEPT,
    "accepted": sql.ACCEPTED,
    "delivered": sql.DELIVERED,
    "left_behind": sql.LEFT_BEHIND,
    "running": sql.running(bounded=False),
    "running_bounded": sql.running(bounded=True),
    "running_by_id": sql.RUNNING_BY_ID,
    "services": sql.SERVICES,
    "services_due": sql.SERVICES_DUE,
    "services_of_latest": sql.SERVICES_OF_LATEST,
    "cancel": sql.cancel(),
    "reschedule": sql.reschedule(),
    "cancel_where": sql.cancel("true"),
    "reschedule_where": sql.reschedule("true"),
    "user_cancel": of_user(transaction.CANCEL),
    "user_reschedule": of_user(transaction.RESCHEDULE),
    "user_states": of_user(transaction.STATES),
    "user_by_key": of_user(transaction.BY_KEY),
    "due_exact": sql.DUE_EXACT,
    "due_estimate": sql.DUE_ESTIMATE,
    "expire": sql.EXPIRE,
    "states": sql.STATES_BY_ID,
    "get": sql.BY_ID,
    "attempts": sql.ATTEMPTS,
    "replay": sql.REPLAY,
    "replay_holders": sql.REPLAY_HOLDERS,
    "old": sql.OLD,
    "prune_some": sql.PRUNE_SOME,
    "prune": sql.PRUNE,
    "pending_firings": postgres_schedules.PENDING_FIRINGS,
    "fire": postgres_schedules.FIRE,
    "timings": postgres_schedules.TIMINGS,
    "in_use": postgres_registry.IN_USE,
    "forget": postgres_registry.OLD,
    "forget_lines": postgres_registry.OLD_LINES,
    "audit": postgres_registry.AUDIT,
    "audit_of": postgres_registry.AUDIT_OF,
    **{
        f"unclaimed_{name}": filters.select_unclaimed(which, 0, 9, filters.Place())[0]
        for name, which in FILTERS.items()
    },
    "still_unclaimed": sql.still_unclaimed("true"),
    **{f"live_{name}": found_in("task", which) for name, which in LISTS.items()},
    **{f"final_{name}": found_in("backlog", which) for name, which in LISTS.items()},
    **{
        f"find_due_{name}": filters.find_due(one, (0, 9), **PAGE)[0] for name, one in RANGES.items()
    },
    **{f"count_due_{name}": filters.count_due(one, (0, 9), 9)[0] for name, one in RANGES.items()},
}


# 100 KiB that do not get smaller, so that they are kept apart from their row.
RANDOM = {
    "payload": "(SELECT string_agg(sha512(i::text::bytea), '') FROM generate_series(1, 1600) i)",
    "error": "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 3200) i)",
}
WALKS = {"running", "running_bounded", "services", "services_due"}


class TestPlans:
    """Every hot statement goes by an index, whatever the planner knows of the tables."""

    async def plans(self, store):
        """The nodes of each statement's plan that look at a large table."""
        return await store.run(lambda connection: plans_of(connection, STATEMENTS), 60)

    def check(self, found):
        assert [
            (name, *look(node))
            for name, nodes in found.items()
            for node in nodes
            if not good(name, node)
        ] == []

    async def test_of_empty_tables(self, store):
        self.check(await self.plans(store))

    async def test_of_large_tables(self, store, user):
        await fill(user, 50_000)
        await user.execute("ANALYZE")
        self.check(await self.plans(store))

    async def test_of_tables_that_have_grown_since_the_planner_looked(self, store, user):
        await user.execute("ANALYZE")
        await fill(user, 50_000)
        self.check(await self.plans(store))

    @pytest.mark.parametrize("others", BELIEVED, ids="others {:.0e}".format)
    @pytest.mark.parametrize("rows", BELIEVED, ids="tasks {:.0e}".format)
    async def test_of_tables_that_the_planner_is_wrong_about(self, store, user, rows, others):
        """As it is when tables were analyzed while they were empty, and have grown since."""
        await fill(user, 2_000)
        await user.execute("ANALYZE")
        known = await self.plans(store)
        await believe(user.fetch, rows, others)
        found = await self.plans(store)
        self.check(found)
        for name, nodes in found.items():
            assert (name, [*map(look, nodes)]) == (name, [*map(look, known[name])])

    @pytest.mark.parametrize("rows", BELIEVED)
    @pytest.mark.parametrize("on_conflict", ["reject", "replace"])
    async def test_of_a_submit_on_a_connection_of_the_users(self, store, user, rows, on_conflict):
        """No setting of ours helps there."""
        await fill(user, 20_000)
        await user.execute("UPDATE task SET key = id::text")
        await believe(user.fetch, rows, rows)
        submission = Submission(task(store, key="k"), on_conflict)
        await user.execute("SET plan_cache_mode = force_generic_plan")
        found = await plans_of(user, {"submit": insert_statement(submission, store.schema)[0]})
        assert {look(node)[:2] for node in found["submit"]} == {("Index Scan", "task_key")}

    async def test_the_loader_goes_along_the_due_times(self, store, user):
        await fill(user, 10_000)
        found = await self.plans(store)
        assert [node["Index Name"] for node in found["due"]] == ["task_due"] * sql.MERGED
        for node in found["due"]:
            for column in ("service", "shard", "due_at_ms"):
                assert column in node["Index Cond"]

    async def test_to_know_which_services_have_something_due_costs_what_is_due(self, store, user):
        await fill(user, 20_000)
        await user.execute("UPDATE task SET service = 's' || due_at_ms % 1000")
        await stored(store, *[task(store, service="mail", shard=n % SHARDS) for n in range(9)])
        (node,) = (await self.plans(store))["services_of_latest"]
        assert node["Index Name"] == "task_time"
        for since, due in ((-1, 9), (now(store), 0)):
            until = str(now(store) + HOUR)
            blocks, rows = await self.cost(store, sql.SERVICES_OF_LATEST, str(since), until)
            assert rows == due
            assert blocks < 30
        assert await store.services(now(store)) == ["mail"]

    @pytest.mark.parametrize("seen", [True, False], ids=["analyzed", "not analyzed"])
    async def test_the_loader_reads_no_shards_of_others_and_no_more_than_its_window(
        self, store, user, seen
    ):
        await fill(user, 20_000, due="1000 + n % 7", shards=4)
        if seen:
            await user.execute("ANALYZE")
        window = "ARRAY['s1'], ARRAY[-1::bigint], ARRAY[9999::bigint], ARRAY[{}::bigint]"
        others, _ = await self.cost(store, sql.DUE, window.format(1_000), f"ARRAY{[4, 5, 6, 7]}")
        assert others < 50
        for most in (10, 100):
            _, rows = await self.cost(store, sql.DUE, window.format(most), f"ARRAY{[*ALL]}")
            assert most <= rows <= most + SHARDS

    async def test_a_look_comes_by_no_ended_tasks_that_were_due_before_it_begins(
        self, store, user, postgres_url
    ):
        """A transaction left open elsewhere keeps their rows, whatever is vacuumed."""
        async with connected(postgres_url) as other:
            await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await other.fetch("SELECT 1 FROM tickwheel.task")
            await fill(user, 20_000, due="1000 + n % 7")
            await user.execute("DELETE FROM task")
            await user.execute("VACUUM task")
            looks = {}
            for since in (-1, 5_000):
                window = (
                    f"ARRAY['s1'], ARRAY[{since}::bigint], ARRAY[9999::bigint], ARRAY[9::bigint]"
                )
                blocks, _ = await self.cost(store, sql.DUE, window, f"ARRAY{[*ALL]}")
                names, _ = await self.cost(store, sql.SERVICES_OF_LATEST, str(since), "9999")
                looks[since] = blocks, names
        assert min(looks[-1]) > 1_000, "they are there"
        assert max(looks[5_000]) < 50

    async def test_what_runs_is_found_without_a_look_at_what_comes_later(self, store, user):
        await fill(user, 20_000)
        (running,) = await claim(
            store, await stored(store, task(store)), await store.take(ALL, "n1")
        )
        blocks, rows = await self.cost(store, sql.running(bounded=False), f"ARRAY{[*ALL]}", "NULL")
        assert blocks < 500  # some for each service and shard
        assert rows < 20
        assert [one.id for one in await store.running(ALL)] == [running.id]

    async def test_what_runs_is_looked_for_behind_so_many_that_wait(self, store, user):
        await fill(user, 20_000, due="1000 + n % 7")
        epochs = await store.take(ALL, "n1")
        given = [task(store, service="s1", due_at_ms=due, shard=3) for due in (5, 6, 9_999, 9)]
        running = await claim(store, await stored(store, *given), epochs)
        statement = sql.running(bounded=True)
        _, rows = await self.cost(store, statement, f"ARRAY{[*ALL]}", "NULL", "10")
        assert rows < 5 * SHARDS * 21 + 20  # of each service and shard: to the bound, and so far
        first = [one for one in running if one.due_at_ms != 9_999]
        found = await store.running(ALL, behind=0)
        assert [one.id for one in found] == [
            one.id for one in sorted(first, key=lambda one: one.due_at_ms)
        ]
        for behind, count in ((499, 3), (500, 4), (10**9, 4), (None, 4)):
            assert len(await store.running(ALL, behind=behind)) == count

    async def test_what_runs_and_is_due_later_is_found_by_a_whole_look(self, store, user):
        """The clock was set back since it was claimed; much that is due later does not run."""
        await fill(user, 20_000, due="9000000000000 + n")
        epochs = await store.take(ALL, "n1")
        (running,) = await claim(store, await stored(store, task(store, shard=3)), epochs)
        at = int(store.now_ms())
        await user.execute("UPDATE task SET due_at_ms = $1 WHERE id = $2", at + HOUR, running.id)
        (found,) = await store.running(ALL, None, at + 90 * SECOND)
        assert (found.id, found.due_at_ms) == (running.id, at + HOUR)
        assert await store.running(ALL, 100, at + 90 * SECOND) == []
        _, rows = await self.cost(store, sql.running(bounded=True), f"ARRAY{[*ALL]}", "NULL", "100")
        assert rows < 20

    @pytest.mark.parametrize("bounded", [True, False])
    async def test_what_waits_for_feedback_costs_a_sweep_nothing(self, store, user, bounded):
        given = [task(store, shard=n % SHARDS) for n in range(1_001)]
        epochs = await store.take(ALL, "n1")
        left, *running = await claim(store, await stored(store, *given), epochs)
        at = int(store.now_ms())
        await store.accept([lease(one, at + 48 * HOUR) for one in running])
        values = [f"ARRAY{[*ALL]}", str(at + 90 * SECOND), *(["100"] if bounded else [])]
        _, rows = await self.cost(store, sql.running(bounded=bounded), *values)
        assert rows < 10
        found = await store.running(ALL, 100 if bounded else None, at + 90 * SECOND)
        assert [one.id for one in found] == [left.id]

    async def test_whose_feedback_is_overdue_is_found_at_the_cost_of_those_alone(self, store, user):
        epochs = await store.take(ALL, "n1")
        given = [task(store, shard=n % SHARDS) for n in range(1_010)]
        running = await claim(store, await stored(store, *given), epochs)
        at = int(store.now_ms())
        await store.accept([lease(one, at + 48 * HOUR) for one in running[10:]])
        await store.accept([lease(one, at - HOUR) for one in running[:10]])
        await fill(user, 20_000, due="1000 + n % 7")
        _, rows = await self.cost(store, sql.ACCEPTED, f"ARRAY{[*ALL]}", str(at))
        assert rows == 20  # ten in each table
        found = await store.running(ALL, 100, at)
        assert {one.id for one in found} == {one.id for one in running[:10]}

    @pytest.mark.parametrize("large", ["payload", "error"])
    @pytest.mark.parametrize("table", ["task", "backlog"])
    async def test_a_page_that_is_full_reads_no_payload_or_error_beyond(
        self, store, user, table, large
    ):
        """Large ones are kept apart, and read for the answer alone: not to know their sizes."""
        values = {"payload": "''", "error": "NULL"} | {large: RANDOM[large]}
        await user.execute(f"""
            INSERT INTO {table} (id, due_at_ms, created_at_ms, updated_at_ms, shard, priority,
                max_attempts, state, service, payload, error)
            SELECT gen_random_uuid(), 0, 0, 0, 0, 0, 1, 'failed', 's', {values["payload"]},
                {values["error"]}
            FROM generate_series(1, 200)
        """)
        weight = ERROR_WEIGHT if large == "error" else 1
        statement, values = filters.find(
            table, Filter(), now_ms=0, before="f" * 32, scan=10_000, limit=1_000,
            most_bytes=5 * 102_400 * weight,
        )  # fmt: skip
        assert await self.apart(store, user, table, statement, values) == (5, 5)

    async def test_a_claim_reads_the_payloads_alone_that_it_gives(self, store, user):
        epochs = await store.take(ALL, "n1")
        given = [task(store, body=os.urandom(100_000)) for _ in range(9)]
        await stored(store, *given)
        rows = [[one.id, one.due_at_ms, one.shard, epochs[one.shard]] for one in given]
        columns = [*zip(*rows, strict=True)]
        values = [[*epochs], [*epochs.values()], *columns, "n1", HOUR, 250_000]
        assert await self.apart(store, user, "task", sql.CLAIM, values) == (3, 3)

    async def test_a_part_of_a_log_that_is_full_reads_no_error_beyond(self, store, user):
        await user.execute(f"""
            INSERT INTO attempt (task_id, attempt, event, epoch, started_at_ms, ended_at_ms, error)
            SELECT '{NOBODY}', n, 'retry', 1, 0, 0, {RANDOM["error"]} FROM generate_series(1, 200) n
        """)
        values = [NOBODY, 0, 1_000, 5 * 102_400 * ERROR_WEIGHT]
        assert await self.apart(store, user, "attempt", sql.ATTEMPTS, values) == (5, 5)

    async def apart(self, store, user, table, statement, values):
        """How many rows a statement gives, and how many values kept apart it reads for them."""
        toast = await user.fetchval(
            f"SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = '{table}'::regclass"
        )
        count = f"""
            SELECT idx_scan FROM pg_stat_xact_all_tables WHERE relid = '{toast}'::regclass
        """

        async def work(connection):
            async with in_one(connection):
                before = (await connection.fetch(count))[0][0]
                rows = await connection.fetch(statement, *values)
                return len(rows), (await connection.fetch(count))[0][0] - before

        return await store.run(work)

    async def cost(self, store, statement, *values):
        """The pages that a statement looks at, and the rows of large tables that it comes by."""

        async def work(connection):
            await connection.execute(f"PREPARE look AS {statement}")
            rows = await connection.fetch(
                "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON)"
                f" EXECUTE look ({', '.join(values)})"
            )
            await connection.execute("DEALLOCATE look")
            return json.loads(rows[0][0])[0]["Plan"]

        plan = await store.run(work)
        passed = ("Actual Rows", "Rows Removed by Filter")
        rows = sum(
            sum(node.get(name, 0) for name in passed) * node["Actual Loops"] for node in looks(plan)
        )
        return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], rows


@contextlib.asynccontextmanager
async def in_one(connection):
    """A transaction for all statements inside."""
    await connection.execute("BEGIN")
    yield
    await connection.execute("COMMIT")


LARGE = {"task", "backlog", "attempt", "idempotency", "audit", "accepted", "schedule"}


def looks(plan):
    if plan.get("Relation Name") in LARGE and "Scan" in plan["Node Type"]:
        yield plan
    for below in plan.get("Plans", ()):
        yield from looks(below)


async def plans_of(connection, statements):
    """The nodes of each statement's plan that look at a large table."""
    found = {}
    for name, statement in statements.items():
        values = max(map(int, re.findall(r"\$(\d+)", statement)), default=0)
        await connection.execute(f"PREPARE {name} AS {statement}")
        nulls = f"({', '.join(['NULL'] * values)})" if values else ""
        rows = await connection.fetch(f"EXPLAIN (FORMAT JSON) EXECUTE {name} {nulls}")
        await connection.execute(f"DEALLOCATE {name}")
        found[name] = [*looks(json.loads(rows[0][0])[0]["Plan"])]
    return found


def look(node):
    """How a part of a plan comes by its rows."""
    return node["Node Type"], node.get("Index Name"), node.get("Index Cond", node.get("TID Cond"))


def good(name, node):
    """Whether a part of a statement's plan looks at no more rows than it must."""
    # The walk along the services begins at the start of the index, for one row.
    first = node.get("Index Name") == "task_due" and name in WALKS
    return "TID Cond" in node or "Index Cond" in node or first


DAYS = "extract(epoch FROM now()) * 1000 + 86400000 * 3 + n"


async def fill(user, rows, *, due=DAYS, shards=SHARDS):
    """Insert tasks of five services, by default due in some days, and as many final tasks."""
    await user.execute(
        f"""
        INSERT INTO task (id, due_at_ms, created_at_ms, updated_at_ms, shard, priority,
            max_attempts, service, payload)
        SELECT gen_random_uuid(), {due}, 0, 0, n % {shards}, 0, 1, 's' || n % 5, ''
        FROM generate_series(1, {rows}) n
        """
    )
    await user.execute(
        """
        INSERT INTO backlog (id, due_at_ms, created_at_ms, updated_at_ms, shard, priority,
            max_attempts, service, key, state, payload)
        SELECT gen_random_uuid(), due_at_ms, 0, due_at_ms, shard, 0, 1, service,
            'k' || due_at_ms % 7, 'finished', ''
        FROM task
        """
    )
    await user.execute(
        """
        INSERT INTO attempt (task_id, epoch, started_at_ms, ended_at_ms, attempt, event)
        SELECT id, 0, 0, 0, 1, 'finish' FROM backlog
        """
    )
