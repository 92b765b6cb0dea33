"""Rows that other transactions lock or change while a statement runs on PostgreSQL."""

import asyncio
import contextlib

import pytest
import pytest_asyncio

from contracts.stores import (
    HOUR,
    changed,
    claim,
    due_of,
    ending,
    later,
    lease,
    stored,
    task,
    wanted,
)
from durable.postgres_stage import ALL, blocked, until
from durable.stores.postgres.helpers import lock
from tickwheel.durable import Scheduler
from tickwheel.durable.store import Claims
from tickwheel.durable.stores.postgres import cancel_reschedule as postgres_cancel_reschedule
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.errors import Locked
from tickwheel.values.task import Event, Filter, Lease, State, Submission

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


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
    """An older node does not know accepted tasks: each that it ends leaves a row behind."""

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
        monkeypatch.setattr(postgres_cancel_reschedule, "PAUSE_SECONDS", 0)
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
