"""The contract of a store: the tags of a task stay with it."""

import pytest

from contracts.stores import (
    HOUR,
    SHARDS,
    ended,
    insert,
    later,
    now,
    one,
    replay_of,
    run,
    stored,
    task,
)
from tickwheel.values.task import Event

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

LONGEST = " ".join(f"{number}:".ljust(32, "x") for number in range(8))


class TestTags:
    @pytest.mark.parametrize("keyed", [False, True])
    @pytest.mark.parametrize("count", [1, 200])
    async def test_are_stored_as_they_were_given(self, store, keyed, count):
        given = [
            later(store, tags_text=text, key=f"{text}{number}" if keyed else None)
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
        (found,) = await ended(store, epochs, task(store, tags_text="a b"), event=event)
        assert found.tags == ("a", "b")

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
        (found,) = await insert(store, later(store, key="k", tags_text=tags), on_conflict="replace")
        assert found.tags_text == tags
        assert (await one(store, found.id)).tags_text == tags

    async def test_are_copied_by_a_replay(self, store):
        epochs = await store.take(range(SHARDS), "n1")
        (final,) = await ended(store, epochs, task(store, tags_text="a b"), event=Event.FAIL)
        (again,) = await store.replay([replay_of(store, final)], force=False)
        assert (again.tags, again.replay_of) == (("a", "b"), final.id)
