"""The store on PostgreSQL: takeovers, claims, due tasks and its statements."""

import asyncio
import re

import asyncpg
import pytest

from contracts.stores import (
    HOUR,
    SECOND,
    claim,
    due_of,
    ending,
    later,
    now,
    stored,
    task,
    wanted,
)
from durable.postgres_stage import ALL, SHARDS, blocked, opened, until
from durable.stores.postgres.helpers import lock
from tickwheel.durable.batching import capacity
from tickwheel.durable.batching.capacity import AdaptiveLimit
from tickwheel.durable.store import Claims, Window
from tickwheel.durable.stores.postgres import insert as postgres_insert
from tickwheel.durable.stores.postgres import pool
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Event, Submission

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


KIB = 1_024
# A server on which a statement that copies more than 200 KiB of payloads does not end in time.
SLOW_COPIES = f"""
    CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF (SELECT sum(octet_length(payload)) FROM ended) > {200 * KIB} THEN
            PERFORM pg_sleep(600);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER slow AFTER INSERT ON backlog REFERENCING NEW TABLE AS ended
        FOR EACH STATEMENT EXECUTE FUNCTION slow();
"""
# Nobody waits for that statement any more, but it still holds the locks of its tasks.
END_SLOW = """
    SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity
    WHERE wait_event = 'PgSleep' AND datname = current_database()
"""


class TestARecord:
    async def test_one_that_times_out_copies_half_the_payload_bytes_until_it_is_in_time(
        self, store, user, epochs, monkeypatch
    ):
        monkeypatch.setattr(pool, "CALL_SECONDS", 1.0)
        monkeypatch.setattr(capacity, "QUICK_SECONDS", 0.0)
        store._record_bytes = AdaptiveLimit(512 * KIB)
        tasks = await stored(store, *[task(store, body=b"x" * 64 * KIB) for _ in range(8)])
        ends = [ending(one) for one in await claim(store, tasks, epochs)]
        await user.execute(SLOW_COPIES)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.record(ends)
            await user.execute(END_SLOW)
        assert await store.record(ends) == [True] * 8
        assert store._record_bytes.size == 128 * KIB


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


class TestDue:
    async def test_many_shards_are_merged_by_due_time_then_id(self, postgres_url):
        """More shards than one statement merges, and not a multiple of that number."""
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
        """Record the statements that the store sends to the server."""
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
        assert said == ["BEGIN", "task", sql.OWNED, "COMMIT"]

    async def test_a_copy_into_a_shard_that_was_lost_is_undone(self, store, epochs, said):
        await store.take([3], "n2")
        given = [later(store, shard=n % SHARDS) for n in range(1_000)]
        answers = await store.insert([*map(Submission, given)], epochs)
        assert answers == [None if one.shard == 3 else one for one in given]
        assert said[-5:] == ["BEGIN", "task", sql.OWNED, "ROLLBACK", sql.INSERT]
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
