"""The contract of stores, in bytes: one transaction takes up a bounded part of large payloads."""

import asyncio

import pytest

from contracts.stores import (
    ALL,
    HOUR,
    SECOND,
    change,
    claim,
    conflict,
    due_of,
    ending,
    insert,
    later,
    now,
    replay_of,
    request,
    stored,
    task,
)
from tickwheel.durable.store import Claims
from tickwheel.durable.stores.rows import task_of
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Event, Filter, State, Submission

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

KIB = 1_024


@pytest.fixture
def little(monkeypatch):
    """One transaction moves a payload, and 10 KiB of others."""
    change(monkeypatch, "STATEMENT_BYTES", 10 * KIB)


def sized(store, *sizes, **fields):
    """Tasks with payloads of these sizes."""
    return [task(store, body=b"x" * size, **fields) for size in sizes]


async def claimed(store, tasks, epochs, most_bytes):
    """Claim these tasks; return the numbers of those claimed, and of those left."""
    numbers = {one.id: number for number, one in enumerate(tasks)}
    claims = await store.claim([due_of(one) for one in tasks], "n1", epochs, HOUR, most_bytes)
    assert (claims.later, claims.locked) == ([], ())
    got = sorted(numbers[one.id] for one in claims.tasks)
    assert [one.body for one in sorted(claims.tasks, key=lambda one: numbers[one.id])] == [
        tasks[number].body for number in got
    ]
    return got, [numbers[due.id] for due in claims.left]


def counted_calls(store, monkeypatch, failing=None):
    """Record the calls of a store to its database; the call of this number fails."""
    access = "fetch" if hasattr(store, "fetch") else "_write"
    real, calls = getattr(store, access), []

    async def call(*args):
        calls.append(args)
        if len(calls) == failing:
            raise StoreUnavailable("it has just gone")
        return await real(*args)

    monkeypatch.setattr(store, access, call)
    return calls


class TestAClaim:
    @pytest.mark.parametrize(
        ("sizes", "most", "count"),
        [
            ([100, 60, 40, 1], 100, 3),
            ([100, 60, 41, 1], 100, 2),
            ([100, 101, 1], 100, 1),
            ([1_000_000, 50, 50, 1], 100, 3),
            ([0, 0, 0, 100, 0, 1], 100, 5),
            ([7], 0, 1),
            ([7, 0, 1], 0, 2),
            ([10] * 50, 100, 11),
        ],
    )
    async def test_it_takes_the_first_and_what_fits_besides_in_order(
        self, store, epochs, sizes, most, count
    ):
        tasks = await stored(store, *sized(store, *sizes))
        got, left = await claimed(store, tasks, epochs, most)
        assert (got, left) == ([*range(count)], [*range(count, len(sizes))])

    async def test_what_is_left_is_unclaimed_and_comes_with_the_next(self, store, epochs):
        tasks = await stored(store, *sized(store, *[600] * 7, shard=3))
        turns = []
        while tasks:
            got, left = await claimed(store, tasks, epochs, 1_200)
            unclaimed = await store.get([tasks[number].id for number in left])
            assert all(one.state is State.DELAY and not one.attempt for one in unclaimed)
            turns.append(len(got))
            tasks = [tasks[number] for number in left]
        assert turns == [3, 3, 1]

    async def test_the_order_is_that_of_the_claim_not_of_the_ids(self, store, epochs):
        tasks = await stored(store, *sized(store, *[600] * 5))
        got, left = await claimed(store, tasks[::-1], epochs, 600)
        assert (got, left) == ([0, 1], [2, 3, 4])

    async def test_what_cannot_be_claimed_takes_no_room(self, store, epochs):
        gone, moved, one, two, three = await stored(store, *sized(store, *[600] * 5))
        await store.cancel([gone.id])
        await store.reschedule([moved.id], now(store) + HOUR)
        wanted = [due_of(one) for one in (gone, moved, one, two, three)]
        claims = await store.claim(wanted, "n1", epochs, HOUR, 600)
        got = [task.id for task in claims.tasks]
        # SQLite counts by what is stored: there the moved one takes its place.
        assert got in ([one.id, two.id], [one.id])
        assert [due.id for due in claims.left] == [
            task.id for task in (one, two, three) if task.id not in got
        ]
        assert [due.id for due in claims.later] == [moved.id]

    async def test_by_default_it_is_some_mebibytes(self, store, epochs):
        tasks = await stored(store, *sized(store, *[1 << 20] * 7))
        claims = await store.claim([due_of(one) for one in tasks], "n1", epochs)
        assert (len(claims.tasks), len(claims.left)) == (5, 2)
        again = await store.claim(claims.left, "n1", epochs)
        assert again == Claims(again.tasks, [])
        assert len(again.tasks) == 2


@pytest.mark.usefixtures("little")
class TestMoving:
    """However much it is, all of it is done, and whole; in as many transactions as it takes."""

    SIZES = (6 * KIB, 6 * KIB, 20 * KIB, 0, 9 * KIB, 1, 4 * KIB, 30 * KIB, 30 * KIB, 5)

    async def everything_moved(self, store, tasks, state):
        found = await store.get([one.id for one in tasks])
        assert {one.state for one in found} == {state}
        assert [one.body for one in found] == [one.body for one in tasks]

    @pytest.mark.parametrize("event", [Event.FINISH, Event.FAIL])
    async def test_ends(self, store, epochs, event):
        tasks = await stored(store, *sized(store, *self.SIZES))
        running = [(await claim(store, [one], epochs))[0] for one in tasks]
        assert await store.record([ending(one, event) for one in running]) == [True] * len(tasks)
        assert await store.record([ending(one, event) for one in running]) == [False] * len(tasks)
        await self.everything_moved(
            store, tasks, State.FINISHED if event is Event.FINISH else State.FAILED
        )
        for one in tasks:
            assert len(await store.attempts(one.id)) == 1

    async def test_ends_of_all_kinds_in_between(self, store, epochs):
        tasks = await stored(store, *sized(store, *self.SIZES))
        running = [(await claim(store, [one], epochs))[0] for one in tasks]
        events = [Event.FINISH, Event.RETRY] * 5
        ends = [ending(one, event) for one, event in zip(running, events, strict=True)]
        gone = ending(running[0])._replace(attempt=9)
        assert await store.record([gone, *ends, *ends[:4]]) == [False, *[True] * 10, *[False] * 4]
        found = await store.get([one.id for one in tasks])
        assert [one.state for one in found] == [State.FINISHED, State.DELAY] * 5

    async def test_where_a_later_transaction_fails_the_rest_are_to_be_asked_again(
        self, store, epochs, monkeypatch
    ):
        tasks = await stored(store, *sized(store, *[9 * KIB] * 5))
        running = [(await claim(store, [one], epochs))[0] for one in tasks]
        ends = [ending(one) for one in running]
        calls = counted_calls(store, monkeypatch, failing=2)
        assert await store.record(ends) == [True, True, None, None, None]
        assert await store.record(ends[2:]) == [True, True, True]
        assert len(calls) == 4
        await self.everything_moved(store, tasks, State.FINISHED)

    async def test_expired_ones(self, store):
        tasks = await stored(store, *sized(store, *self.SIZES, deadline_at_ms=now(store) - SECOND))
        turns = []
        while found := await store.expire(ALL, 100):
            turns.append({due.id for due in found})
        assert sorted(one for turn in turns for one in turn) == sorted(one.id for one in tasks)
        assert len(turns) > 1
        await self.everything_moved(store, tasks, State.FAILED)

    async def test_cancelled_ones_of_a_filter(self, store):
        tasks = await stored(store, *[later(store, body=b"x" * 9 * KIB) for _ in range(21)])
        parts = [part async for part in store.cancel_where(Filter(service="mail"), 100)]
        assert [len(part) for part in parts] == [2] * 10 + [1]
        await self.everything_moved(store, tasks, State.CANCELLED)

    async def test_cancelled_ones_of_a_key(self, store):
        tasks = await stored(
            store,
            *[later(store, service=name, key="k", body=b"x" * 9 * KIB) for name in "abcde"],
        )
        parts = [part async for part in store.cancel_where(Filter(key="k"), 100)]
        assert [len(part) for part in parts] == [2, 2, 1]
        await self.everything_moved(store, tasks, State.CANCELLED)

    async def test_cancelled_ones_by_their_ids(self, store, monkeypatch):
        tasks = await stored(store, *[later(store, body=b"x" * size) for size in self.SIZES])
        calls = counted_calls(store, monkeypatch)
        verdicts = await store.cancel([*[one.id for one in tasks], tasks[0].id])
        assert all(verdict.won for verdict in verdicts)
        assert len(calls) > 3, "not all at once"
        await self.everything_moved(store, tasks, State.CANCELLED)

    async def test_of_two_that_end_the_same_ones_each_has_some_and_none_is_lost(
        self, store, opened, epochs
    ):
        other = await opened()
        tasks = await stored(store, *sized(store, *self.SIZES * 3))
        running = [(await claim(store, [one], epochs))[0] for one in tasks]
        ends = [ending(one) for one in running]
        mine, others = await asyncio.gather(store.record(ends), other.record(ends[::-1]))
        won = [(one is True) + (two is True) for one, two in zip(mine, others[::-1], strict=True)]
        left = [end for end, count in zip(ends, won, strict=True) if not count]
        assert all(await store.record(left))
        assert max(won) == 1
        await self.everything_moved(store, tasks, State.FINISHED)


class TestASubmitThatMeetsOthers:
    """A small batch that meets large tasks reads none of their payloads and results."""

    NUMBER = 8
    LARGE = b"x" * 64 * KIB

    @pytest.fixture
    def read(self, store, monkeypatch):
        """Sizes of the payloads and results of all rows that the store has read as tasks."""
        sizes = []

        def noting(row):
            found = task_of(row)
            sizes.append(len(found.body) + len(found.result_body or ""))
            return found

        change(monkeypatch, "task_of", noting)
        return sizes

    def submissions(self, store, on_conflict="reject", **fields):
        return [
            Submission(later(store, key=f"k{n}", body=b"1", **fields), on_conflict)
            for n in range(self.NUMBER)
        ]

    async def holders(self, store):
        return await stored(
            store, *[later(store, key=f"k{n}", body=self.LARGE) for n in range(self.NUMBER)]
        )

    @pytest.mark.parametrize("on_conflict", ["reject", "keep"])
    async def test_holders_of_keys(self, store, read, on_conflict):
        held = await self.holders(store)
        answers = await store.insert(self.submissions(store, on_conflict), {})
        assert answers == [conflict(one) for one in held]
        assert read == [0] * self.NUMBER

    @pytest.mark.parametrize("digest", ["d", "another"])
    async def test_tasks_of_repeated_requests(self, store, epochs, read, digest):
        given = [later(store, body=self.LARGE) for _ in range(self.NUMBER // 2)]
        given += sized(store, *[64 * KIB] * (self.NUMBER // 2))
        asked = [request(one, f"r{n}") for n, one in enumerate(given)]
        await store.insert(asked, {})
        running = [(await claim(store, [one], epochs))[0] for one in given[self.NUMBER // 2 :]]
        ends = [ending(one, result_body='"' + "y" * 64 * KIB + '"') for one in running]
        assert all(await store.record(ends))
        read.clear()
        again = [
            request(later(store, body=b"1"), f"r{n}", digest=digest) for n in range(self.NUMBER)
        ]
        answers = await store.insert(again, {})
        assert [answer.same for answer in answers] == [digest == "d"] * self.NUMBER
        assert set(read) == {0}

    async def test_tasks_whose_first_answer_was_lost_have_the_payload_that_was_sent(
        self, store, read
    ):
        held = await self.holders(store)
        assert await insert(store, *held, again=True) == held
        assert read == [0] * self.NUMBER

    async def test_replays_whose_keys_are_taken(self, store, read):
        old = await stored(store, *[one.task for one in self.submissions(store)])
        await store.cancel([one.id for one in old])
        held = await self.holders(store)
        replays = [replay_of(store, one) for one in old]
        assert await store.replay(replays, force=False) == [conflict(one) for one in held]
        assert read == [0] * self.NUMBER
