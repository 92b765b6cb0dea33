"""The store on PostgreSQL: what is special to it; its contract is tested with the others'."""

import asyncio
import contextlib
import re
import time

import asyncpg
import pytest
import pytest_asyncio

from contracts.stores import (
    HOUR,
    SECOND,
    changed,
    claim,
    due_of,
    ending,
    later,
    lease,
    now,
    request,
    stored,
    task,
    wanted,
)
from durable.postgres_stage import ALL, SHARDS, blocked, connected, opened, until
from servers import PostgresServer
from tickwheel import ManualClock
from tickwheel.durable import Scheduler
from tickwheel.durable.coordinators.postgres import PostgresCoordinator
from tickwheel.durable.registry import Audit
from tickwheel.durable.store import Claims, Window
from tickwheel.durable.stores.postgres import insert as postgres_insert
from tickwheel.durable.stores.postgres import pool as postgres_pool
from tickwheel.durable.stores.postgres import registry as postgres_registry
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres import store as postgres
from tickwheel.durable.stores.postgres import unclaimed as postgres_unclaimed
from tickwheel.durable.stores.postgres.clock import DatabaseClock
from tickwheel.durable.stores.postgres.listener import Listener
from tickwheel.durable.stores.postgres.pool import Pool
from tickwheel.durable.stores.postgres.store import PostgresStore
from tickwheel.errors import Locked, ServiceInUse, StoreUnavailable
from tickwheel.values.schedule import Schedule
from tickwheel.values.task import Event, Filter, Lease, Repeated, State, Submission, Taken, Task

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest_asyncio.fixture
async def store(postgres_url):
    async with opened(postgres_url) as store:
        yield store


@pytest_asyncio.fixture
async def other(postgres_url, store):
    """Another process's store on the same database."""
    async with opened(postgres_url) as other:
        yield other


@pytest_asyncio.fixture
async def user(postgres_url, store):
    async with connected(postgres_url) as user:
        yield user


@pytest_asyncio.fixture
async def epochs(store):
    return await store.take(ALL, "n1")


@pytest.fixture
def server():
    """A server that a test may stop and kill."""
    with PostgresServer() as server:
        yield server


async def lock(user, task):
    """Have a transaction of the user's lock a task, until it ends."""
    await user.execute(f"BEGIN; SELECT 1 FROM task WHERE id = '{task.id}' FOR UPDATE")


def dies(*_, **__):
    raise ConnectionResetError("the connection was cut")


@pytest.fixture
def cut(monkeypatch):
    """Cuts the connection when a statement begins."""

    def cut(statement):
        real = asyncpg.Connection.fetch

        async def fetch(connection, query, *values, **options):
            if query == statement:
                return dies()
            return await real(connection, query, *values, **options)

        monkeypatch.setattr(asyncpg.Connection, "fetch", fetch)

    return cut


class TestATakeover:
    async def test_a_claim_does_not_wait_for_one_and_gets_nothing(self, store, user, epochs):
        (given,) = await stored(store, task(store))
        await user.execute("BEGIN; UPDATE shard SET epoch = epoch + 1")
        assert await store.claim([wanted(given)], "n1", epochs) == Claims([], [], (due_of(given),))
        await user.execute("COMMIT")
        assert await store.claim([wanted(given)], "n1", epochs) == Claims([], [])
        assert await store.get([given.id]) == [given]

    @pytest.mark.parametrize("lock", ["FOR SHARE", ""])
    async def test_without_the_lock_on_the_shard_it_would_claim_after_one(
        self, store, user, epochs, monkeypatch, lock
    ):
        """A plain look sees the epoch as it was; a lock looks again. Here both have to wait."""
        plain = sql.CLAIM.replace("FOR SHARE SKIP LOCKED", lock).replace("SKIP LOCKED", "")
        monkeypatch.setattr(sql, "CLAIM", plain)
        (given,) = await stored(store, task(store))
        await user.execute("BEGIN; UPDATE shard SET epoch = epoch + 1")
        await user.execute("SELECT 1 FROM task FOR UPDATE")
        claiming = asyncio.create_task(store.claim([wanted(given)], "n1", epochs))
        await blocked(user)
        await user.execute("COMMIT")
        assert len((await claiming).tasks) == (0 if lock else 1)

    async def test_a_locked_shard_keeps_no_other_from_claims_and_submits(self, store, user, epochs):
        one, other = await stored(store, task(store, shard=1), task(store, shard=2))
        await user.execute("BEGIN; SELECT 1 FROM shard WHERE shard = 1 FOR UPDATE")
        claims = await store.claim([wanted(one), wanted(other)], "n1", epochs)
        assert [found.id for found in claims.tasks] == [other.id]
        assert claims.locked == (due_of(one),)
        given = [task(store, shard=1), task(store, shard=2)]
        assert await store.insert([*map(Submission, given)], epochs) == [None, given[1]]
        await user.execute("ROLLBACK")
        await claim(store, [one], epochs)

    async def test_it_waits_for_a_claim_under_way(self, store, user, epochs):
        await user.execute("BEGIN; SELECT 1 FROM shard WHERE shard = 3 FOR SHARE")
        taking = asyncio.create_task(store.take([3], "n2"))
        await blocked(user)
        assert not taking.done()
        await user.execute("COMMIT")
        assert await taking == {3: epochs[3] + 1}


class TestAClaim:
    async def test_it_writes_no_index(self, store, user, epochs):
        given = await stored(store, *[task(store, key=f"k{n}") for n in range(500)])
        await claim(store, given, epochs)
        counted = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'task'"

        async def flushed():
            await store.fetch("SELECT pg_stat_force_next_flush()")  # of one of its sessions
            return (await user.fetchrow(counted))["n_tup_upd"] == 500

        await until(flushed)
        assert (await user.fetchrow(counted))["n_tup_hot_upd"] > 400

    async def test_no_index_holds_or_depends_on_what_it_changes(self, store, user):
        rows = await user.fetch(
            "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = 'task'::regclass"
        )
        assert len(rows) == 5
        changed = re.compile(r"\b(state|attempt|node|epoch|lease_until_ms|updated_at_ms)\b")
        assert not [row[0] for row in rows if changed.search(row[0])]

    async def test_a_locked_row_does_not_keep_the_others(self, store, user, epochs):
        locked, *free = await stored(store, *[task(store) for _ in range(5)])
        await lock(user, locked)
        claims = await store.claim(list(map(wanted, [locked, *free])), "n1", epochs)
        assert {one.id for one in claims.tasks} == {one.id for one in free}
        assert (claims.later, claims.locked) == ([], (due_of(locked),))
        await user.execute("ROLLBACK")
        await claim(store, [locked], epochs)

    async def test_what_was_moved_meanwhile_is_later(self, store, user, epochs):
        (given,) = await stored(store, task(store))
        due = given.due_at_ms + HOUR
        await user.execute(f"BEGIN; UPDATE task SET due_at_ms = {due}")
        assert await store.claim([wanted(given)], "n1", epochs) == Claims([], [], (due_of(given),))
        await user.execute("COMMIT")
        moved = due_of(given)._replace(due_at_ms=due)
        assert await store.claim([wanted(given)], "n1", epochs) == Claims([], [moved])

    async def test_what_it_got_is_not_lost_with_the_reason_why_it_did_not_get_the_rest(
        self, store, epochs, cut
    ):
        given, not_yet = await stored(store, task(store), later(store))
        cut(sql.UNCLAIMED)
        claims = await store.claim([wanted(given), wanted(not_yet)], "n1", epochs)
        assert [one.id for one in claims.tasks] == [given.id]
        assert (claims.later, claims.locked) == ([], ())

    async def test_it_goes_by_the_databases_clock(self, store, epochs):
        (given,) = await stored(store, task(store, late=-HOUR))
        store.clock._ahead_ms += 2 * HOUR  # this host is wrong
        assert await store.claim([wanted(given)], "n1", epochs) == Claims([], [due_of(given)])


class TestServicesDue:
    async def test_where_very_many_tasks_are_due_it_is_those_of_the_latest_or_all(
        self, store, monkeypatch
    ):
        statement = sql.SERVICES_OF_LATEST.replace(f"LIMIT {sql.LATEST_ROWS}", "LIMIT 5")
        monkeypatch.setattr(sql, "SERVICES_OF_LATEST", statement)
        monkeypatch.setattr(sql, "LATEST_ROWS", 5)
        at = now(store)
        await stored(store, task(store, service="old", due_at_ms=at - 99))
        await stored(store, *[task(store, service="new", due_at_ms=at - n) for n in range(5)])
        assert await store.services(at, at - 100) == ["new"]
        assert await store.services(at) == ["new", "old"]


class TestALockedTask:
    """A transaction of the user's has the row of a running task: that delays its own end alone."""

    async def test_its_end_is_to_be_asked_for_again_and_the_others_are_written(
        self, store, user, epochs
    ):
        locked, *free = await claim(
            store, await stored(store, *[task(store) for _ in range(5)]), epochs
        )
        gone = ending(free[0])._replace(attempt=9)
        await lock(user, locked)
        ends = [ending(free[0]), ending(locked), *map(ending, free[1:]), gone]
        assert await store.record(ends) == [True, None, True, True, True, False]
        await user.execute("ROLLBACK")
        assert await store.record([ending(locked)]) == [True]
        assert await store.record([ending(locked)]) == [False]

    @pytest.mark.parametrize("how", ["renew", "accept"])
    async def test_so_is_its_lease(self, store, user, epochs, how):
        locked, free = await claim(store, await stored(store, task(store), task(store)), epochs)
        given = [locked.attempt_key, free.attempt_key, locked.attempt_key._replace(attempt=9)]
        if how == "accept":
            given = [Lease(*one, int(store.now_ms()) + HOUR) for one in given]
        await lock(user, locked)
        assert await getattr(store, how)(given) == [None, True, False]
        await user.execute("ROLLBACK")
        assert await getattr(store, how)(given) == [True, True, False]

    async def test_one_whose_lease_was_renewed_is_not_to_be_asked_for_again(
        self, store, user, epochs
    ):
        (given,) = await claim(store, await stored(store, task(store)), epochs)
        await lock(user, given)
        until = given.lease_until_ms
        ends = [ending(given, Event.RETRY, lease_until_ms=at) for at in (until, until - 1)]
        assert [await store.record([one]) for one in ends] == [[None], [False]]

    async def test_what_was_written_is_not_lost_with_the_reason_why_the_rest_was_not(
        self, store, user, epochs, cut
    ):
        locked, free = await claim(store, await stored(store, task(store), task(store)), epochs)
        await lock(user, locked)
        cut(sql.LOCKED)
        assert await store.record([ending(free), ending(locked)]) == [True, None]

    async def test_a_scheduler_ends_all_the_others_meanwhile(self, store, user, postgres_url):
        app = Scheduler(postgres_url, coordinator="solo")
        goes_on = asyncio.Event()

        @app.task
        async def slow():
            await goes_on.wait()

        @app.task
        async def quick():
            pass

        async with app:
            locked = await slow.submit()

            async def runs():
                return (await app.get(locked.id)).state is State.RUNNING

            await until(runs)
            await lock(user, locked)
            goes_on.set()
            for _ in range(3):
                tasks = [await quick.submit() for _ in range(10)]
                ends = [await app.wait(one.id) for one in tasks]
                assert {one.state for one in ends} == {State.FINISHED}
            assert await runs()
            await user.execute("ROLLBACK")
            assert (await app.wait(locked.id)).state is State.FINISHED

    async def test_all_ends_are_one_statement_while_nothing_is_locked(
        self, store, epochs, monkeypatch
    ):
        running = await claim(store, await stored(store, *[task(store) for _ in range(9)]), epochs)
        monkeypatch.setattr(sql, "LOCKED", "no such statement")
        assert await store.record(list(map(ending, running))) == [True] * 9


ENDED_BY_AN_OLD_NODE = {
    "finished": "DELETE FROM task",
    "tried again": """
        UPDATE task SET state = 'delay', due_at_ms = 0, failures = 1, lease_until_ms = NULL
    """,
}


class TestANodeOfTheVersionBefore:
    """It knows nothing of accepted tasks. What it ends leaves a row behind."""

    @pytest.mark.parametrize("how", ENDED_BY_AN_OLD_NODE)
    async def test_what_it_ended_is_not_found_and_forgotten_in_time(self, store, user, epochs, how):
        (running,) = await claim(store, await stored(store, task(store)), epochs)
        at = int(store.now_ms())
        await store.accept([lease(running, at)])
        await user.execute(ENDED_BY_AN_OLD_NODE[how])
        assert await store.running(ALL, 100, at + HOUR) == []
        assert await store.registry.prune(at, 10) == 0
        assert await store.registry.prune(at + 1, 10) == 1
        assert await user.fetchval("SELECT count(*) FROM accepted") == 0

    async def test_what_it_left_is_no_concern_of_the_next_attempt(self, store, user, epochs):
        (given,) = await stored(store, task(store, due_at_ms=5))
        (running,) = await claim(store, [given], epochs)
        at = int(store.now_ms())
        await store.accept([lease(running, at)])
        await user.execute(ENDED_BY_AN_OLD_NODE["tried again"])
        (again,) = await claim(store, await store.get([given.id]), epochs)
        assert again.due_at_ms == 0
        assert [one.due_at_ms for one in await store.running(ALL, 100, at + HOUR)] == [0]
        await store.accept([lease(again, at + HOUR)])
        assert [one.due_at_ms for one in await store.get([given.id])] == [0]
        assert await store.registry.prune(at + HOUR, 10) == 0
        await store.record([ending(again)])
        assert [one.due_at_ms for one in await store.get([given.id])] == [0]
        assert await user.fetchval("SELECT count(*) FROM accepted") == 0


class TestARowThatChangesWhileAStatementIsOnItsWay:
    """The statement locks the new version, but does not see it: it leaves it and everything else.

    That takes a commit between the statement's snapshot and its lock: here it waits for the lock.
    """

    @pytest.fixture(autouse=True)
    def waits(self, monkeypatch):
        for name in ("CLAIM", "RECORD", "RENEW", "ACCEPT"):
            statement = getattr(sql, name).replace("UPDATE SKIP LOCKED", "UPDATE")
            monkeypatch.setattr(sql, name, statement)

    @staticmethod
    @contextlib.asynccontextmanager
    async def changed(user, change):
        """Have a transaction of the user's change the task, and commit when something waits."""
        await user.execute(f"BEGIN; UPDATE task SET {change}")

        async def commit():
            await blocked(user)
            await user.execute("COMMIT")

        commits = asyncio.create_task(commit())
        yield
        await commits

    async def test_it_is_claimed_the_next_time(self, store, user, epochs):
        (given,) = await stored(store, task(store))
        async with self.changed(user, "priority = 5"):
            claims = await store.claim([wanted(given)], "n1", epochs)
        assert claims == Claims([], [], (due_of(given)._replace(priority=5),))
        assert [one.attempt for one in await claim(store, [given], epochs)] == [1]

    async def test_its_end_is_written_the_next_time_and_once(self, store, user, epochs):
        (running,) = await claim(store, await stored(store, task(store)), epochs)
        async with self.changed(user, "lease_until_ms = lease_until_ms + 1"):
            assert await store.record([ending(running)]) == [None]
        assert await store.attempts(running.id) == []
        assert await user.fetchval("SELECT count(*) FROM backlog") == 0
        assert await store.record([ending(running), ending(running)]) == [True, False]
        assert len(await store.attempts(running.id)) == 1

    @pytest.mark.parametrize("how", ["renew", "accept"])
    async def test_so_is_its_lease(self, store, user, epochs, how):
        (running,) = await claim(store, await stored(store, task(store)), epochs)
        moved = running.attempt_key
        if how == "accept":
            moved = lease(running, int(store.now_ms()) + HOUR)
        async with self.changed(user, "lease_until_ms = lease_until_ms + 1"):
            assert await getattr(store, how)([moved]) == [None]
        assert await user.fetchval("SELECT count(*) FROM accepted") == 0
        assert await getattr(store, how)([moved]) == [True]

    @pytest.mark.parametrize("how", ["cancel", "reschedule"])
    async def test_it_is_cancelled_or_moved_all_the_same(self, store, user, how):
        (given,) = await stored(store, later(store))
        to = [] if how == "cancel" else [given.due_at_ms + HOUR]
        async with self.changed(user, "priority = 5"):
            (verdict,) = await getattr(store, how)([given.id], *to)
        assert verdict.won
        (found,) = await store.get([given.id])
        assert (found.state, found.due_at_ms, found.priority) == (
            verdict.state, *(to or [given.due_at_ms]), 5,
        )  # fmt: skip

    @pytest.mark.parametrize("keys", [["k"], ["j", "k"]], ids=len)
    async def test_it_is_replaced_all_the_same(self, store, user, keys):
        holders = await stored(store, *[later(store, key=key) for key in keys])
        new = [later(store, key=key, body=b"2") for key in keys]
        async with self.changed(user, "priority = 5 WHERE key = 'k'"):
            given = [Submission(one, "replace") for one in new]
            found = await store.insert(given, {})
        assert [one.id for one in found] == [one.id for one in holders]
        assert [one.body for one in await store.get([one.id for one in holders])] == [b"2"] * len(
            keys
        )


class TestDue:
    async def test_many_shards_are_merged_by_due_time_then_id(self, postgres_url):
        """More than are merged at once, and not a whole number of times so many."""
        count = 2 * sql.MERGED + 3
        async with opened(postgres_url, shards=count) as store:
            at = int(store.now_ms())
            given = await stored(
                store,
                *[
                    task(store, shard=n % count, due_at_ms=at + n * 37 % 50 - 25)
                    for n in range(8 * count)
                ],
            )
            for shards in (range(count), range(count - 1, -1, -2), [count - 1], range(17)):
                dues = sorted(
                    (due_of(one) for one in given if one.shard in shards),
                    key=lambda due: (due.due_at_ms, due.id),
                )
                overdue = [due for due in dues if due.due_at_ms <= at]
                soon = [due for due in dues if due.due_at_ms > at]
                for most in (0, 1, 5, 100, 1_000):
                    found = await store.due([Window("mail", most, 7)], shards, at, at + SECOND)
                    assert found == overdue[:most] + soon[:7]


class TestStatements:
    @pytest.fixture
    def said(self, monkeypatch):
        """What the store asks of the server."""
        said = []
        for name in ("fetch", "execute", "copy_records_to_table"):
            real = getattr(asyncpg.Connection, name)

            def counted(connection, statement, *values, _real=real, **options):
                said.append(statement)
                return _real(connection, statement, *values, **options)

            monkeypatch.setattr(asyncpg.Connection, name, counted)
        return said

    async def test_a_batch_is_one_whatever_its_size(self, store, epochs, said):
        given = [task(store, shard=n % SHARDS) for n in range(100)]
        await store.insert([*map(Submission, given)], epochs)
        await store.due([Window(f"s{n}", 10, 10) for n in range(50)], ALL, 0, HOUR)
        running = await claim(store, given, epochs)
        ends = [
            ending(one, Event.RETRY if n % 2 else Event.FINISH) for n, one in enumerate(running)
        ]
        assert all(await store.record(ends))
        assert said == [sql.INSERT, sql.DUE, sql.CLAIM, sql.RECORD]

    async def test_many_rows_without_an_own_shard_are_copied(self, store, said):
        given = [later(store) for _ in range(1_000)]
        assert await store.insert([*map(Submission, given)], {}) == given
        assert said == ["task"]

    async def test_many_rows_with_an_own_shard_are_copied_and_then_checked(
        self, store, epochs, said
    ):
        given = [later(store, shard=n % SHARDS) for n in range(1_000)]
        assert await store.insert([*map(Submission, given)], epochs) == given
        assert said == ["BEGIN", "task", sql.HELD, "COMMIT"]

    async def test_a_copy_into_a_shard_that_was_lost_is_undone(self, store, epochs, said):
        await store.take([3], "n2")
        given = [later(store, shard=n % SHARDS) for n in range(1_000)]
        answers = await store.insert([*map(Submission, given)], epochs)
        assert answers == [None if one.shard == 3 else one for one in given]
        assert said[-5:] == ["BEGIN", "task", sql.HELD, "ROLLBACK", sql.INSERT]
        assert (await store.counts())["live"] == 875

    async def test_a_takeover_does_not_wait_for_a_copy(self, store, user, epochs):
        """As of a process that was stopped amid one: no timeout of the server would end it."""
        await user.execute("BEGIN; LOCK TABLE task IN EXCLUSIVE MODE")
        given = [later(store, shard=3) for _ in range(1_000)]
        copying = asyncio.create_task(store.insert([*map(Submission, given)], epochs))
        await blocked(user)
        assert await store.take([3], "n2") == {3: epochs[3] + 1}
        await user.execute("COMMIT")
        assert set(await copying) == {None}

    async def test_a_copy_of_what_is_there_already_is_settled_by_a_statement(self, store, said):
        given = [later(store) for _ in range(100)]
        await store.insert([*map(Submission, given[:50])], {})
        assert await store.insert([*map(Submission, given)], {}) == given
        assert said == ["task", "task", sql.INSERT]
        assert (await store.counts())["live"] == 100

    async def test_only_several_with_keys_are_not_to_wait_long(self, store, said):
        short = f"BEGIN; SET LOCAL lock_timeout = {postgres_insert.LOCK_MS}"
        for keys, begin in (([None, "a", None], "BEGIN"), (["b", "c"], short)):
            for again in (False, True):
                said.clear()
                given = [Submission(later(store, key=key)) for key in keys]
                await store.insert(given, {}, again=again)
                assert said[0] == begin

    async def test_no_shard_that_is_not_in_the_batch_is_locked(self, store, user, epochs):
        await user.execute("BEGIN; UPDATE shard SET owner = 'x' WHERE shard <> 2")
        given = task(store, shard=2)
        assert await store.insert([Submission(given)], epochs) == [given]


class TestKeys:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        monkeypatch.setitem(postgres_pool.SETTINGS, "lock_timeout", "300")

    @pytest_asyncio.fixture
    async def held(self, store, user):
        """A key that a user's open transaction has."""
        await user.execute("BEGIN")
        given = later(store, key="held")
        assert await store.within(user, Submission(given)) == given
        return given

    @pytest_asyncio.fixture
    async def patient(self, store, postgres_url, monkeypatch):
        """A store that waits for keys as long as the test takes."""
        monkeypatch.setitem(postgres_pool.SETTINGS, "lock_timeout", "60000")
        async with opened(postgres_url) as patient:
            yield patient

    async def test_one_that_a_transaction_under_way_holds_is_given_up(self, store, held):
        given = later(store, key="held")
        with pytest.raises(StoreUnavailable, match="another transaction holds"):
            await store.insert([Submission(given)], {})
        assert await store.get([given.id]) == [None]

    async def test_several_are_given_up_soon_for_one_of_them(self, patient, held):
        """A single one would wait for as long as this test may take."""
        given = [later(patient, key="free"), later(patient, key="held")]
        for again in (False, True):
            with pytest.raises(Locked, match="another transaction holds"):
                await patient.insert([*map(Submission, given)], {}, again=again)
        assert await patient.get([one.id for one in given]) == [None, None]

    async def test_one_that_is_not_patient_is_given_up_soon(self, patient, held):
        given = Submission(later(patient, key="held"))
        with pytest.raises(Locked, match="another transaction holds"):
            await patient.insert([given], {}, patient=False)

    async def test_those_that_wait_long_keep_no_place_from_those_that_do_not(
        self, patient, user, held
    ):
        stuck = [
            asyncio.create_task(patient.insert([Submission(later(patient, key="held"))], {}))
            for _ in range(20)
        ]
        await blocked(user, postgres.KEYED_LANES)
        given = later(patient, key="free")
        assert await patient.insert([Submission(given)], {}, patient=False) == [given]
        await user.execute("COMMIT")
        assert await asyncio.gather(*stuck) == [[Taken(held)]] * 20

    async def test_a_short_wait_is_for_one_transaction_only(self, patient, user, held):
        with pytest.raises(Locked):
            await patient.insert([Submission(later(patient, key="held"))] * 2, {})
        rows = await patient.fetch("SELECT current_setting('lock_timeout')")
        assert rows[0][0] == "1min"

    async def test_others_do_not_wait_for_it(self, patient, user, held):
        stuck = [
            asyncio.create_task(patient.insert([Submission(later(patient, key="held"))], {}))
            for _ in range(20)
        ]
        await blocked(user, postgres.KEYED_LANES)
        for _ in range(20):
            await stored(patient, later(patient))
        assert not any(one.done() for one in stuck)
        await user.execute("COMMIT")
        answers = await asyncio.gather(*stuck)
        assert all(answer == [Taken(held)] for answer in answers)

    async def test_one_that_is_given_up_in_time_is_free(self, patient, user, held):
        given = later(patient, key="held")
        inserting = asyncio.create_task(patient.insert([Submission(given)], {}))
        await blocked(user)
        await user.execute("ROLLBACK")
        assert await inserting == [given]

    async def test_batches_in_different_order_do_not_wait_for_each_other(self, store, other):
        names = [f"k{n}" for n in range(50)]
        answers = await asyncio.gather(
            *(
                who.insert([Submission(later(who, key=name), "keep") for name in order], {})
                for who, order in [(store, names), (other, names[::-1])] * 5
            )
        )
        new = [one for answer in answers for one in answer if isinstance(one, Task)]
        assert sorted(one.key for one in new) == sorted(names)


class TestChangesOfMany:
    """A user's transaction under way has changed one of the tasks."""

    @pytest_asyncio.fixture
    async def tasks(self, store, user):
        tasks = await stored(store, *[later(store, key=f"k{n}") for n in range(25)])
        await user.execute("BEGIN")
        await store.within(user, Submission(later(store, key="k7"), "replace"))
        return tasks

    def change(self, store, verb):
        which = Filter(service="mail", unchanged_since_ms=int(store.latest_ms()) + 1)
        if verb == "cancel":
            return store.cancel_where(which, 10)
        return store.reschedule_where(which, int(store.now_ms()) + 5 * HOUR, 10)

    @pytest.mark.parametrize("verb", ["cancel", "reschedule"])
    async def test_all_the_others_are_changed_and_that_one_is_named(
        self, store, tasks, verb, monkeypatch
    ):
        monkeypatch.setattr(postgres_unclaimed, "PAUSE_SECONDS", 0)
        with pytest.raises(Locked, match="hold 1 of the tasks"):
            await changed(self.change(store, verb))
        after = await store.get([one.id for one in tasks])
        assert [one for one in after if one in tasks] == [tasks[7]]

    @pytest.mark.parametrize("verb", ["cancel", "reschedule"])
    async def test_one_that_is_let_go_meanwhile_is_changed_last(self, store, user, tasks, verb):
        won = []
        async for part in self.change(store, verb):
            won += part
            if len(won) == len(tasks) - 1:
                await user.execute("ROLLBACK")
        assert won[-1].id == tasks[7].id
        assert len(won) == len(tasks)


class TestRequests:
    """Submissions under a name of the caller's own, which a transaction under way may hold."""

    @pytest_asyncio.fixture
    async def held(self, store, user):
        """A name that another process is about to use, and its task."""
        given = later(store)
        await user.execute("BEGIN")
        await store.within(user, Submission(given))
        name = f"'c', 'r1', 'd', '{given.id}', 1"
        columns = "caller, key, digest, task_id, used_at_ms"
        await user.execute(f"INSERT INTO idempotency ({columns}) VALUES ({name})")
        return given

    async def test_one_that_another_process_makes_is_waited_for(self, store, user, held):
        asking = asyncio.create_task(store.insert([request(later(store))], {}))
        await blocked(user)
        await user.execute("COMMIT")
        assert await asking == [Repeated(True, held)]
        assert (await store.counts())["live"] == 1

    async def test_one_that_another_process_gave_up_is_made(self, store, user, held):
        given = later(store)
        asking = asyncio.create_task(store.insert([request(given)], {}))
        await blocked(user)
        await user.execute("ROLLBACK")
        assert await asking == [given]

    async def test_several_are_given_up_soon_for_one_of_them(self, store, held):
        given = [request(later(store), key) for key in ("r0", "r1", "r2")]
        with pytest.raises(Locked, match="another transaction holds"):
            await store.insert(given, {})
        assert await store.insert(given[::2], {}) == [given[0].task, given[2].task]

    async def test_others_do_not_wait_for_it(self, store, user, held):
        stuck = [asyncio.create_task(store.insert([request(later(store))], {})) for _ in range(20)]
        await blocked(user, postgres.KEYED_LANES)
        for _ in range(20):
            await stored(store, later(store))
        await user.execute("COMMIT")
        assert await asyncio.gather(*stuck) == [[Repeated(True, held)]] * 20

    async def test_one_that_is_stored_after_all_while_it_is_tried_again_is_no_repetition(
        self, store, user
    ):
        """The first try's answer was lost, and the server was still busy with it."""
        given = request(later(store))
        await user.execute("BEGIN")
        await store.within(user, given._replace(idempotency=None))
        await user.execute(
            "INSERT INTO idempotency (caller, key, digest, task_id, used_at_ms)"
            f" VALUES ('c', 'r1', 'd', '{given.task.id}', 1)"
        )
        trying = asyncio.create_task(store.insert([given], {}, again=True))
        await blocked(user)
        await user.execute("COMMIT")
        assert await trying == [given.task]
        assert (await store.counts())["live"] == 1

    async def test_one_that_is_pruned_all_the_time_is_given_up(self, store, monkeypatch):
        await store.insert([request(later(store))], {})
        monkeypatch.setattr(sql, "USED", sql.USED + " WHERE false")
        with pytest.raises(StoreUnavailable, match="changes hands"):
            await store.insert([request(later(store))], {})

    async def test_the_time_of_use_is_the_databases(self, store, user):
        before = await user.fetchval(sql.CLOCK)
        await store.insert([request(task(store, created_at_ms=1))], {})
        used = await user.fetchval("SELECT used_at_ms FROM idempotency")
        assert int(before) <= used <= await user.fetchval(sql.CLOCK)


class TestTheRegistry:
    LINE = Audit(1, "local", "", "service.put", "mail")

    async def test_a_change_waits_for_another(self, store, user):
        await user.execute(f"BEGIN; {postgres_registry.BUMP}")
        putting = asyncio.create_task(store.registry.put_service("mail", "{}", self.LINE))
        await blocked(user)
        assert not putting.done()
        await user.execute("COMMIT")
        assert (await putting).version == 1
        assert await store.registry.version() == 2

    async def test_one_that_waits_in_vain_is_an_error_and_changes_nothing(
        self, store, user, postgres_url, monkeypatch
    ):
        monkeypatch.setitem(postgres_pool.SETTINGS, "lock_timeout", "50")
        async with opened(postgres_url) as impatient:
            await user.execute(f"BEGIN; {postgres_registry.BUMP}")
            with pytest.raises(Locked):
                await impatient.registry.put_service("mail", "{}", self.LINE)
            await user.execute("ROLLBACK")
        assert await store.registry.services() == []

    async def test_a_task_that_is_being_stored_keeps_no_service(self, store, user):
        """No submit asks for its service, so none is waited for."""
        await store.registry.put_service("mail", "{}", self.LINE)
        await user.execute("BEGIN")
        await store.within(user, Submission(later(store)))
        assert await store.registry.delete_service("mail", self.LINE) is True
        await user.execute("COMMIT")

    async def test_a_refusal_costs_no_connection(self, store):
        await store.registry.put_service("mail", "{}", self.LINE)
        await stored(store, later(store))
        backend = "SELECT pg_backend_pid()"
        before = await store.fetch(backend)
        with pytest.raises(ServiceInUse):
            await store.registry.delete_service("mail", self.LINE)
        assert await store.fetch(backend) == before

    async def test_a_word_that_cannot_be_said_is_no_error(self, store, monkeypatch):
        real = store.fetch

        async def fetch(statement, *values, **options):
            if statement == sql.NOTIFY:
                raise StoreUnavailable("gone")
            return await real(statement, *values, **options)

        monkeypatch.setattr(store, "fetch", fetch)
        assert await store.registry.put_service("mail", "{}", self.LINE) is not None

    async def test_what_changed_nothing_is_not_told(self, store, other):
        heard = asyncio.Queue()
        store.subscribe("registry", heard.put_nowait)
        assert await heard.get() == ""
        await other.registry.delete_service("nobody", self.LINE)
        await other.registry.note(self.LINE)
        await other.registry.put_service("mail", "{}", self.LINE)
        await heard.get()
        await other.fetch(sql.NOTIFY, other.channel("registry"), "the next")
        assert await heard.get() == "the next"

    async def test_the_words_of_a_line_may_hold_anything(self, store):
        await store.registry.note(self.LINE._replace(detail="a\0b\ud800"))
        ((line,), _) = await store.registry.audit(namespace=None, cursor=None, limit=9)
        assert line.detail == "a\\0b\\ud800"


class TestAnAnswerThatWasLost:
    def lose(self, monkeypatch, *, after):
        """Cut the connection in the first insert, before or after its commit."""
        real, calls = postgres.insert, []

        async def cut(connection, submissions, epochs, *, again, **options):
            calls.append(again)
            if len(calls) > 1:
                return await real(connection, submissions, epochs, again=again, **options)
            if after:
                await real(connection, submissions, epochs, again=again, **options)
            return dies()

        monkeypatch.setattr(postgres, "insert", cut)
        return calls

    @pytest.mark.parametrize("after", [True, False], ids=["stored", "not stored"])
    @pytest.mark.parametrize("key", [None, "k"])
    async def test_the_insert_is_made_once(self, store, monkeypatch, after, key):
        calls = self.lose(monkeypatch, after=after)
        given = later(store, key=key)
        assert await store.insert([Submission(given)], {}) == [given]
        assert calls == [False, True]
        assert (await store.counts())["live"] == 1

    @pytest.mark.parametrize("after", [True, False], ids=["stored", "not stored"])
    @pytest.mark.parametrize("key", [None, "k"])
    async def test_the_request_is_made_once(self, store, monkeypatch, after, key):
        self.lose(monkeypatch, after=after)
        given = request(later(store, key=key))
        assert await store.insert([given], {}) == [given.task]
        assert await store.insert([request(later(store))], {}) == [Repeated(True, given.task)]

    async def test_one_that_is_lost_twice_is_an_error(self, store, monkeypatch):
        monkeypatch.setattr(postgres, "insert", dies)
        with pytest.raises(StoreUnavailable, match="the connection was cut"):
            await store.insert([Submission(later(store))], {})

    async def test_the_backend_of_a_statement_is_killed(self, store, user, epochs):
        await user.execute("BEGIN; LOCK TABLE task IN SHARE MODE")
        given = task(store)
        inserting = asyncio.create_task(store.insert([Submission(given)], epochs))
        await blocked(user)
        await user.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted")
        await user.execute("ROLLBACK")
        assert await inserting == [given]


class TestErrors:
    async def test_an_open_port_nobody_listens_on(self, server):
        url = server.url.replace("tickwheel@", "tickwheel:very%40secret@")
        server.stop()
        store = PostgresStore(url)
        with pytest.raises(StoreUnavailable, match=rf"127.0.0.1:{server.port}/postgres") as raised:
            await store.open()
        shown = [str(raised.value), repr(raised.value), repr(store), str(raised.value.__cause__)]
        assert not [text for text in shown if "secret" in text]
        with pytest.raises(RuntimeError, match="not open"):
            await store.get([])

    @pytest.mark.parametrize(
        "url",
        ["postgresql://me:sec/ret@host/db", "postgresql://me:sec#ret@host/db",
         "postgresql://me:sec?ret@host/db", "postgresql://me:7?sec=ret@host/db"],
    )  # fmt: skip
    async def test_a_url_with_a_raw_password_is_refused_and_not_shown(self, url):
        with pytest.raises(ValueError, match="%40") as raised:
            PostgresStore(url)
        assert "ret" not in str(raised.value)
        assert "sec" not in str(raised.value)

    async def test_a_url_of_something_else(self):
        with pytest.raises(ValueError, match="is postgresql://USER"):
            PostgresStore("mysql://host/db")

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("postgresql://me:p%40s=s@host/db", "host/db"),
            ("postgresql://me:p s@host:5432/my%20db?sslmode=require", "host:5432/my%20db"),
            ("postgres://[::1]:5432,other:1,third/db", "[::1]:5432,other:1,third/db"),
            ("postgresql:///db?host=/var/run/postgresql", "/var/run/postgresql/db"),
            ("postgresql://", "the local socket/"),
        ],
    )
    async def test_a_url_is_shown_by_host_and_database(self, url, shown):
        assert postgres_pool.place_of(url) == f"PostgreSQL {shown}"

    async def test_a_database_that_is_not_there(self, postgres_server):
        with pytest.raises(StoreUnavailable, match="nowhere"):
            await PostgresStore(postgres_server.url_for("nowhere")).open()

    async def test_more_connections_than_there_may_be(self, store, postgres_url, user):
        await user.execute("DROP ROLE IF EXISTS few; CREATE ROLE few LOGIN CONNECTION LIMIT 1")
        await user.execute("GRANT USAGE ON SCHEMA tickwheel TO few")
        await user.execute("GRANT SELECT ON ALL TABLES IN SCHEMA tickwheel TO few")
        url = postgres_url.replace("tickwheel@", "few@")
        async with opened(url) as limited:
            answers = await asyncio.gather(
                *(limited.counts() for _ in range(5)), return_exceptions=True
            )
            refused = [one for one in answers if isinstance(one, Exception)]
            assert refused
            assert all("too many connections" in str(one) for one in refused)
            async with asyncio.timeout(30):
                while True:  # the server may take a moment to note who has left
                    try:
                        assert await limited.counts() == {"live": 0, "final": 0}
                        break
                    except StoreUnavailable:
                        await asyncio.sleep(0.05)
            with pytest.raises(StoreUnavailable, match="permission denied"):
                await stored(limited, task(limited))
        await user.execute("DROP OWNED BY few")

    async def test_a_database_that_may_only_be_read(self, store, user, postgres_url):
        database = postgres_url.rpartition("/")[2]
        await user.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
        async with opened(postgres_url) as reading:
            with pytest.raises(StoreUnavailable, match="read-only"):
                await stored(reading, task(reading))
            await user.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
            await stored(reading, task(reading))

    async def test_what_text_cannot_hold_is_the_arguments_fault(self, store):
        with pytest.raises(ValueError, match="cannot store"):
            await stored(store, task(store, key="a\0b"))

    async def test_the_words_of_an_error_may_hold_anything(self, store, epochs):
        (running,) = await claim(store, await stored(store, task(store)), epochs)
        assert await store.record([ending(running, Event.FAIL, error="a\0b \udcff ✓")]) == [True]
        (found,) = await store.get([running.id])
        assert found.error == "a\\0b \\udcff ✓"

    async def test_a_cursor_that_no_page_gave(self, store):
        with pytest.raises(ValueError, match="what the page before gave"):
            await store.find(Filter(), final=None, cursor="1; DROP TABLE task", limit=1)

    async def test_ids_that_are_none_are_unknown(self, store):
        odd = ["", "x", "0" * 31, "G" * 32, "01A1DF344CC17000885BB0EE8882B63F"]
        assert await store.get(odd) == [None] * 5
        assert await store.cancel(odd) == [None] * 5
        assert await store.attempts("x") == []


class TestThePool:
    async def test_a_deadlock_is_tried_again(self, store):
        turns = []

        async def work(connection):
            turns.append(await connection.fetch("SELECT 1"))
            if len(turns) < 3:
                raise asyncpg.DeadlockDetectedError("deadlock detected")
            return "done"

        assert await store.run(work) == "done"

    async def test_but_not_for_ever(self, store):
        async def work(_):
            raise asyncpg.SerializationError("could not serialize")

        with pytest.raises(StoreUnavailable, match="serialize"):
            await store.run(work)

    async def test_a_real_deadlock_is_settled(self, store, other, epochs):
        given = await stored(store, *[later(store) for _ in range(2)])
        halfway = [asyncio.Event(), asyncio.Event()]

        async def lock(number, connection):
            await connection.fetch(f"SELECT 1 FROM task WHERE id = '{given[number].id}' FOR UPDATE")
            halfway[number].set()
            await halfway[1 - number].wait()
            await connection.fetch(
                f"SELECT 1 FROM task WHERE id = '{given[1 - number].id}' FOR UPDATE"
            )
            return number

        async def both(who, number):
            async def work(connection):
                return await lock(number, connection)

            return await who._transaction(work)

        assert await asyncio.gather(both(store, 0), both(other, 1)) == [0, 1]

    async def test_a_connection_in_the_middle_of_something_is_not_used_again(self, store):
        async def fails(connection):
            await connection.execute("BEGIN")
            await connection.fetch("SELECT 1 / 0")

        with pytest.raises(ValueError, match="division"):
            await store.run(fails)
        assert await store.run(in_transaction) is False

    async def test_calls_beyond_its_size_wait_for_their_turn(self, postgres_url, store):
        pool = Pool(postgres_url, size=2)
        seen = await asyncio.gather(*(pool.run(backend) for _ in range(50)))
        assert len(set(seen)) <= 2
        await pool.close()

    async def test_leases_are_renewed_while_every_other_connection_is_at_work(
        self, store, user, epochs
    ):
        (running,) = await claim(store, await stored(store, task(store)), epochs)
        at_work = [
            asyncio.create_task(store.fetch("SELECT pg_sleep(3600)", seconds=3600))
            for _ in range(2 * postgres_pool.SIZE)
        ]
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"

        async def all_sleep():
            return await user.fetchval(sleeping) == postgres_pool.SIZE

        try:
            await until(all_sleep)
            assert await store.renew([running.attempt_key]) == [True]
            node = PostgresCoordinator(store, "a")
            await node.start(lambda: None)
            await node.step()
            await node.step()
            assert len(node.owned()) == SHARDS
            await node.stop()
        finally:
            for one in at_work:
                one.cancel()
            await asyncio.wait(at_work)

    async def test_closing_waits_for_what_is_under_way(self, postgres_url, user, epochs):
        async with opened(postgres_url) as store:
            await user.execute("BEGIN; UPDATE shard SET owner = 'x'")
            taking = asyncio.create_task(store.take([1], "n2"))
            await blocked(user)
            closing = asyncio.create_task(store.close())
            await asyncio.sleep(0)
            await user.execute("ROLLBACK")
            await closing
            assert await taking == {1: epochs[1] + 1}

    async def test_its_sessions_are_durable_and_read_committed(self, store, user, postgres_url):
        database = postgres_url.rpartition("/")[2]
        for setting in ("synchronous_commit = off", "default_transaction_isolation = serializable"):
            await user.execute(f"ALTER DATABASE {database} SET {setting}")
        async with opened(postgres_url) as other:
            assert [row[0] for row in await other.fetch("SHOW synchronous_commit")] == ["on"]
            shown = await other.fetch("SHOW transaction_isolation")
            assert [row[0] for row in shown] == ["read committed"]


async def in_transaction(connection):
    return connection.is_in_transaction()


async def backend(connection):
    return (await connection.fetch("SELECT pg_backend_pid()"))[0][0]


class TestAServer:
    """One that dies, stands still, and comes back."""

    async def test_that_was_killed_fails_calls_and_works_again(self, server):
        async with opened(server.url) as store:
            (given,) = await stored(store, task(store))
            server.kill()
            for call in (lambda: store.get([given.id]), lambda: stored(store, task(store))):
                with pytest.raises(StoreUnavailable, match=f":{server.port}/postgres"):
                    await call()
            server.start()
            assert await store.get([given.id]) == [given]
            await stored(store, task(store))

    async def test_that_was_restarted_is_not_noticed_by_who_was_idle(self, server):
        async with opened(server.url) as store:
            (given,) = await stored(store, task(store))
            server.restart()
            await until_connected(store)
            assert await store.get([given.id]) == [given]

    async def test_that_stands_still_fails_calls_in_bounded_time(self, server, monkeypatch):
        monkeypatch.setattr(postgres_pool, "CALL_SECONDS", 0.5)
        async with opened(server.url) as store:
            await stored(store, task(store))
            server.pause()
            started = time.monotonic()
            calls = [store.get(["0" * 32]), stored(store, task(store)), store.counts()]
            calls += [stored(store, task(store, key=f"k{n}")) for n in range(20)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {StoreUnavailable}
            assert time.monotonic() - started < 20
            server.resume()
            monkeypatch.setattr(postgres_pool, "CALL_SECONDS", 30)
            await stored(store, task(store))

    async def test_acknowledged_is_stored_when_it_is_killed_under_load(self, server):
        async with opened(server.url) as store:
            acknowledged, errors = [], []

            async def submits(lane):
                for number in range(200):
                    given = later(store, key=f"{lane}-{number}" if lane % 2 else None)
                    try:
                        await stored(store, given)
                    except StoreUnavailable as error:
                        errors.append(error)
                        await asyncio.sleep(0.01)
                    else:
                        acknowledged.append(given.id)

            working = [asyncio.create_task(submits(lane)) for lane in range(6)]
            for _ in range(3):
                goal = len(acknowledged) + 20

                async def enough(goal=goal):
                    return len(acknowledged) >= goal or all(one.done() for one in working)

                await until(enough)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await asyncio.gather(*working)
            assert errors
            await until_connected(store)
            assert None not in await store.get(acknowledged)


async def until_connected(store):
    async def connects():
        try:
            await store.counts()
        except StoreUnavailable:
            return False
        return True

    await until(connects)


class TestListening:
    @pytest.fixture
    def heard(self):
        return asyncio.Queue()

    async def listening(self, store, heard):
        """Have it listen, and be past the first call, which the connection itself makes."""
        store.notifications.subscribe_due(lambda: heard.put_nowait("heard"))
        await heard.get()

    async def test_a_hold_that_another_process_tells_of_is_heard(self, store, other, heard):
        store.notifications.subscribe_holds(lambda *words: heard.put_nowait(words))
        store.subscribe("hold", lambda words: words or heard.put_nowait("begun"))
        assert await heard.get() == "begun"
        await other.notifications.notify_hold("a/mail of ours ✓", 1_700_000_000_123)
        assert await heard.get() == ("a/mail of ours ✓", 1_700_000_000_123)

    async def test_a_schedule_that_another_process_puts_or_deletes_is_heard_of(
        self, store, other, heard
    ):
        store.notifications.subscribe_changes(lambda: heard.put_nowait("heard"))
        await heard.get()
        made = Schedule("s", "mail", b"1", None, 1_000, "UTC", "once", 0, 0)
        await other.schedules.put(made, TestTheRegistry.LINE)
        assert await heard.get() == "heard"
        await other.schedules.delete("s", TestTheRegistry.LINE)
        assert await heard.get() == "heard"

    async def test_a_word_of_another_process_is_heard(self, store, other, heard):
        await self.listening(store, heard)
        await other.notifications.notify_due([3])
        assert await heard.get() == "heard"

    async def test_what_concerns_other_shards_wakes_nobody(self, store, other, heard):
        await self.listening(store, heard)
        store.notifications.subscribe_due(lambda: heard.put_nowait("heard"), lambda: {1, 2})
        store.subscribe("due", heard.put_nowait)  # a second ear, which hears everything
        assert await heard.get() == ""
        await other.notifications.notify_due([3, 4])
        await other.notifications.notify_due([0, 2])
        assert [await heard.get() for _ in range(3)] == ["3,4", "heard", "0,2"]

    async def test_more_shards_than_a_word_can_name_are_all(self, store, other, heard):
        store.subscribe("due", heard.put_nowait)
        await heard.get()
        await other.notifications.notify_due(range(4096))
        assert await heard.get() == "*"

    async def test_who_listens_anew_takes_the_place_of_who_did(self, store, other, heard):
        await self.listening(store, heard)
        store.notifications.subscribe_due(lambda: heard.put_nowait("second"))
        await other.notifications.notify_due([1])
        assert await heard.get() == "second"
        assert heard.empty()

    async def test_after_a_lost_connection_it_looks_again(self, store, other, user, heard):
        await self.listening(store, heard)
        await user.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        )
        assert await heard.get() == "heard"
        await other.notifications.notify_due([1])
        assert await heard.get() == "heard"

    async def test_a_connection_that_is_silent_is_given_up(self, server, heard, monkeypatch):
        for name in ("HEARTBEAT_SECONDS", "ANSWER_SECONDS"):
            monkeypatch.setattr(f"tickwheel.durable.stores.postgres.listener.{name}", 0.1)
        made = []

        async with opened(server.url) as store:

            async def connect():
                made.append(await store._pool.connect())
                return made[-1]

            listener = Listener(connect)
            listener.subscribe("x", heard.put_nowait)
            await heard.get()
            server.pause()

            async def given_up():
                return made[0].is_closed()

            await until(given_up)
            server.resume()
            assert await heard.get() == ""
            await listener.close()

    async def test_words_that_come_while_one_is_said_are_said_together(self, store, monkeypatch):
        said, gate = [], asyncio.Event()

        async def fetch(_, channel, words):
            said.append(words)
            await gate.wait()

        monkeypatch.setattr(store, "fetch", fetch)
        first = asyncio.create_task(store.notifications.notify_due([1]))
        await asyncio.sleep(0)
        for shard in (5, 2, 5, 3):
            await store.notifications.notify_due([shard])
        gate.set()
        await first
        assert said == ["1", "2,3,5"]

    async def test_a_word_that_cannot_be_said_is_no_error(self, store, other, monkeypatch, heard):
        await self.listening(store, heard)

        async def fetch(*_):
            raise StoreUnavailable("gone")

        with monkeypatch.context() as broken:
            broken.setattr(other, "fetch", fetch)
            await other.notifications.notify_due([1])
        await other.notifications.notify_due([2])
        assert await heard.get() == "heard"


class TestTime:
    def clock(self):
        local = ManualClock(100.0)
        return local, DatabaseClock(local)

    async def test_it_is_the_databases_and_never_ahead_of_it(self, store):
        for _ in range(20):
            mine = store.now_ms()
            ((theirs,),) = await store.fetch(sql.CLOCK)
            assert mine <= theirs + 0.5  # as far as two clocks of one host drift apart
            assert mine > theirs - 5_000

    async def test_the_latest_that_it_can_be_is_never_behind_it(self, store):
        for _ in range(20):
            ((theirs,),) = await store.fetch(sql.CLOCK)
            latest = store.latest_ms()
            assert latest >= theirs - 0.5
            assert store.now_ms() <= latest + 0.5
            assert latest < theirs + 5_000

    async def test_the_latest_counts_from_when_the_question_was_sent(self):
        local, clock = self.clock()
        sent = clock.local_ms()
        local.advance(0.5)
        clock.sample(1_000_000.0, sent)
        assert clock.latest_ms() == 1_000_500.0
        local.advance(0.25)
        assert clock.latest_ms() == 1_000_750.0

    async def test_the_truth_is_between_the_two_and_the_quickest_answer_counts_for_both(self):
        local, clock = self.clock()
        for before, after in ((0.3, 0.2), (0.001, 0.4), (0.5, 0.001), (0.2, 0.2)):
            sent = clock.local_ms()
            local.advance(before)
            truth = 1_000_000.0 + clock.local_ms()
            local.advance(after)
            clock.sample(truth, sent)
            assert clock.now_ms() <= 1_000_000.0 + clock.local_ms() <= clock.latest_ms()
        assert clock.latest_ms() - clock.now_ms() == pytest.approx(2)

    async def test_old_answers_are_forgotten(self):
        local, clock = self.clock()
        for delay in (0.001, *[0.1] * 8):
            sent = clock.local_ms()
            local.advance(delay)
            clock.sample(1_000_000.0 + sent + delay * 500, sent)
        assert clock.latest_ms() - clock.now_ms() == pytest.approx(100)

    async def test_an_answer_counts_from_when_it_arrived(self):
        local, clock = self.clock()
        sent = clock.local_ms()
        local.advance(0.5)
        clock.sample(1_000_000.0, sent)
        assert clock.now_ms() == 1_000_000.0
        local.advance(0.25)
        assert clock.now_ms() == 1_000_250.0

    async def test_the_quickest_answer_counts(self):
        local, clock = self.clock()
        for delay in (0.5, 0.001, 0.2):
            sent, truth = clock.local_ms(), 1_000_000.0 + clock.local_ms()
            local.advance(delay)
            clock.sample(truth, sent)
        assert clock.now_ms() == pytest.approx(1_000_000.0 + clock.local_ms() - 1)

    async def test_a_step_forward_is_followed_at_once(self):
        _, clock = self.clock()
        for truth in (1_000.0, 1_000.0 + HOUR):
            clock.sample(truth, clock.local_ms())
        assert clock.now_ms() == clock.latest_ms() == 1_000.0 + HOUR

    async def test_a_step_back_is_followed_at_once(self):
        _, clock = self.clock()
        for truth in (1_000.0 + HOUR, 1_000.0):
            clock.sample(truth, clock.local_ms())
        assert clock.now_ms() == clock.latest_ms() == 1_000.0

    async def test_what_is_due_is_read_with_the_time(self, store):
        before = store.clock.sampled_ms
        assert await store.due([Window("mail", 1, 1)], ALL, 0, 1) == []
        assert store.clock.sampled_ms > before

    async def test_a_process_that_reads_nothing_looks_by_itself(self, postgres_url, monkeypatch):
        monkeypatch.setattr(postgres, "CLOCK_SECONDS", 0.01)
        async with opened(postgres_url) as store:
            before = store.clock.sampled_ms

            async def looked():
                return store.clock.sampled_ms > before

            await until(looked)

    async def test_the_offset_to_this_host_is_a_metric(self, store):
        assert abs(store.offset_ms) < 5 * SECOND
