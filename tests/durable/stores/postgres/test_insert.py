"""Inserts on PostgreSQL: keys, idempotency keys, and answers that were lost."""

import asyncio

import pytest
import pytest_asyncio

from contracts.stores import (
    conflict,
    later,
    repeated,
    request,
    stored,
    task,
)
from durable.postgres_stage import blocked, opened
from durable.stores.postgres.helpers import dies
from tickwheel.durable.stores.postgres import pool as postgres_pool
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres import store as postgres
from tickwheel.errors import Locked, StoreUnavailable
from tickwheel.values.task import Submission, Task

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


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
        assert await asyncio.gather(*stuck) == [[conflict(held)]] * 20

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
        assert all(answer == [conflict(held)] for answer in answers)

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
        assert await asking == [repeated(held)]
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
        assert await asyncio.gather(*stuck) == [[repeated(held)]] * 20

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
        assert await store.insert([request(later(store))], {}) == [repeated(given.task)]

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
