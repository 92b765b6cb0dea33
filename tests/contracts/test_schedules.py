"""The contract of a store: schedules, and firings of which none is lost or doubled."""

import asyncio

import pytest

from contracts.stores import (
    AUDIT,
    HOUR,
    ONE_DRIVER,
    SECOND,
    Fire,
    all_of,
    claim,
    ending,
    everything,
    fire,
    firing,
    now,
    one,
    put,
    schedule,
    stored,
    task,
    timing,
)
from tickwheel.durable.store import FIRE_BYTES, PAGE_BYTES
from tickwheel.errors import ScheduleChanged
from tickwheel.values.task import (
    State,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("watched"),
    pytest.mark.parametrize("place", ONE_DRIVER, indirect=True),
]


class TestSchedules:
    async def test_they_are_kept_as_they_were_given_by_name(self, store):
        nightly = schedule(store, body=b"\x00\xff", enabled=False, priority=-3, timeout_ms=5)
        hourly = schedule(
            store, "hourly ✓", cron=None, interval_ms=HOUR, tz="UTC", missed="all", max_attempts=7
        )
        early = schedule(store, "early", missed="skip")
        await put(store, nightly, hourly, early)
        found = await store.schedules.read()
        assert found == [early, hourly, nightly]
        assert [one.enabled for one in found] == [True, True, False]
        assert all(isinstance(one.enabled, bool) for one in found)

    async def test_a_put_may_require_the_version_that_it_replaces(self, store):
        nightly = schedule(store)
        stored = await store.schedules.put(nightly, AUDIT, "")
        other = nightly._replace(priority=7)
        for version in ("", "another"):
            with pytest.raises(ScheduleChanged, match="nightly"):
                await store.schedules.put(other, AUDIT, version)
        assert await store.schedules.get("nightly") == nightly
        assert await store.schedules.put(other, AUDIT, stored.version) == other
        with pytest.raises(ScheduleChanged, match="nightly"):
            await store.schedules.put(nightly, AUDIT, stored.version)
        with pytest.raises(ScheduleChanged, match="not exist"):
            await store.schedules.put(schedule(store, "gone"), AUDIT, stored.version)

    async def test_of_puts_that_require_the_same_version_one_wins(self, store):
        given = [schedule(store, priority=n + 1) for n in range(10)]
        version = ""  # none may exist
        for some in (given[:5], given[5:]):
            puts = (store.schedules.put(one, AUDIT, version) for one in some)
            answers = await asyncio.gather(*puts, return_exceptions=True)
            won = [one for one in answers if not isinstance(one, ScheduleChanged)]
            assert won == [await store.schedules.get("nightly")]
            version = won[0].version

    async def test_a_firing_does_not_change_the_version(self, store):
        nightly = schedule(store)
        assert nightly._replace(fired_until_ms=5).version == nightly.version
        assert nightly._replace(body=b"2").version != nightly.version

    async def test_one_is_read_by_its_name(self, store):
        nightly, other = schedule(store, enabled=False), schedule(store, "a/nightly")
        await put(store, nightly, other)
        assert await store.schedules.get("nightly") == nightly
        assert await store.schedules.get("a/nightly") == other
        assert await store.schedules.get("nightl") is None

    async def test_they_are_read_page_by_page(self, store):
        schedules = [schedule(store, name) for name in ("B", "a", "a/b", "c", "é")]
        await put(store, *reversed(schedules))
        assert await store.schedules.read(limit=2) == schedules[:2]
        assert await store.schedules.read(after="a", limit=2) == schedules[2:4]
        assert await store.schedules.read(after="b") == schedules[3:]
        assert await store.schedules.read(after="é") == []

    async def test_a_page_ends_where_its_payloads_are_many_bytes(self, store):
        large = [schedule(store, f"s{n}", body=b"x" * (PAGE_BYTES // 2)) for n in range(5)]
        await put(store, *large)
        assert await store.schedules.read() == large[:2]
        assert await store.schedules.read(after="s1") == large[2:4]
        assert await store.schedules.read(after="s3") == large[4:]

    async def test_one_that_alone_fills_a_page_is_a_page(self, store):
        large = schedule(store, body=b"x" * (PAGE_BYTES + 1))
        await put(store, large, schedule(store, "z"))
        assert await store.schedules.read() == [large]

    async def test_a_namespace_has_its_own(self, store):
        names = ["a", "a.", "a/", "a/x", "a/y", "a0", "b/x", "z"]
        schedules = {name: schedule(store, name) for name in names if name != "a/"}
        await put(store, *schedules.values())

        async def found(namespace, **page):
            return [one.name for one in await store.schedules.read(namespace=namespace, **page)]

        assert await found("a") == ["a/x", "a/y"]
        assert await found("a", limit=1) == ["a/x"]
        assert await found("a", after="a/x") == ["a/y"]
        assert await found("a", after="a/y") == []
        assert await found("") == ["a", "a.", "a0", "z"]
        assert await found("", after="a.", limit=1) == ["a0"]
        assert await found("nobody") == []

    async def test_the_one_that_submits_to_a_service_is_found(self, store):
        await put(store, schedule(store, "b", service="sms"), schedule(store, "a", service="sms"))
        assert await store.schedules.first_using("sms") == "a"
        assert await store.schedules.first_using("mail") is None

    async def test_the_registrys_number_rises_when_one_is_changed_or_deleted(self, store):
        first = schedule(store)
        numbers = [await store.registry.version()]

        async def rose():
            numbers.append(await store.registry.version())
            return numbers[-1] > numbers[-2]

        await put(store, first)
        assert await rose()
        await put(store, first)
        assert not await rose()
        await fire(store, [firing(store, first, first.fired_until_ms + 5)])
        assert not await rose()
        await put(store, first._replace(tz="UTC"))
        assert await rose()
        await store.schedules.delete(first.name, AUDIT)
        assert await rose()
        await store.schedules.delete(first.name, AUDIT)
        assert not await rose()

    async def test_a_changed_one_takes_the_place_of_the_old(self, store):
        first = schedule(store)
        changed = first._replace(cron="0 4 * * *", body=b"2", enabled=False)
        await put(store, first, changed)
        assert await store.schedules.read() == [changed]

    async def test_a_change_cancels_the_pending_firing(self, store):
        first = schedule(store)
        await put(store, first)
        pending = firing(store, first, now(store) + HOUR)
        assert await fire(store, [pending]) == [True]
        await put(store, first._replace(cron="0 4 * * *"))
        assert (await one(store, pending.task.id)).state is State.CANCELLED
        assert await everything(store, final=False) == []

    async def test_a_change_leaves_a_firing_that_runs(self, store, epochs):
        first = schedule(store)
        await put(store, first)
        fired = firing(store, first, now(store) - SECOND)
        await fire(store, [fired])
        (running,) = await claim(store, [fired.task], epochs)
        await put(store, first._replace(cron="0 4 * * *"))
        assert await everything(store) == [running]
        assert await store.record([ending(running)]) == [True]

    async def test_deleting_one_cancels_its_pending_firing_and_no_other(self, store):
        nightly, hourly = schedule(store), schedule(store, "hourly")
        await put(store, nightly, hourly)
        at = now(store) + HOUR
        firings = [firing(store, nightly, at), firing(store, hourly, at)]
        assert await fire(store, firings) == [True, True]
        assert await store.schedules.delete("nightly", AUDIT) is True
        assert [found.name for found in await store.schedules.read()] == ["hourly"]
        found = await store.get([fired.task.id for fired in firings])
        assert [fired.state for fired in found] == [State.CANCELLED, State.DELAY]

    async def test_deleting_what_is_not_there_is_false(self, store):
        assert await store.schedules.delete("nightly", AUDIT) is False
        await put(store, schedule(store))
        assert await store.schedules.delete("nightly", AUDIT) is True
        assert await store.schedules.delete("nightly", AUDIT) is False
        assert await store.schedules.read() == []

    async def test_a_firing_stores_its_task_and_how_far_it_came(self, store):
        first = schedule(store)
        await put(store, first)
        fired = firing(store, first, first.fired_until_ms + 5)
        assert await fire(store, [fired]) == [True]
        assert await store.schedules.read() == [first._replace(fired_until_ms=fired.until_ms)]
        assert await everything(store) == [fired.task]

    async def test_a_second_firing_until_the_same_time_loses(self, store):
        first = schedule(store)
        await put(store, first)
        until = first.fired_until_ms + 5
        winner = firing(store, first, until)
        assert await fire(store, [winner]) == [True]
        losers = [firing(store, first, until), firing(store, first, until - 1)]
        assert await fire(store, losers) == [False, False]
        assert await everything(store) == [winner.task]
        assert await store.schedules.read() == [first._replace(fired_until_ms=until)]

    async def test_of_two_firings_in_one_call_the_first_wins(self, store):
        first = schedule(store)
        await put(store, first)
        until = first.fired_until_ms + 5
        firings = [firing(store, first, until), firing(store, first, until)]
        assert await fire(store, firings) == [True, False]
        assert await everything(store) == [firings[0].task]

    async def test_firings_one_after_another_all_win(self, store):
        first = schedule(store, missed="all")
        await put(store, first)
        firings = [firing(store, first, first.fired_until_ms + n) for n in range(1, 6)]
        assert await fire(store, firings[:3]) == [True] * 3
        as_stored = first._replace(fired_until_ms=firings[2].until_ms)
        rest = [fired._replace(schedule=as_stored) for fired in firings[3:]]
        assert await fire(store, rest) == [True] * 2
        assert await everything(store) == all_of(*[fired.task for fired in firings])
        assert (await store.schedules.read())[0].fired_until_ms == firings[-1].until_ms

    async def test_one_that_does_not_know_of_the_last_firing_loses(self, store, epochs):
        """A node that read the schedule before would fire again what has fired, and ended."""
        first = schedule(store)
        await put(store, first)
        winner = firing(store, first, first.fired_until_ms + 5)
        assert await fire(store, [winner]) == [True]
        (running,) = await claim(store, [winner.task], epochs)
        await store.record([ending(running)])
        again = firing(store, first, winner.until_ms, id=task(store).id)._replace(
            until_ms=winner.until_ms + 100
        )
        late = [again, Fire(first, winner.until_ms + 200, None)]
        assert await fire(store, late) == [False, False]
        as_stored = first._replace(fired_until_ms=winner.until_ms)
        assert await store.schedules.read() == [as_stored]
        assert await everything(store, final=False) == []
        assert await fire(store, [again._replace(schedule=as_stored)]) == [True]

    async def test_one_that_knows_of_a_later_firing_than_there_was_loses(self, store):
        """The schedule was created again, or the database is an older copy."""
        first = schedule(store)
        await put(store, first)
        ahead = first._replace(fired_until_ms=first.fired_until_ms + 5)
        assert await fire(store, [firing(store, ahead, ahead.fired_until_ms + 5)]) == [False]
        assert await store.schedules.read() == [first]
        assert await everything(store) == []

    async def test_of_firings_in_one_call_that_go_back_in_time_the_later_ones_lose(self, store):
        first = schedule(store, missed="all")
        await put(store, first)
        moves = [-1, 3, 2, 3, 9, 4]
        firings = [firing(store, first, first.fired_until_ms + moved) for moved in moves]
        assert await fire(store, firings) == [False, True, False, False, True, False]
        assert await everything(store) == all_of(firings[1].task, firings[4].task)
        assert await store.schedules.read() == [first._replace(fired_until_ms=firings[4].until_ms)]

    async def test_every_pending_firing_of_a_deleted_schedule_is_cancelled(self, store):
        first = schedule(store, missed="all")
        await put(store, first)
        at = now(store) + HOUR
        firings = [firing(store, first, at + n) for n in range(3)]
        assert await fire(store, firings) == [True] * 3
        await store.schedules.delete(first.name, AUDIT)
        assert await everything(store, final=False) == []

    async def test_a_firing_of_a_deleted_schedule_loses(self, store):
        first = schedule(store)
        await put(store, first)
        await store.schedules.delete(first.name, AUDIT)
        assert await fire(store, [firing(store, first, now(store))]) == [False]
        assert await everything(store) == []

    @pytest.mark.parametrize(
        "change", [{"cron": "0 4 * * *"}, {"missed": "all"}, {"enabled": False}, {"tz": "UTC"}]
    )
    async def test_a_firing_of_a_schedule_that_has_changed_loses(self, store, change):
        first = schedule(store)
        await put(store, first, first._replace(**change))
        assert await fire(store, [firing(store, first, now(store))]) == [False]
        assert await everything(store) == []

    async def test_a_task_has_what_the_schedule_says_when_it_fires(self, store):
        """Only the firing times come from the schedule that was read before."""
        first = schedule(store, body=b"old")
        changed = first._replace(
            body=b"new", service="other", priority=3, max_attempts=7, timeout_ms=9
        )
        await put(store, first, changed)
        fired = firing(store, changed, now(store))
        assert await fire(store, [fired._replace(schedule=first)]) == [True]
        assert await everything(store) == [fired.task]

    async def test_firings_copy_a_bounded_number_of_bytes_at_a_time(self, store):
        large = schedule(store, "large", body=b"x" * (FIRE_BYTES // 2), missed="all")
        at = large.fired_until_ms
        small = schedule(store, "small", missed="all")._replace(fired_until_ms=at)
        await put(store, large, small)
        fires = [firing(store, large, at + n) for n in (1, 2, 3, 4)]
        fires[2:2] = [firing(store, small, at + 1), Fire(large, at + 1, None)]
        answers = await store.schedules.fire([one.firing for one in fires])
        assert [answer.won for answer in answers] == [True, True]
        assert (await store.schedules.get("large")).fired_until_ms == at + 2
        assert (await store.schedules.get("small")).fired_until_ms == at
        moved = large._replace(fired_until_ms=at + 2)
        rest = [one._replace(schedule=moved if one.schedule == large else small) for one in fires]
        answers = await store.schedules.fire([one.firing for one in rest[2:]])
        assert [answer.won for answer in answers] == [True, False, True, True]
        assert await store.schedules.fire([]) == []
        fired = [*fires[:3], *fires[4:]]
        assert await everything(store) == all_of(*[one.task for one in fired])

    async def test_one_that_alone_has_more_bytes_is_fired(self, store):
        large = schedule(store, body=b"x" * (FIRE_BYTES + 1))
        await put(store, large)
        assert await fire(store, [firing(store, large, now(store))]) == [True]

    async def test_when_they_fire_is_read_in_the_order_in_which_they_were_put(self, store):
        a, b, c = (schedule(store, name, body=b"x" * 9_999) for name in "abc")
        await put(store, c, a, b._replace(enabled=False))
        found = await store.schedules.timings()
        assert [one._replace(changed=0) for one in found] == [
            timing(c), timing(a), timing(b)._replace(enabled=False),
        ]  # fmt: skip
        assert all(isinstance(one.enabled, bool) for one in found)
        numbers = [one.changed for one in found]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == await store.registry.version()
        assert await store.schedules.timings(limit=2) == found[:2]
        assert await store.schedules.timings((found[1].changed, "a"), 2) == found[2:]

    async def test_only_what_was_put_since_is_read(self, store):
        a, b = schedule(store, "a"), schedule(store, "b")
        await put(store, a, b)
        last = (await store.schedules.timings())[-1]
        since = last.changed, last.name
        assert await store.schedules.timings(since) == []
        await put(store, a)  # which changes nothing
        await fire(store, [firing(store, b, now(store))])
        await store.schedules.delete("b", AUDIT)
        assert await store.schedules.timings(since) == []
        changed = a._replace(tz="UTC")
        await put(store, changed)
        (found,) = await store.schedules.timings(since)
        assert found._replace(changed=0) == timing(changed)
        assert found.changed > last.changed

    async def test_a_firing_of_an_old_schedule_does_not_shadow_the_right_one(self, store):
        first = schedule(store)
        changed = first._replace(tz="UTC")
        await put(store, first, changed)
        until = first.fired_until_ms + 5
        firings = [firing(store, one, until) for one in (first, changed, changed)]
        assert await fire(store, firings) == [False, True, False]
        assert await everything(store) == [firings[1].task]

    async def test_a_firing_of_a_schedule_that_was_made_anew_loses(self, store):
        first = schedule(store)
        await put(store, first)
        await store.schedules.delete(first.name, AUDIT)
        await put(store, first._replace(created_at_ms=first.created_at_ms + 1))
        assert await fire(store, [firing(store, first, now(store))]) == [False]
        assert await everything(store) == []

    async def test_one_that_is_put_unchanged_keeps_its_pending_firing(self, store):
        first = schedule(store)
        await put(store, first)
        pending = firing(store, first, now(store) + HOUR)
        await fire(store, [pending])
        as_stored = first._replace(fired_until_ms=pending.until_ms)
        assert await store.schedules.put(as_stored, AUDIT) == as_stored
        made_again = first._replace(created_at_ms=now(store), fired_until_ms=now(store))
        assert await store.schedules.put(made_again, AUDIT) == as_stored
        assert await store.schedules.read() == [as_stored]
        assert (await one(store, pending.task.id)).state is State.DELAY
        await store.schedules.delete(first.name, AUDIT)
        assert (await one(store, pending.task.id)).state is State.CANCELLED

    async def test_put_answers_with_what_is_stored(self, store):
        first = schedule(store)
        changed = first._replace(priority=4, created_at_ms=first.created_at_ms + 1)
        assert await store.schedules.put(first, AUDIT) == first
        assert await store.schedules.put(changed, AUDIT) == changed
        assert await store.schedules.read() == [changed]

    async def test_a_firing_without_a_task_only_notes_how_far_it_came(self, store):
        first = schedule(store, missed="skip")
        await put(store, first)
        until = first.fired_until_ms + 5
        assert await fire(store, [Fire(first, until, None)]) == [True]
        assert await store.schedules.read() == [first._replace(fired_until_ms=until)]
        assert await fire(store, [Fire(first, until, None), firing(store, first, until)]) == [
            False,
            False,
        ]
        assert await everything(store) == []

    async def test_a_firing_whose_key_is_taken_is_noted_and_leaves_the_others_alone(self, store):
        first, other = schedule(store), schedule(store, "other")
        await put(store, first, other)
        until = first.fired_until_ms + 5
        (holder,) = await stored(store, firing(store, first, until).task)
        firings = [firing(store, first, until), firing(store, other, until)]
        assert await fire(store, firings) == [True, True]
        assert await everything(store) == all_of(holder, firings[1].task)
        assert {one.fired_until_ms for one in await store.schedules.read()} == {until}

    async def test_names_that_begin_alike_have_their_own_firings(self, store):
        names = [
            "night",
            "nightly",
            "night ",
            "night:1",
            "nigh",
            "Night",
            "night\x1e",
            "%",
            "nigh_",
        ]
        schedules = [schedule(store, name) for name in names]
        await put(store, *schedules)
        until = now(store) + HOUR
        firings = [firing(store, one, until) for one in schedules]
        assert await fire(store, firings) == [True] * len(firings)
        await store.schedules.delete("night", AUDIT)
        found = await store.get([fired.task.id for fired in firings])
        assert [one.state for one in found if one.state is not State.DELAY] == [State.CANCELLED]
        assert found[0].state is State.CANCELLED

    async def test_no_firings_no_answers(self, store):
        assert await fire(store, []) == []
