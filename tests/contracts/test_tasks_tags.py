"""The contract of a store: the tags and the trace of a task stay with it."""

import pytest

from contracts.stores import (
    HOUR,
    ONE_DRIVER,
    SHARDS,
    changed,
    ended,
    ids_of,
    insert,
    later,
    now,
    one,
    replay_of,
    run,
    scan_less,
    stored,
    task,
    walk,
)
from tickwheel.values.task import Event, Filter, State

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("watched"),
    pytest.mark.parametrize("place", ONE_DRIVER, indirect=True),
]

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01 shop=7"
LONGEST = " ".join(f"{number}:".ljust(32, "x") for number in range(8))


class TestTags:
    @pytest.mark.parametrize("keyed", [False, True])
    @pytest.mark.parametrize("count", [1, 200])
    async def test_are_stored_as_they_were_given(self, store, keyed, count):
        given = [
            later(store, tags_text=text, trace=text, key=f"{text}{number}" if keyed else None)
            for number in range(count)
            for text in (None, "b a", LONGEST)
        ]
        assert await insert(store, *given) == given
        assert await store.get([task.id for task in given]) == given
        assert given[1].tags == ("b", "a")
        assert given[0].tags == ()

    @pytest.mark.parametrize("event", [Event.FINISH, Event.FAIL, Event.RETRY])
    async def test_stay_whatever_an_attempt_comes_to(self, store, event):
        epochs = await store.take(range(SHARDS), "n1")
        (running,) = await run(store, epochs, task(store, tags_text="a b"))
        assert running.tags == ("a", "b")
        (found,) = await ended(
            store, epochs, task(store, tags_text="a b", trace=TRACE), event=event
        )
        assert (found.tags, found.trace) == (("a", "b"), TRACE)

    async def test_stay_when_a_task_is_cancelled_or_moved(self, store):
        first, second = await stored(
            store, later(store, tags_text="a"), later(store, tags_text="b")
        )
        await store.cancel([first.id])
        await store.reschedule([second.id], now(store))
        assert [task.tags for task in await store.get([first.id, second.id])] == [("a",), ("b",)]

    async def test_stay_when_a_task_expires(self, store):
        await store.take(range(SHARDS), "n1")
        (late,) = await stored(store, later(store, tags_text="a", deadline_at_ms=now(store) - HOUR))
        assert await store.expire(range(SHARDS), 10)
        found = await one(store, late.id)
        assert (found.final, found.tags) == (True, ("a",))

    @pytest.mark.parametrize("tags", ["c d", None])
    async def test_are_those_of_the_task_that_replaces(self, store, tags):
        await stored(store, later(store, key="k", tags_text="a b"))
        new = later(store, key="k", tags_text=tags, trace=TRACE)
        (found,) = await insert(store, new, on_conflict="replace")
        assert (found.tags_text, found.trace) == (tags, TRACE)
        assert (await one(store, found.id)).tags_text == tags

    async def test_are_copied_by_a_replay(self, store):
        epochs = await store.take(range(SHARDS), "n1")
        failed = task(store, tags_text="a b", trace=TRACE)
        (final,) = await ended(store, epochs, failed, event=Event.FAIL)
        (again,) = await store.replay([replay_of(store, final)], force=False)
        assert (again.tags, again.trace, again.replay_of) == (("a", "b"), TRACE, final.id)


FOUND = [  # tags of a filter, and which of the tasks below have them
    (("a",), [0, 1, 4]),
    (("b",), [1, 2]),
    (("a", "b"), [1]),
    (("b", "a"), [1]),
    (("A",), []),
    (("a_",), []),
    (("_a",), [5]),
    (("ab",), [3]),
    (("a.*",), []),
]


async def various(store, **fields):
    """Stored tasks of which some have tags in common."""
    texts = ["a", "a b", "c b", "ab ba", "a:b a", "_a", None]
    return await stored(store, *(later(store, tags_text=text, **fields) for text in texts))


@pytest.mark.parametrize(("tags", "expected"), FOUND)
class TestAFilterByTags:
    async def test_finds_live_and_final_tasks_that_have_all_of_them(self, store, tags, expected):
        live = await various(store)
        final = await various(store)
        await store.cancel(ids_of(final))
        for tasks, is_final in ((live, False), (final, True)):
            found = await walk(store, Filter(tags=tags), final=is_final)
            assert {one.id for one in found} == {tasks[at].id for at in expected}

    async def test_cancels_those_alone(self, store, tags, expected):
        given = await various(store)
        await various(store, service="other")
        which = Filter(service="mail", tags=tags)
        parts = [part async for part in store.cancel_where(which, 2)]
        assert {due.id for part in parts for due in part} == {given[at].id for at in expected}
        assert all(len(part) <= 2 for part in parts)
        found = await store.get(ids_of(given))
        cancelled = [at for at, one in enumerate(found) if one.state is State.CANCELLED]
        assert cancelled == expected

    async def test_reschedules_those_alone(self, store, tags, expected):
        given = await various(store)
        due = now(store) + 2 * HOUR
        which = Filter(service="mail", tags=tags)
        moved = await changed(store.reschedule_where(which, due, 3))
        assert {*moved} == {given[at].id for at in expected}


class TestABoundedLook:
    async def test_a_list_by_a_tag_goes_on_from_where_it_stopped(self, store, monkeypatch):
        scan_less(monkeypatch, 5)
        await stored(store, *(later(store) for _ in range(12)))
        (tagged,) = await stored(store, later(store, tags_text="rare"))
        await stored(store, *(later(store) for _ in range(12)))
        page = await store.find(Filter(tags=("rare",)), final=False, cursor=None, limit=10)
        assert page.items == []
        assert page.next_cursor is not None
        assert await walk(store, Filter(tags=("rare",)), final=False) == [tagged]

    async def test_a_key_and_a_tag_must_both_match(self, store):
        (given,) = await stored(store, later(store, key="k", tags_text="a"))
        assert await walk(store, Filter(key="k", tags=("b",)), final=False) == []
        assert await walk(store, Filter(key="k", tags=("a",)), final=False) == [given]
        assert await changed(store.cancel_where(Filter(key="k", tags=("b",)), 10)) == []
        (gone,) = await changed(store.cancel_where(Filter(key="k", tags=("a",)), 10))
        assert gone == given.id
