"""Changes in the user's own transaction on PostgreSQL, by every kind of connection a user has."""

import asyncio
import contextlib

import psycopg
import psycopg2
import pytest
import pytest_asyncio
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as aio

from contracts.stores import (
    HOUR,
    claim,
    ending,
    later,
    repeated,
    replay_of,
    request,
    stored,
    task,
    wanted,
)
from durable.postgres_stage import ALL, blocked, connected, opened
from tickwheel import ManualClock
from tickwheel.durable import Scheduler
from tickwheel.durable.stores.postgres.transaction import insert_statement
from tickwheel.errors import Locked
from tickwheel.values.task import (
    Cancel,
    CancelKey,
    Event,
    KeyConflict,
    RepeatedRequest,
    Reschedule,
    State,
    Submission,
    Verdict,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest_asyncio.fixture
async def store(postgres_url):
    async with opened(postgres_url) as store:
        yield store


@pytest_asyncio.fixture
async def user(postgres_url, store):
    async with connected(postgres_url) as user:
        yield user


@pytest_asyncio.fixture
async def epochs(store):
    return await store.take(ALL, "n1")


@contextlib.asynccontextmanager
async def asyncpgs(url):
    async with connected(url) as connection:
        await connection.execute("BEGIN")
        yield connection, connection.execute


@contextlib.asynccontextmanager
async def psycopgs(url, **options):
    async with await psycopg.AsyncConnection.connect(url, **options) as connection:
        yield connection, connection.execute


@contextlib.asynccontextmanager
async def sqlalchemys(url, driver, make):
    engine = aio.create_async_engine(url.replace("postgresql://", f"postgresql+{driver}://"))
    async with make(engine) as made:
        yield made, lambda end: getattr(made, end)()
    await engine.dispose()


@contextlib.contextmanager
def plain(url, connect, **options):
    with contextlib.closing(connect(url, **options)) as connection:
        yield connection, lambda end: getattr(connection, end)()


@contextlib.contextmanager
def plain_sqlalchemys(url, driver, make):
    engine = sqlalchemy.create_engine(url.replace("postgresql://", f"postgresql+{driver}://"))
    with make(engine) as made:
        yield made, lambda end: getattr(made, end)()
    engine.dispose()


ASYNCHRONOUS = {
    "asyncpg": asyncpgs,
    "psycopg": psycopgs,
    "psycopg rows as dicts": lambda url: psycopgs(url, row_factory=dict_row),
    "AsyncSession on asyncpg": lambda url: sqlalchemys(url, "asyncpg", aio.AsyncSession),
    "AsyncSession on psycopg": lambda url: sqlalchemys(url, "psycopg", aio.AsyncSession),
    "AsyncConnection": lambda url: sqlalchemys(url, "asyncpg", lambda one: one.connect()),
}
BLOCKING = {
    "plain psycopg": lambda url: plain(url, psycopg.connect),
    "psycopg with marks": lambda url: plain(
        url, psycopg.connect, cursor_factory=psycopg.ClientCursor
    ),
    "psycopg2": lambda url: plain(url, psycopg2.connect),
    "Session on psycopg": lambda url: plain_sqlalchemys(url, "psycopg", orm.Session),
    "scoped Session on psycopg2": lambda url: plain_sqlalchemys(url, "psycopg2", scoped),
    "Connection": lambda url: plain_sqlalchemys(url, "psycopg2", lambda one: one.connect()),
}


def scoped(engine):
    return orm.scoped_session(orm.sessionmaker(engine))()


def way_of(kind, store, url):
    """Return what makes changes by one kind of connection, and then commits or rolls back."""

    async def change(*changes, end="commit"):
        if kind in ASYNCHRONOUS:
            async with ASYNCHRONOUS[kind](url) as (connection, finish):
                answers = [await store.within(connection, one) for one in changes]
                await finish(end)
                return answers

        def in_a_thread():
            with BLOCKING[kind](url) as (connection, finish):
                answers = [store.within_now(connection, one) for one in changes]
                finish(end)
                return answers

        return await asyncio.to_thread(in_a_thread)

    return change


@pytest.fixture(params=[*ASYNCHRONOUS, *BLOCKING])
def any_way(request, store, postgres_url):
    return way_of(request.param, store, postgres_url)


@pytest.fixture(params=["asyncpg", "plain psycopg"])
def way(request, store, postgres_url):
    return way_of(request.param, store, postgres_url)


class TestASubmit:
    async def test_it_is_there_after_the_commit_only(self, store, any_way):
        given = later(
            store, body=b"\x00\xff%s$1", key="k % $1 '", timeout_ms=5, deadline_at_ms=HOUR,
            priority=-3, shard=7, tags_text="b a",
        )  # fmt: skip
        named = later(store, replay_of="ab" * 16)
        changes = Submission(given), request(named)
        assert await any_way(*changes, end="rollback") == [given, named]
        assert await store.get([given.id, named.id]) == [None, None]
        assert await any_way(*changes) == [given, named]
        assert await store.get([given.id, named.id]) == [given, named]
        again = Submission(later(store, key=given.key)), request(later(store))
        assert await any_way(*again) == [KeyConflict(given), RepeatedRequest(True, named)]

    @pytest.mark.parametrize("on_conflict", ["reject", "keep"])
    async def test_a_key_that_is_taken_is_told(self, store, way, on_conflict):
        (holder,) = await stored(store, later(store, key="k", body=b"\x00"))
        given = later(store, key="k")
        assert await way(Submission(given, on_conflict)) == [KeyConflict(holder)]
        assert await store.get([given.id]) == [None]

    async def test_of_two_with_one_key_the_first_has_it(self, store, way):
        given = [later(store, key="k"), later(store, key="k"), later(store, key="k", body=b"3")]
        answers = await way(*map(Submission, given[:2]), Submission(given[2], "replace"))
        assert answers[:2] == [given[0], KeyConflict(given[0])]
        assert (answers[2].id, answers[2].body) == (given[0].id, b"3")

    async def test_replace_takes_the_place_of_the_holder(self, store, way):
        (holder,) = await stored(store, later(store, key="k", tags_text="old"))
        given = later(store, key="k", body=b"2", due_at_ms=5, priority=9, tags_text="new")
        (answer,) = await way(Submission(given, "replace"))
        assert answer == holder._replace(
            body=b"2", due_at_ms=5, priority=9, tags_text="new", updated_at_ms=given.updated_at_ms
        )
        assert await store.get([holder.id, given.id]) == [answer, None]

    async def test_replace_forgets_the_failures_of_the_holder(self, store, way, epochs):
        (running,) = await claim(store, await stored(store, task(store, key="k")), epochs)
        await store.record([ending(running, Event.RETRY, error="boom")])
        (answer,) = await way(Submission(later(store, key="k"), "replace"))
        assert (answer.id, answer.attempt) == (running.id, 1)
        assert (answer.failures, answer.error) == (0, None)

    async def test_a_running_holder_is_not_replaced(self, store, way, epochs):
        (running,) = await claim(store, await stored(store, task(store, key="k")), epochs)
        assert await way(Submission(later(store, key="k"), "replace")) == [KeyConflict(running)]

    async def test_an_open_one_that_was_refused_keeps_no_end_from_being_written(
        self, store, user, epochs
    ):
        (running,) = await claim(store, await stored(store, task(store, key="k")), epochs)
        await user.execute("BEGIN")
        for on_conflict in ("reject", "keep", "replace"):
            given = Submission(later(store, key="k"), on_conflict)
            assert await store.within(user, given) == KeyConflict(running)
        assert await store.renew([running.attempt_key]) == [True]
        assert await store.record([ending(running)]) == [True]

    async def test_a_holder_that_is_claimed_meanwhile_is_not_replaced(
        self, store, user, epochs, postgres_url
    ):
        (given,) = await stored(store, task(store, key="k"))
        async with connected(postgres_url) as second, connected(postgres_url) as watching:
            await second.execute(
                f"BEGIN; UPDATE task SET state = 'running' WHERE key = '{given.key}'"
            )
            replacing = asyncio.create_task(
                store.within(user, Submission(later(store, key="k"), "replace"))
            )
            await blocked(watching)
            await second.execute("COMMIT")
            assert await replacing == KeyConflict(given._replace(state=State.RUNNING))

    async def test_a_holder_that_ends_meanwhile_leaves_the_key(
        self, store, user, epochs, postgres_url
    ):
        (holder,) = await stored(store, later(store, key="k"))
        given = later(store, key="k")
        async with connected(postgres_url) as second, connected(postgres_url) as watching:
            await second.execute("BEGIN; DELETE FROM task")
            replacing = asyncio.create_task(store.within(user, Submission(given, "replace")))
            await blocked(watching)
            await second.execute("COMMIT")
            assert await replacing == given
        assert await store.get([holder.id, given.id]) == [None, given]

    async def test_an_open_one_keeps_no_shard_from_its_new_owner(self, store, user, epochs):
        await user.execute("BEGIN")
        await store.within(user, Submission(task(store, shard=2)))
        assert await store.take([2], "n2") == {2: epochs[2] + 1}

    async def test_a_key_that_was_taken_meanwhile_is_told(self, store, user, postgres_url):
        await user.execute("BEGIN")
        holder = later(store, key="k")
        await store.within(user, Submission(holder))
        async with connected(postgres_url) as second, connected(postgres_url) as watching:
            given = Submission(later(store, key="k"))
            submitting = asyncio.create_task(store.within(second, given))
            await blocked(watching)
            await user.execute("COMMIT")
            assert await submitting == KeyConflict(holder)

    async def test_the_tables_are_the_stores_whatever_the_path_of_the_connection(
        self, postgres_url
    ):
        async with (
            opened(postgres_url) as store,
            opened(f"{postgres_url}?schema=own") as own,
            connected(postgres_url) as user,
        ):
            await user.execute("CREATE TABLE public.task (mine integer)")
            await user.execute("SET search_path = public")
            for one in (store, own):
                given, keyed = later(one), later(one, key="k")
                await one.within(user, Submission(given))
                await one.within(user, Submission(keyed, "replace"))
                await one.within(user, Submission(keyed, "replace"))
                assert await one.get([given.id, keyed.id]) == [given, keyed]
            assert [(await one.counts())["live"] for one in (store, own)] == [2, 2]
            assert await user.fetchval("SELECT count(*) FROM public.task") == 0

    async def test_a_request_that_was_made_before_is_answered_and_stores_nothing(self, store, way):
        given, again, later_on = (later(store, body=b"\x00") for _ in range(3))
        assert await way(request(given), request(again)) == [given, RepeatedRequest(True, given)]
        assert await way(request(later_on)) == [RepeatedRequest(True, given)]
        assert await store.insert([request(later_on)], {}) == [repeated(given)]
        assert await way(request(later_on, digest="other")) == [RepeatedRequest(False, None)]
        assert await store.get([again.id, later_on.id]) == [None, None]

    async def test_one_that_the_service_took_is_known_on_a_connection_too(self, store, way):
        given = later(store)
        await store.insert([request(given)], {})
        assert await way(request(later(store))) == [RepeatedRequest(True, given)]
        assert await way(request(given)) == [given], "this very one: its answer was lost"

    async def test_a_final_task_is_answered_as_it_is_and_one_that_is_gone_is_told(
        self, store, way, epochs
    ):
        (given,) = await way(request(task(store)))
        (running,) = await claim(store, [given], epochs)
        await store.record([ending(running, result_body='{"a": 1}')])
        (final,) = await store.get([given.id])
        assert await way(request(later(store))) == [RepeatedRequest(True, final)]
        await store.replay([replay_of(store, final)], force=False)
        (replayed,) = await store.get([given.id])
        assert await way(request(later(store))) == [RepeatedRequest(True, replayed)]
        await store.prune(final.updated_at_ms + HOUR, 10)
        assert await way(request(later(store))) == [RepeatedRequest(True, None)]

    async def test_after_a_rollback_a_request_was_never_made(self, store, way):
        given, again = later(store), later(store)
        await way(request(given), end="rollback")
        assert await way(request(again)) == [again]

    async def test_a_request_that_is_refused_has_not_used_its_name(self, store, way):
        (holder,) = await stored(store, later(store, key="k"))
        refused = request(later(store, key="k"))
        assert await way(refused) == [KeyConflict(holder)]
        other = later(store)
        assert await way(request(other, digest="other")) == [other]

    @pytest.mark.parametrize("on_conflict", ["keep", "replace"])
    async def test_a_request_is_known_by_the_task_that_has_the_key(self, store, way, on_conflict):
        (holder,) = await stored(store, later(store, key="k"))
        for _ in range(2):
            (answer,) = await way(request(later(store, key="k"), on_conflict=on_conflict))
            found = (
                answer.holder
                if isinstance(answer, KeyConflict)
                else getattr(answer, "task", answer)
            )
            assert found.id == holder.id

    async def test_while_it_is_open_no_other_can_make_the_same_request(self, store, user):
        await user.execute("BEGIN")
        given = later(store)
        await store.within(user, request(given))
        with pytest.raises(Locked):
            await store.insert([request(later(store))], {}, patient=False)
        await user.execute("COMMIT")
        assert await store.insert([request(later(store))], {}) == [repeated(given)]

    async def test_in_a_savepoint_that_is_rolled_back_it_was_never_made(self, store, user):
        given, again = later(store), later(store)
        async with user.transaction():
            with contextlib.suppress(ZeroDivisionError):
                async with user.transaction():
                    assert await store.within(user, request(given)) == given
                    raise ZeroDivisionError
            assert await store.within(user, request(again)) == again
        assert await store.get([given.id, again.id]) == [None, again]

    async def test_without_a_transaction_a_request_with_a_name_is_refused(
        self, store, user, postgres_url
    ):
        with pytest.raises(ValueError, match="needs a transaction"):
            await store.within(user, request(later(store)))
        auto = await psycopg.AsyncConnection.connect(postgres_url, autocommit=True)
        async with auto:
            with pytest.raises(ValueError, match="needs a transaction"):
                await store.within(auto, request(later(store)))
            async with auto.transaction():
                given = later(store)
                assert await store.within(auto, request(given)) == given
        assert (await store.counts())["live"] == 1

    async def test_a_style_that_there_is_not(self, store):
        with pytest.raises(ValueError, match="'qmark'"):
            insert_statement(Submission(later(store)), store.schema, "qmark")


class TestOtherChanges:
    async def test_they_count_after_the_commit_only(self, store, any_way):
        given = one, two, three = await stored(
            store, later(store), later(store, key="k", body=b"\x00"), later(store)
        )
        cancels = Cancel((one.id,)), CancelKey("k", None), Reschedule((three.id,), 5)
        won = [
            [Verdict(one.id, True, State.CANCELLED)],
            [Verdict(two.id, True, State.CANCELLED)],
            [Verdict(three.id, True, State.DELAY)],
        ]
        assert await any_way(*cancels, end="rollback") == won
        ids = [task.id for task in given]
        assert await store.get(ids) == [*given]
        assert await any_way(*cancels) == won
        states = [(task.state, task.due_at_ms) for task in await store.get(ids)]
        cancelled = [(State.CANCELLED, task.due_at_ms) for task in (one, two)]
        assert states == [*cancelled, (State.DELAY, 5)]
        lost = [Verdict(one.id, False, State.CANCELLED), None]
        assert await any_way(Cancel((one.id, "0" * 32))) == [lost]

    async def test_a_cancel_by_key_is_of_one_service_or_of_all(self, store, way):
        await stored(store, later(store, key="other"))
        one, two, three = await stored(
            store, *(later(store, key="k", service=name) for name in ("a", "b", "c"))
        )
        (verdicts,) = await way(CancelKey("k", "b"))
        assert verdicts == [Verdict(two.id, True, State.CANCELLED)]
        (verdicts,) = await way(CancelKey("k", None))
        assert {verdict.id for verdict in verdicts if verdict.won} == {one.id, three.id}
        assert await way(CancelKey("k", None)) == [[]]

    async def test_a_running_one_is_neither_cancelled_nor_moved(self, store, way, epochs):
        (running,) = await claim(store, await stored(store, task(store)), epochs)
        lost = [Verdict(running.id, False, State.RUNNING)]
        changes = Cancel((running.id,)), Reschedule((running.id,), 5)
        assert await way(*changes) == [lost, lost]
        assert await store.get([running.id]) == [running]

    async def test_nobody_claims_one_that_is_cancelled_in_an_open_transaction(
        self, store, user, epochs
    ):
        given = await stored(store, task(store))
        async with user.transaction():
            await store.within(user, Cancel((given[0].id,)))
            claims = await store.claim([wanted(one) for one in given], "n1", epochs)
            assert claims.tasks == []

    async def test_those_that_block_are_refused_on_the_loop_and_the_others_off_it(
        self, store, postgres_url
    ):
        nothing = Cancel(("0" * 32,))
        for make in BLOCKING.values():
            with (
                make(postgres_url) as (connection, _),
                pytest.raises(TypeError, match=r"those that block are for `app\.blocking"),
            ):
                await store.within(connection, nothing)
        for make in ASYNCHRONOUS.values():
            async with make(postgres_url) as (connection, _):
                with pytest.raises(TypeError, match="asynchronous ones are for"):
                    store.within_now(connection, nothing)


class TestVerbs:
    """The same by the verbs of a scheduler, as a user calls them."""

    async def test_all_that_take_a_connection(self, postgres_url):
        app = Scheduler(postgres_url, dispatch=False)
        engine = aio.create_async_engine(
            postgres_url.replace("postgresql://", "postgresql+asyncpg://")
        )
        async with app, aio.AsyncSession(engine) as session:
            one = await app.submit("work", 1, delay=60, key="k", connection=session)
            two = await app.submit("work", 2, delay=60, connection=session)
            await session.commit()
            moved = await app.reschedule(two.id, delay=7200, connection=session)
            assert (await app.get(two.id)).due_at == two.due_at
            assert [v.won for v in await app.cancel_key("k", "work", connection=session)] == [True]
            await session.commit()
            assert moved.won
            assert (await app.get(two.id)).due_at > two.due_at
            assert (await app.get(one.id)).state == "cancelled"
            assert (await app.cancel(two.id, connection=session)).won
            await session.rollback()
            assert (await app.get(two.id)).state == "delay"
        await engine.dispose()

    async def test_all_that_take_one_that_blocks(self, postgres_url):
        def work():
            app = Scheduler(postgres_url, dispatch=False)
            engine = sqlalchemy.create_engine(
                postgres_url.replace("postgresql://", "postgresql+psycopg2://")
            )
            with app.blocking() as b, orm.Session(engine) as session:
                one = b.submit("work", 1, delay=60, key="k", connection=session)
                two = b.submit("work", 2, delay=60, connection=session)
                session.commit()
                assert b.reschedule(two.id, delay=7200, connection=session).won
                assert [v.won for v in b.cancel_key("k", connection=session)] == [True]
                assert b.get(one.id).state == "delay"
                session.commit()
                assert b.get(two.id).due_at > two.due_at
                assert b.get(one.id).state == "cancelled"
                assert b.cancel(two.id, connection=session).won
                session.rollback()
                assert b.get(two.id).state == "delay"
            engine.dispose()

        await asyncio.to_thread(work)

    async def test_in_a_test_on_sqlite_they_accept_any_connection(self, tmp_path):
        url = f"sqlite:///{tmp_path}/tasks.db"
        async with Scheduler(url, dispatch=False, clock=ManualClock(1_800_000_000)) as app:
            one = await app.submit("work", 1, delay=60, key="k", connection=object())
            assert (await app.reschedule(one.id, delay=90, connection=object())).won
            assert (await app.get(one.id)).due_at > one.due_at
            assert [v.won for v in await app.cancel_key("k", connection=object())] == [True]
            two = await app.submit("work", 2, delay=60, connection=object())
            assert (await app.cancel(two.id, connection=object())).won

    async def test_on_sqlite_they_refuse_a_connection_otherwise(self, tmp_path):
        async with Scheduler(f"sqlite:///{tmp_path}/tasks.db", dispatch=False) as app:
            for verb in (
                lambda: app.submit("work", 1, connection=object()),
                lambda: app.cancel("0" * 32, connection=object()),
                lambda: app.cancel_key("k", connection=object()),
                lambda: app.reschedule("0" * 32, delay=1, connection=object()),
            ):
                with pytest.raises(TypeError, match="needs a store on PostgreSQL"):
                    await verb()
