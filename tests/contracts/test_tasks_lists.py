"""The contract of a store: lists, changes by filter, replay, and what leaves the backlog."""

import itertools

import pytest
import pytest_asyncio

from contracts.stores import (
    ALL,
    ENDS,
    EVERYTHING,
    FILTERS,
    HOUR,
    INDEXED,
    NOBODY,
    ONE_DRIVER,
    SHARDS,
    all_of,
    change,
    changed,
    claim,
    conflict,
    due_of,
    ended,
    ending,
    everything,
    holds,
    ids_of,
    later,
    made,
    now,
    one,
    replay_of,
    run,
    scan_less,
    stored,
    task,
    various,
    walk,
)
from tickwheel.durable.store import ERROR_WEIGHT, PAGE_BYTES
from tickwheel.values.task import (
    Event,
    Filter,
    Page,
    State,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("watched"),
    pytest.mark.parametrize("place", ONE_DRIVER, indirect=True),
]


MEBIBYTE = 1 << 20


async def pages_of(store, which, final, limit=1_000):
    """The pages of a list, those without a task left out."""
    pages, cursor = [], None
    while True:
        page = await store.find(which, final=final, cursor=cursor, limit=limit)
        pages += [page.items] if page.items else []
        cursor = page.next_cursor
        if cursor is None:
            return pages


async def numbers(store, task_id, **options):
    """Which attempts of a task a part of its execution log has."""
    return [row.attempt for row in await store.attempts(task_id, **options)]


def unclaimed_that(which, tasks, store):
    """The names of the unclaimed ones that a filter holds for."""
    at = now(store)
    return {
        name for name, one in tasks.items() if one.state is State.DELAY and holds(which, one, at)
    }


async def end_all(store):
    """End what runs, and cancel the rest."""
    await store.record([ending(one) for one in await store.running(ALL)])
    await store.cancel(ids_of(await everything(store, final=False)))


class TestGet:
    async def test_tasks_live_or_final_in_the_order_asked_for(self, store, epochs):
        live = await stored(store, task(store), later(store))
        (final,) = await ended(store, epochs, task(store))
        ids = [final.id, NOBODY, live[1].id, live[0].id, final.id]
        assert await store.get(ids) == [final, None, live[1], live[0], final]

    async def test_no_ids_no_tasks(self, store):
        assert await store.get([]) == []

    async def test_a_thousand_at_once(self, store):
        given = await stored(store, *[task(store) for _ in range(1_000)])
        assert await store.get(ids_of(given)[::-1]) == given[::-1]


class TestFind:
    async def test_every_filter_gives_what_it_holds_for_newest_first(self, store, epochs):
        tasks = await various(store, epochs)
        for parts, final in itertools.product(FILTERS, [None, True, False]):
            at = now(store)
            which = made(parts, at)
            expected = all_of(
                *[
                    one
                    for one in tasks.values()
                    if holds(which, one, at) and (final is None or one.final == final)
                ]
            )
            page = await store.find(which, final=final, cursor=None, limit=100)
            assert page == Page(expected, None), (which, final)

    @pytest.mark.parametrize("which", [EVERYTHING, Filter(service="mail"), Filter(key="k")])
    @pytest.mark.parametrize("final", [None, True, False])
    async def test_a_page_ends_where_payloads_come_to_four_mebibytes(
        self, store, epochs, final, which
    ):
        large = bytes(MEBIBYTE)
        given = [
            task(store, body=large, key=which.key, service=f"s{n}" if which.key else "mail")
            for n in range(12)
        ]
        await stored(store, *given)
        if final is not False:
            ends = given if final else given[::2]
            await store.record([ending(one) for one in await claim(store, ends, epochs)])
        pages = await pages_of(store, which, final)
        assert list(map(len, pages)) == [4, 4, 4]
        assert ids_of(itertools.chain(*pages)) == ids_of(all_of(*given))
        assert all(one.body == large for page in pages for one in page)

    async def test_results_count_as_payloads_do(self, store, epochs):
        given = [task(store, body=b"1") for _ in range(12)]
        running = await run(store, epochs, *given)
        result = '"' + "x" * (MEBIBYTE - 3) + '"'
        await store.record([ending(one, result_body=result) for one in running])
        assert list(map(len, await pages_of(store, EVERYTHING, None))) == [4, 4, 4]

    @pytest.mark.parametrize("event", [Event.FAIL, Event.RETRY])
    async def test_errors_count_for_more_than_payloads_do(self, store, epochs, event):
        error = "x" * (MEBIBYTE // ERROR_WEIGHT)
        await ended(store, epochs, *[task(store) for _ in range(12)], event=event, error=error)
        assert list(map(len, await pages_of(store, EVERYTHING, None))) == [4, 4, 4]

    async def test_results_of_any_letters_are_all_shown(self, store, epochs, monkeypatch):
        change(monkeypatch, "PAGE_BYTES", 100)
        running = await run(store, epochs, *[task(store, body=b"1") for _ in range(9)])
        await store.record([ending(one, result_body=f'"{"ä" * 20}"') for one in running])
        assert ids_of(await walk(store, EVERYTHING, limit=5)) == ids_of(all_of(*running))

    @pytest.mark.parametrize("limit", [1, 2, 5, 100])
    @pytest.mark.parametrize("final", [None, True, False])
    async def test_however_small_a_page_is_all_are_shown_once(
        self, store, epochs, monkeypatch, limit, final
    ):
        change(monkeypatch, "PAGE_BYTES", 100)
        scan_less(monkeypatch, 7)
        sizes = itertools.cycle([10, 0, 250, 99, 1, 100, 30])
        given = [task(store, body=bytes(next(sizes)), shard=n % SHARDS) for n in range(30)]
        await stored(store, *given)
        await store.record([ending(one) for one in await claim(store, given[::3], epochs)])
        expected = [one for one in given if final is None or (one in given[::3]) == final]
        pages = await pages_of(store, EVERYTHING, final, limit)
        assert ids_of(itertools.chain(*pages)) == ids_of(all_of(*expected))
        for page in pages:
            assert sum(len(one.body) for one in page[:-1]) < 100

    async def test_ready_is_what_is_due_by_the_stores_clock(self, store):
        overdue, not_yet = await stored(store, task(store), later(store))
        assert await walk(store, Filter(state=State.READY)) == [overdue]
        assert await walk(store, Filter(state=State.DELAY)) == [not_yet]

    @pytest.mark.parametrize("limit", [1, 2, 7, 30, 31])
    @pytest.mark.parametrize("final", [None, True, False])
    async def test_a_cursor_walks_all_exactly_once(self, store, epochs, limit, final):
        given = [task(store, shard=n % SHARDS, key=f"k{n}") for n in range(30)]
        await stored(store, *given)
        running = await claim(store, given[::3], epochs)
        await store.record([ending(one) for one in running])
        await store.cancel(ids_of(given[1::6]))
        found = await store.get(ids_of(given))
        expected = [one for one in found if final is None or one.final == final]
        assert await walk(store, EVERYTHING, final=final, limit=limit) == all_of(*expected)

    @pytest.mark.parametrize("limit", [1, 2, 100])
    async def test_a_cursor_walks_all_that_match(self, store, epochs, limit):
        tasks = await various(store, epochs)
        for parts in FILTERS:
            at = now(store)
            which = made(parts, at)
            expected = all_of(*[one for one in tasks.values() if holds(which, one, at)])
            assert await walk(store, which, limit=limit) == expected

    @pytest.mark.parametrize("final", [None, True, False])
    @pytest.mark.parametrize("limit", [1, 3, 50])
    async def test_a_list_looks_at_so_many_rows_and_goes_on(
        self, store, epochs, monkeypatch, final, limit
    ):
        scan_less(monkeypatch, 10)
        given = [
            task(store, service="rare" if n % 17 == 3 else "mail", shard=n % SHARDS)
            for n in range(101)
        ]
        await stored(store, *given)
        running = await claim(store, [one for n, one in enumerate(given) if n % 4 == 0], epochs)
        await store.record([ending(one) for one in running])
        found = await store.get(ids_of(given))
        expected = [
            one for one in found if one.service == "rare" and (final is None or one.final == final)
        ]
        rare = Filter(service="rare")
        assert await walk(store, rare, final=final, limit=limit) == all_of(*expected)
        nobody = Filter(tags=("nobody",))
        page = await store.find(nobody, final=final, cursor=None, limit=limit)
        assert page.items == []
        assert page.next_cursor is not None
        assert await walk(store, nobody, final=final, limit=limit) == []

    async def test_a_scan_that_ends_with_the_table_ends_the_list(self, store, monkeypatch):
        scan_less(monkeypatch, 10)
        for _ in range(4):
            await stored(store, *[task(store) for _ in range(5)])
            assert len(await walk(store, Filter(service="mail"), limit=3)) % 5 == 0
            assert await walk(store, Filter(service="nobody"), limit=3) == []

    async def test_few_tasks_of_a_service_or_a_due_time_are_found_at_once(self, store, monkeypatch):
        scan_less(monkeypatch, 10)
        soon = now(store) + HOUR
        rare = [task(store, service="rare", shard=n)._replace(due_at_ms=soon + n) for n in range(4)]
        overdue = task(store)
        theirs = task(store, service="acme/mail")._replace(due_at_ms=soon + 50)
        await stored(store, *rare, overdue, theirs)
        others = [task(store)._replace(due_at_ms=soon + HOUR + n) for n in range(40)]
        await stored(store, *others)

        async def found(**fields):
            page = await store.find(Filter(**fields), final=False, cursor=None, limit=50)
            assert page.next_cursor is None
            return sorted(ids_of(page.items))

        assert await found(service="rare") == sorted(ids_of(rare))
        assert await found(service="rare", state=State.RUNNING) == []
        assert await found(state=State.READY) == [overdue.id]
        assert await found(service="mail", state=State.READY) == [overdue.id]
        delayed = {"state": State.DELAY, "due_after_ms": soon + 2, "due_before_ms": soon + 40}
        assert await found(**delayed) == sorted(ids_of(rare[2:]))
        assert await found(**delayed, namespace="") == sorted(ids_of(rare[2:]))
        assert await found(**delayed, namespace="other") == []
        delayed |= {"due_before_ms": soon + 60}
        assert await found(**delayed, namespace="acme") == [theirs.id]

    async def test_a_key_is_found_however_many_rows_there_are(self, store, monkeypatch):
        scan_less(monkeypatch, 10)
        first = await stored(store, task(store, key="k"))
        await stored(store, *[task(store) for _ in range(50)])
        page = await store.find(Filter(key="k"), final=None, cursor=None, limit=5)
        assert page.items == first

    async def test_what_comes_after_the_first_page_does_not_move_the_next(self, store):
        given = await stored(store, *[task(store) for _ in range(10)])
        first = await store.find(EVERYTHING, final=None, cursor=None, limit=5)
        await stored(store, *[task(store) for _ in range(5)])
        await store.cancel(ids_of(given[:2]))
        second = await store.find(EVERYTHING, final=None, cursor=first.next_cursor, limit=5)
        assert ids_of(first.items + second.items) == ids_of(all_of(*given))

    async def test_an_empty_store_has_an_empty_page(self, store):
        for final in (None, True, False):
            page = await store.find(EVERYTHING, final=final, cursor=None, limit=5)
            assert page == Page([], None)


class TestAttempts:
    async def test_of_an_unknown_task_or_one_that_never_ran_there_are_none(self, store, epochs):
        (waiting,) = await stored(store, task(store))
        (running,) = await run(store, epochs, task(store))
        assert await store.attempts(NOBODY) == []
        assert await store.attempts(waiting.id) == []
        assert await store.attempts(running.id) == []

    async def test_a_log_is_read_in_parts(self, store, epochs):
        given, other = task(store), task(store)
        await tried(store, epochs, given, 7, at_ms=now(store))
        await tried(store, epochs, other, 2, at_ms=now(store))
        assert await numbers(store, given.id) == [1, 2, 3, 4, 5, 6, 7]
        assert await numbers(store, given.id, limit=3) == [1, 2, 3]
        assert await numbers(store, given.id, after=3, limit=3) == [4, 5, 6]
        assert await numbers(store, given.id, after=6, limit=3) == [7]
        for after in (7, 2**31 - 1):
            assert await numbers(store, given.id, after=after) == []

    async def test_a_part_ends_where_errors_fill_a_page(self, store, epochs):
        given = task(store)
        quarter = "ü" * (PAGE_BYTES // ERROR_WEIGHT // 4 // 2)  # of two bytes each
        await tried(store, epochs, given, 9, at_ms=now(store), error=quarter)
        assert await numbers(store, given.id) == [1, 2, 3, 4]
        assert await numbers(store, given.id, after=4) == [5, 6, 7, 8]
        assert await numbers(store, given.id, after=8) == [9]

    async def test_an_error_that_is_longer_than_a_page_is_one(self, store, epochs, monkeypatch):
        change(monkeypatch, "PAGE_BYTES", ERROR_WEIGHT)
        given = task(store)
        await tried(store, epochs, given, 2, at_ms=now(store), error="no such order")
        assert await numbers(store, given.id) == [1]
        assert await numbers(store, given.id, after=1) == [2]


class TestCancelWhere:
    async def test_what_the_filter_holds_for_is_cancelled_unless_claimed(self, store, epochs):
        async def check(parts):
            tasks = await various(store, epochs)
            which = made(parts, now(store))
            expected = unclaimed_that(which, tasks, store)
            won = await changed(store.cancel_where(which, 100))
            assert sorted(won) == sorted(tasks[name].id for name in expected), which
            after = await store.get([one.id for one in tasks.values()])
            for (name, was), is_now in zip(tasks.items(), after, strict=True):
                if name in expected:
                    assert is_now.state is State.CANCELLED
                else:
                    assert is_now == was
            await end_all(store)

        for parts in INDEXED:
            await check(parts)

    async def test_it_does_no_more_at_a_time_than_its_limit_and_ends(self, store):
        given = await stored(store, *[later(store, shard=n % SHARDS) for n in range(25)])
        kept = await stored(store, later(store, service="sms"))
        parts = []
        async for part in store.cancel_where(Filter(service="mail"), 10):
            parts.append(ids_of(part))
        assert [len(part) for part in parts] == [10, 10, 5]
        assert sorted(itertools.chain(*parts)) == sorted(ids_of(given))
        assert await everything(store, final=False) == kept

    async def test_a_key_without_a_service_is_every_services(self, store):
        given = await stored(store, *[later(store, service=f"s{n}", key="k") for n in range(5)])
        won = await changed(store.cancel_where(Filter(key="k"), 2))
        assert sorted(won) == sorted(ids_of(given))

    async def test_what_was_written_since_a_moment_is_left_alone(self, store):
        at = now(store)
        given = {
            name: (await stored(store, later(store, updated_at_ms=updated)))[0]
            for name, updated in (("before", at - 1), ("since", at), ("set back", at + HOUR))
        }
        which = Filter(service="mail", unchanged_since_ms=at)
        won = await changed(store.cancel_where(which, 100))
        assert sorted(won) == sorted([given["before"].id, given["set back"].id])

    async def test_those_given_are_as_they_were_due(self, store):
        given = await stored(store, *[later(store, shard=n % SHARDS) for n in range(5)])
        (part,) = [part async for part in store.cancel_where(Filter(service="mail"), 100)]
        assert sorted(part) == sorted(map(due_of, given))


class TestRescheduleWhere:
    async def test_what_the_filter_holds_for_is_moved_unless_claimed(self, store, epochs):
        async def check(parts):
            tasks = await various(store, epochs)
            which = made(parts, now(store))
            expected = unclaimed_that(which, tasks, store)
            moved = now(store) + 5 * HOUR
            won = await changed(store.reschedule_where(which, moved, 100))
            assert sorted(won) == sorted(tasks[name].id for name in expected), which
            after = await store.get([one.id for one in tasks.values()])
            for (name, was), is_now in zip(tasks.items(), after, strict=True):
                if name in expected:
                    assert is_now._replace(updated_at_ms=0) == was._replace(
                        due_at_ms=moved, updated_at_ms=0
                    )
                else:
                    assert is_now == was
            await end_all(store)

        for parts in INDEXED:
            await check(parts)

    async def test_it_does_no_more_at_a_time_than_its_limit_and_ends(self, store):
        given = await stored(store, *[later(store) for _ in range(25)])
        moved = now(store) + 5 * HOUR
        at_it = await stored(store, task(store, due_at_ms=moved))
        parts = []
        async for part in store.reschedule_where(Filter(service="mail"), moved, 10):
            parts.append(ids_of(part))
        assert [len(part) for part in parts] == [10, 10, 5]
        assert sorted(itertools.chain(*parts)) == sorted(ids_of(given))
        assert {one.due_at_ms for one in await everything(store)} == {moved}
        assert await store.get(ids_of(at_it)) == at_it

    @pytest.mark.parametrize("moved_by", [-HOUR, 0, 100 * HOUR])
    async def test_each_is_moved_once_wherever_it_goes(self, store, moved_by):
        given = await stored(
            store,
            *[later(store, shard=n % SHARDS, due_at_ms=now(store) + n * HOUR) for n in range(25)],
        )
        moved = now(store) + 7 * HOUR + 5 + moved_by
        parts = [part async for part in store.reschedule_where(Filter(service="mail"), moved, 4)]
        won = [due for part in parts for due in part]
        assert sorted(won) == sorted(due_of(one)._replace(due_at_ms=moved) for one in given)


class TestReplay:
    @pytest.mark.parametrize("event", ENDS)
    async def test_a_final_task_runs_again_as_a_new_one(self, store, epochs, event):
        given = task(
            store,
            service="sms",
            body=b"\x00\xff",
            key="k",
            priority=4,
            max_attempts=9,
            timeout_ms=77,
            deadline_at_ms=now(store) - 5,
        )
        (final,) = await ended(store, epochs, given, event=event, error="boom", result_body="1")
        replay = replay_of(store, final)
        (new,) = await store.replay([replay], force=False)
        assert new == given._replace(
            id=replay.new_id,
            shard=1,
            due_at_ms=replay.due_at_ms,
            deadline_at_ms=None,
            created_at_ms=new.created_at_ms,
            updated_at_ms=new.updated_at_ms,
            replay_of=final.id,
        )
        assert new.created_at_ms >= given.created_at_ms
        assert await one(store, new.id) == new
        assert await one(store, final.id) == final._replace(replayed_as=new.id)
        (running,) = await claim(store, [new], epochs)
        assert running.replay_of == final.id
        await store.record([ending(running)])
        assert (await one(store, new.id)).replay_of == final.id

    async def test_a_cancelled_task_can_be_replayed(self, store):
        (given,) = await stored(store, later(store))
        await store.cancel([given.id])
        (new,) = await store.replay([replay_of(store, given)], force=False)
        assert (new.replay_of, new.state) == (given.id, State.DELAY)

    async def test_once_unless_forced(self, store, epochs):
        (final,) = await ended(store, epochs, task(store))
        first, second, third = (replay_of(store, final) for _ in range(3))
        assert ids_of(await store.replay([first], force=False)) == [first.new_id]
        assert await store.replay([second], force=False) == [None]
        assert await one(store, second.new_id) is None
        assert ids_of(await store.replay([third], force=True)) == [third.new_id]
        assert (await one(store, final.id)).replayed_as == third.new_id

    async def test_once_also_within_a_batch(self, store, epochs):
        (final,) = await ended(store, epochs, task(store))
        first, second = replay_of(store, final), replay_of(store, final)
        answers = await store.replay([first, second], force=False)
        assert [answer and answer.id for answer in answers] == [first.new_id, None]
        assert ids_of(await everything(store, final=False)) == [first.new_id]
        assert (await one(store, final.id)).replayed_as == first.new_id

    @pytest.mark.parametrize("force", [False, True])
    async def test_what_is_not_in_the_backlog_is_none(self, store, epochs, force):
        waiting, running = task(store), task(store)
        await stored(store, waiting)
        (running,) = await run(store, epochs, running)
        unknown = task(store)
        replays = [replay_of(store, one) for one in (waiting, running, unknown)]
        assert await store.replay(replays, force=force) == [None] * 3
        assert await everything(store) == all_of(waiting, running)

    @pytest.mark.parametrize("force", [False, True])
    async def test_a_key_that_a_live_task_has_is_taken(self, store, epochs, force):
        (final,) = await ended(store, epochs, task(store, key="k"))
        (holder,) = await stored(store, task(store, key="k"))
        replay = replay_of(store, final)
        assert await store.replay([replay], force=force) == [conflict(holder)]
        assert await one(store, replay.new_id) is None
        assert (await one(store, final.id)).replayed_as is None
        await store.cancel([holder.id])
        assert ids_of(await store.replay([replay], force=force)) == [replay.new_id]

    async def test_of_two_with_one_key_the_second_finds_it_taken(self, store, epochs):
        finals = [(await ended(store, epochs, task(store, key="k")))[0] for _ in range(2)]
        replays = [replay_of(store, final) for final in finals]
        first, second = await store.replay(replays, force=False)
        assert first.id == replays[0].new_id
        assert second == conflict(first)
        found = await store.get(ids_of(finals))
        assert [final.replayed_as for final in found] == [first.id, None]

    async def test_the_answers_are_in_the_order_of_the_replays(self, store, epochs):
        tasks = [task(store, key=f"k{n}" if n % 2 else None) for n in range(300)]
        finals = await ended(store, epochs, *tasks)
        replays = [replay_of(store, final) for final in reversed(finals)]
        replays.insert(100, replay_of(store, task(store)))
        answers = await store.replay(replays, force=False)
        assert answers[100] is None
        assert [answer and answer.id for answer in answers] == [
            None if place == 100 else replay.new_id for place, replay in enumerate(replays)
        ]

    async def test_no_replays_no_answers(self, store):
        assert await store.replay([], force=False) == []


async def tried(store, epochs, given, times, *, at_ms, **fields):
    """Return a task that has ended with its attempt number `times`."""
    await stored(store, given)
    for attempt in range(1, times + 1):
        (running,) = await claim(store, [given], epochs)
        event = Event.FINISH if attempt == times else Event.RETRY
        assert await store.record([ending(running, event, at_ms=at_ms, **fields)]) == [True]


class TestPrune:
    async def test_what_ended_before_leaves_with_its_attempts(self, store, epochs):
        at = now(store)
        old, new = (task(store) for _ in range(2))
        await ended(store, epochs, old, at_ms=at - 100)
        await ended(store, epochs, new, at_ms=at)
        assert await store.prune(at, 100) == 1
        assert await one(store, old.id) is None
        assert await store.attempts(old.id) == []
        assert (await one(store, new.id)).final
        assert len(await store.attempts(new.id)) == 1

    async def test_live_tasks_stay_however_old(self, store, epochs):
        given = task(store, due_at_ms=0, created_at_ms=0, updated_at_ms=0)
        retried = task(store, due_at_ms=0, created_at_ms=0, updated_at_ms=0)
        await stored(store, given)
        await ended(store, epochs, retried, event=Event.RETRY, at_ms=1)
        assert await store.prune(now(store) + HOUR, 100) == 0
        assert len(await everything(store)) == 2
        assert len(await store.attempts(retried.id)) == 1

    async def test_it_is_bounded_and_repeating_it_ends(self, store, epochs):
        await ended(store, epochs, *[task(store) for _ in range(20)])
        cancelled = await stored(store, *[task(store) for _ in range(5)])
        await store.cancel(ids_of(cancelled))
        before = now(store) + HOUR
        assert [await store.prune(before, 10) for _ in range(4)] == [10, 10, 5, 0]
        assert await everything(store) == []

    async def test_of_those_with_many_attempts_fewer_go_at_once(self, store, epochs, monkeypatch):
        change(monkeypatch, "PRUNE_ROWS", 10)
        at = now(store)
        for age in range(4):
            await tried(store, epochs, task(store), 4, at_ms=at - age)
        assert [await store.prune(at + HOUR, 100) for _ in range(3)] == [2, 2, 0]
        assert await everything(store) == []

    async def test_one_with_very_many_attempts_goes_in_parts(self, store, epochs, monkeypatch):
        change(monkeypatch, "PRUNE_ROWS", 5)
        at = now(store)
        many, few = task(store), task(store)
        await tried(store, epochs, many, 12, at_ms=at - 1)
        await tried(store, epochs, few, 1, at_ms=at)
        assert [await store.prune(at + HOUR, 100) for _ in range(3)] == [1, 1, 0]
        assert await everything(store) == []
        assert await store.attempts(many.id) == await store.attempts(few.id) == []

    async def test_of_large_ones_fewer_go_at_once(self, store, epochs, monkeypatch):
        change(monkeypatch, "PRUNE_ROWS", 10)
        at = now(store)
        for age in range(3):
            await ended(store, epochs, task(store, body=b"x" * 65_536), at_ms=at - age)
        small = await ended(store, epochs, *[task(store) for _ in range(3)], at_ms=at + 1)
        assert [await store.prune(at + HOUR, 100) for _ in range(5)] == [1, 1, 1, 3, 0]
        assert len(small) == 3

    async def test_the_oldest_leave_first(self, store, epochs):
        at = now(store)
        tasks = [task(store) for _ in range(5)]
        for age, given in enumerate(tasks):
            await ended(store, epochs, given, at_ms=at - 10 * age)
        assert await store.prune(at + HOUR, 2) == 2
        assert sorted(ids_of(await everything(store))) == sorted(ids_of(tasks[:3]))


class TestCounts:
    async def test_how_many_are_live_and_how_many_final(self, store, epochs):
        assert await store.counts() == {"live": 0, "final": 0}
        tasks = await various(store, epochs)
        final = sum(one.final for one in tasks.values())
        assert await store.counts() == {"live": len(tasks) - final, "final": final}


NAMES = ["mail", "acme", "acme/mail", "acme/sms", "acme0", "acme-x/mail", "acm/mail", "Acme/x"]


class TestNamespaces:
    @pytest_asyncio.fixture
    async def tasks(self, store, epochs):
        """A task that waits, with a key, and a final one, of every service."""
        live = await stored(store, *[later(store, service=name, key="k") for name in NAMES])
        final = await ended(store, epochs, *[task(store, service=name, key="f") for name in NAMES])
        return live + final

    @pytest.mark.parametrize("final", [None, True, False])
    @pytest.mark.parametrize("namespace", [None, "", "acme", "acme-x", "Acme", "nobody"])
    async def test_a_list_has_what_is_in_it(self, store, tasks, namespace, final):
        for key in (None, "k", "f"):
            which = Filter(namespace=namespace, key=key)
            expected = [
                one
                for one in tasks
                if holds(which, one, now(store)) and (final is None or one.final == final)
            ]
            assert await walk(store, which, final=final) == all_of(*expected)

    async def test_what_is_in_which(self, store, tasks):
        async def services(namespace):
            found = await walk(store, Filter(namespace=namespace), final=False)
            return sorted(one.service for one in found)

        assert await services("acme") == ["acme/mail", "acme/sms"]
        assert await services("") == ["acme", "acme0", "mail"]
        assert await services("ac") == []
        assert await services(None) == sorted(NAMES)

    @pytest.mark.parametrize("verb", ["cancel", "reschedule"])
    @pytest.mark.parametrize(
        ("which", "expected"),
        [
            (Filter(key="k", namespace="acme"), ["acme/mail", "acme/sms"]),
            (Filter(key="k", namespace=""), ["acme", "acme0", "mail"]),
            (Filter(key="k", service="acme/sms", namespace="acme"), ["acme/sms"]),
            (Filter(service="acme/sms", namespace="acme"), ["acme/sms"]),
            (Filter(service="mail", namespace="acme"), []),
            (Filter(service="acme/mail", namespace=""), []),
            (Filter(key="k", namespace="nobody"), []),
        ],
    )
    async def test_a_change_by_filter_stays_in_it(self, store, tasks, verb, which, expected):
        if verb == "cancel":
            won = await changed(store.cancel_where(which, 100))
        else:
            won = await changed(store.reschedule_where(which, now(store) + 2 * HOUR, 100))
        found = await store.get(won)
        assert sorted(one.service for one in found) == expected
        others = [one for one in await store.get(ids_of(tasks)) if one not in tasks]
        assert sorted(ids_of(others)) == sorted(won)
