"""The contract of running tasks, on every store: their leases and how attempts end."""

import itertools

import pytest

from contracts.stores import (
    ALL,
    ENDS,
    EVENTS,
    HOUR,
    NOBODY,
    ONE_DRIVER,
    RETURNS,
    SECOND,
    SHARDS,
    claim,
    conflict,
    ended,
    ending,
    everything,
    ids_of,
    insert,
    later,
    lease,
    now,
    one,
    renewed,
    run,
    stored,
    task,
    walk,
    wanted,
)
from tickwheel.durable.store import LEASE_MS, Claims, Window
from tickwheel.values.task import (
    FINAL,
    TRANSITIONS,
    Attempt,
    Event,
    Filter,
    State,
    Verdict,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("watched"),
    pytest.mark.parametrize("place", ONE_DRIVER, indirect=True),
]
MESSAGE = '{"stream": "ü", "id": "7-0"}'


async def delivered_to(store, given):
    """Where the messages of a task's attempts are, as they are stored."""
    return [row.delivered_to_body for row in await store.attempts(given.id)]


class TestRecord:
    @pytest.mark.parametrize("event", ENDS)
    async def test_an_end_moves_the_task_to_the_backlog(self, store, epochs, event):
        (running,) = await run(store, epochs, task(store, key="k", shard=2, body=b"\x00\xff"))
        end = ending(running, event, failures=2, result_body='{"ü": 1}', error="Zeile 1\nline 2 ✓")
        assert await store.record([end]) == [True]
        final = await one(store, running.id)
        assert final == running._replace(
            state=TRANSITIONS[State.RUNNING, event],
            failures=2,
            updated_at_ms=end.at_ms,
            error="Zeile 1\nline 2 ✓",
            result_body='{"ü": 1}',
            lease_until_ms=None,
            started_at_ms=None,
        )
        assert final.state in FINAL
        assert await everything(store, final=False) == []
        assert await everything(store, final=True) == [final]

    @pytest.mark.parametrize("event", RETURNS)
    async def test_a_return_makes_the_task_wait_again(self, store, epochs, event):
        given = task(store, key="k", shard=2)
        (running,) = await run(store, epochs, given)
        end = ending(running, event, failures=1, due_at_ms=running.due_at_ms + 77, error="why")
        assert await store.record([end]) == [True]
        waiting = await one(store, running.id)
        assert waiting.state is State.DELAY
        assert (waiting.attempt, waiting.failures) == (1, 1)
        assert (waiting.due_at_ms, waiting.error) == (given.due_at_ms + 77, "why")
        assert (waiting.body, waiting.key, waiting.shard) == (given.body, "k", 2)
        assert (waiting.updated_at_ms, waiting.lease_until_ms) == (end.at_ms, None)
        assert await everything(store, final=False) == [waiting]
        assert await everything(store, final=True) == []
        assert await store.running(ALL) == []
        (again,) = await claim(store, [waiting], epochs)
        assert (again.attempt, again.failures) == (2, 1)

    @pytest.mark.parametrize("event", EVENTS)
    async def test_every_end_of_an_attempt_is_logged_once(self, store, epochs, event):
        (running,) = await run(store, epochs, task(store), node="n7")
        end = ending(running, event, error="why")
        assert await store.record([end]) == [True]
        row = Attempt(
            running.id, 1, event, "n7", running.epoch, running.started_at_ms, end.at_ms, "why"
        )
        assert await store.attempts(running.id) == [row]
        assert await store.record([end]) == [False]
        assert await store.attempts(running.id) == [row]

    async def test_an_end_without_an_error_clears_the_last_one(self, store, epochs):
        given = task(store)
        (running,) = await run(store, epochs, given)
        await store.record([ending(running, Event.RETRY, error="boom")])
        (running,) = await claim(store, [given], epochs)
        assert running.error == "boom"
        await store.record([ending(running, Event.FINISH)])
        assert (await one(store, given.id)).error is None
        assert [row.error for row in await store.attempts(given.id)] == ["boom", None]

    async def test_a_long_result_and_a_long_error_are_kept(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        result, error = '"' + "é" * 500_000 + '"', "Traceback…\n" * 50_000
        await store.record([ending(running, Event.FAIL, result_body=result, error=error)])
        final = await one(store, running.id)
        assert (final.result_body, final.error) == (result, error)

    async def test_another_attempt_or_epoch_changes_nothing(self, store, epochs):
        (running,) = await run(store, epochs, task(store, key="k"))
        wrongs = [{"attempt": 0}, {"attempt": 2}, {"epoch": -1}, {"epoch": 10**6}]
        for event, wrong in itertools.product(EVENTS, wrongs):
            assert await store.record([ending(running, event, **wrong)]) == [False]
            assert await everything(store) == [running]
            assert await store.attempts(running.id) == []
        assert await store.record([ending(running)]) == [True]

    @pytest.mark.parametrize("event", EVENTS)
    async def test_the_end_of_an_earlier_attempt_comes_too_late(self, store, epochs, event):
        given = task(store)
        (first,) = await run(store, epochs, given)
        await store.record([ending(first, Event.RELEASE)])
        (second,) = await claim(store, [given], epochs, "n2")
        assert await store.record([ending(first, event)]) == [False]
        assert await everything(store) == [second]
        assert [row.event for row in await store.attempts(given.id)] == [Event.RELEASE]

    @pytest.mark.parametrize("event", EVENTS)
    async def test_what_does_not_run_cannot_end(self, store, epochs, event):
        (running,) = await run(store, epochs, task(store))
        end = ending(running, event)
        waiting, cancelled = await stored(store, task(store), task(store))
        await store.cancel([cancelled.id])
        (finished,) = await ended(store, epochs, task(store))
        before = await everything(store)
        ends = [
            end._replace(id=waiting.id, attempt=0, epoch=0),
            end._replace(id=waiting.id),
            end._replace(id=cancelled.id, attempt=0, epoch=0),
            end._replace(id=finished.id),
            end._replace(id=NOBODY),
        ]
        assert await store.record(ends) == [False] * 5
        assert await everything(store) == before
        logs = [await store.attempts(one.id) for one in (waiting, cancelled, finished)]
        assert [len(log) for log in logs] == [0, 0, 1]

    async def test_of_two_ends_in_a_batch_the_first_wins(self, store, epochs):
        for first, second in itertools.permutations(EVENTS, 2):
            (running,) = await run(store, epochs, task(store))
            ends = [ending(running, first, error="1"), ending(running, second, error="2")]
            assert await store.record(ends) == [True, False]
            final = await one(store, running.id)
            assert (final.state, final.error) == (TRANSITIONS[State.RUNNING, first], "1")
            log = await store.attempts(running.id)
            assert [(row.event, row.error) for row in log] == [(first, "1")]

    async def test_a_stale_end_does_not_shadow_the_right_one_of_its_batch(self, store, epochs):
        running = await run(store, epochs, *[task(store) for _ in range(3)])
        ends = [ending(one, Event.FAIL, attempt=0) for one in running]
        ends += [ending(one, Event.FAIL, epoch=one.epoch - 1) for one in running]
        ends += [ending(one, Event.FINISH) for one in running]
        assert await store.record(ends) == [False] * 6 + [True] * 3
        assert {one.state for one in await everything(store)} == {State.FINISHED}

    async def test_a_lease_that_was_not_lost_does_not_shadow_the_end_of_its_batch(
        self, store, epochs
    ):
        (running,) = await run(store, epochs, task(store))
        ends = [ending(running, Event.RETRY, lease_until_ms=1), ending(running, Event.FINISH)]
        assert await store.record(ends) == [False, True]
        assert (await one(store, running.id)).state is State.FINISHED

    @pytest.mark.parametrize("event", [Event.RETRY, Event.FAIL, Event.EXPIRE])
    async def test_a_lease_is_lost_only_when_nobody_has_renewed_it(self, store, epochs, event):
        (running,) = await run(store, epochs, task(store))
        lost = ending(running, event, at_ms=now(store), lease_until_ms=running.lease_until_ms)
        running = await renewed(store, running, HOUR)
        assert await store.record([lost]) == [False]
        assert await everything(store) == [running]
        lost = lost._replace(at_ms=now(store), lease_until_ms=running.lease_until_ms)
        assert await store.record([lost]) == [True]
        assert (await one(store, running.id)).state is TRANSITIONS[State.RUNNING, event]
        assert [row.event for row in await store.attempts(running.id)] == [event]

    async def test_a_late_answer_counts_while_nobody_has_found_the_lease_over(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        await renewed(store, running, -5 * SECOND)
        assert await store.record([ending(running, at_ms=now(store))]) == [True]

    async def test_an_end_wins_after_another_node_has_taken_the_shard(self, store, epochs):
        running = await run(store, epochs, *[task(store, shard=n) for n in ALL])
        newer = await store.take(ALL, "n2")
        assert all(newer[shard] > epochs[shard] for shard in ALL)
        assert await store.record([ending(one) for one in running]) == [True] * SHARDS

    async def test_the_attempts_of_a_task_are_in_order(self, store, epochs):
        given = task(store)
        await stored(store, given)
        events = [Event.SNOOZE, Event.RETRY, Event.RELEASE, Event.RETRY, Event.EXPIRE]
        for number, event in enumerate(events, 1):
            (running,) = await claim(store, [given], epochs, f"n{number}")
            await store.record([ending(running, event, error=f"error {number}")])
        log = await store.attempts(given.id)
        assert [(row.attempt, row.event, row.node, row.error) for row in log] == [
            (number, event, f"n{number}", f"error {number}")
            for number, event in enumerate(events, 1)
        ]
        assert all(isinstance(row.event, Event) and row.task_id == given.id for row in log)
        assert all(row.started_at_ms <= row.ended_at_ms for row in log)

    async def test_a_thousand_end_together_each_its_own_way(self, store, epochs):
        running = await run(store, epochs, *[task(store, shard=n % SHARDS) for n in range(1_000)])
        events = list(itertools.islice(itertools.cycle(EVENTS), 1_000))
        ends = [ending(one, event) for one, event in zip(running, events, strict=True)]
        for place in range(0, 1_000, 10):
            ends[place] = ends[place]._replace(attempt=9)
        assert await store.record(ends) == [place % 10 > 0 for place in range(1_000)]
        found = await store.get(ids_of(running))
        for place, (was, is_now, event) in enumerate(zip(running, found, events, strict=True)):
            if place % 10:
                assert is_now.state is TRANSITIONS[State.RUNNING, event]
            else:
                assert is_now == was

    async def test_no_ends_no_answers(self, store):
        assert await store.record([]) == []


class TestRenew:
    async def test_a_lease_moves_by_the_stores_clock_and_nothing_else(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        before = now(store)
        after = await renewed(store, running, HOUR)
        until = after.lease_until_ms
        assert before + HOUR <= until <= store.latest_ms() + HOUR
        assert after == running._replace(lease_until_ms=until, updated_at_ms=after.updated_at_ms)

    async def test_it_is_renewed_for_as_long_as_a_claim_lasts(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        before = now(store)
        assert await store.renew([running.attempt_key]) == [True]
        after = await one(store, running.id)
        assert before + LEASE_MS <= after.lease_until_ms <= store.latest_ms() + LEASE_MS

    async def test_only_the_running_attempt_has_a_lease(self, store, epochs):
        running, other = await run(store, epochs, task(store), task(store))
        (waiting,) = await stored(store, task(store))
        (finished,) = await ended(store, epochs, task(store))
        attempts = [
            running.attempt_key._replace(attempt=2),
            running.attempt_key._replace(epoch=running.epoch + 1),
            other.attempt_key,
            waiting.attempt_key,
            finished.attempt_key,
            running.attempt_key._replace(id=NOBODY),
        ]
        before = [running, waiting, finished]
        assert await store.renew(attempts) == [False, False, True, False, False, False]
        assert await store.get(ids_of(before)) == before

    async def test_a_lease_moves_after_another_node_has_taken_the_shard(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        await store.take(ALL, "n2")
        assert await store.renew([running.attempt_key]) == [True]

    async def test_a_thousand_move_together(self, store, epochs):
        running = await run(store, epochs, *[task(store) for _ in range(1_000)])
        until = now(store) + HOUR
        assert await store.renew([one.attempt_key for one in running], HOUR) == [True] * 1_000
        found = await store.get(ids_of(running))
        assert len({one.lease_until_ms for one in found}) == 1
        assert found[0].lease_until_ms >= until

    @pytest.mark.parametrize("until", [5 * SECOND, HOUR], ids=["for less", "for longer"])
    async def test_one_that_was_accepted_keeps_its_lease_and_is_still_the_running_one(
        self, store, epochs, until
    ):
        accepted, other = await run(store, epochs, task(store), task(store))
        at = now(store)
        await store.accept([lease(accepted, at + until)])
        before = await one(store, accepted.id)
        attempts = [given.attempt_key for given in (accepted, other)]
        assert await store.renew(attempts, 40 * SECOND) == [True, True]
        assert await one(store, accepted.id) == before
        assert before.lease_until_ms == at + until
        assert (await one(store, other.id)).lease_until_ms >= at + 40 * SECOND

    async def test_tried_again_after_it_was_accepted_it_has_a_lease_like_any_other(
        self, store, epochs
    ):
        (running,) = await run(store, epochs, task(store))
        await store.accept([lease(running, now(store) + HOUR)])
        await store.record([ending(running, Event.RETRY)])
        (again,) = await claim(store, await store.get([running.id]), epochs)
        until = (await renewed(store, again, 2 * HOUR)).lease_until_ms
        (found,) = await store.running(ALL)
        assert (found.lease_until_ms, found.due_at_ms) == (until, again.due_at_ms)

    async def test_no_leases_no_answers(self, store):
        assert await store.renew([]) == []


class TestRunning:
    async def test_the_running_tasks_of_the_shards_without_their_bodies(self, store, epochs):
        running = await run(store, epochs, *[task(store, shard=shard) for shard in ALL])
        await stored(store, task(store), later(store))
        await ended(store, epochs, task(store), event=Event.RETRY)
        await ended(store, epochs, task(store))
        for shards in ([], [5], [0, 7], ALL):
            found = sorted(await store.running(shards), key=lambda one: one.shard)
            assert found == [running[shard]._replace(body=b"") for shard in shards]

    async def test_of_every_service(self, store, epochs):
        running = await run(
            store, epochs, *[task(store, service=f"s{n}", late=n * SECOND) for n in range(30)]
        )
        assert sorted(ids_of(await store.running(ALL))) == sorted(ids_of(running))

    async def test_also_those_of_shards_that_moved(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        await store.take(ALL, "n2")
        assert await store.running(ALL) == [running._replace(body=b"")]

    async def test_those_whose_lease_ends_by_then(self, store, epochs):
        running = await run(store, epochs, *[task(store, shard=n) for n in range(3)])
        at = now(store)
        for hours, given in enumerate(running, 1):
            await renewed(store, given, hours * HOUR - 60 * SECOND)
        for hours in range(4):
            found = await store.running(ALL, until_ms=at + hours * HOUR)
            assert set(ids_of(found)) >= set(ids_of(running[:hours]))
            found = await store.running([0, 1], 100, at + hours * HOUR)
            assert sorted(ids_of(found)) == sorted(ids_of(running[: min(hours, 2)]))

    @pytest.mark.parametrize("hours", [1, 5])
    async def test_each_is_seen_by_a_whole_look_now_or_by_a_short_one_later(
        self, store, epochs, hours
    ):
        """However long its lease is, and however many that are unclaimed were due before it."""
        (running,) = await run(store, epochs, task(store, shard=1))
        await stored(store, *[task(store, late=HOUR, shard=1) for _ in range(200)])
        at = now(store)
        await renewed(store, running, hours * HOUR)
        first = await store.running(ALL, until_ms=at + SECOND)
        later = await store.running(ALL, 100, at + hours * HOUR)
        assert running.id in ids_of(first + later)

    async def test_those_that_were_accepted_when_their_time_comes(self, store, epochs):
        running = await run(store, epochs, *[task(store, shard=n) for n in range(3)])
        at = now(store)
        await store.accept([lease(one, at + n * HOUR) for n, one in enumerate(running, 1)])
        for hours in range(4):
            found = await store.running(ALL, until_ms=at + hours * HOUR)
            assert sorted(ids_of(found)) == sorted(ids_of(running[:hours]))
            assert all(one.due_at_ms == one.lease_until_ms for one in found)

    async def test_those_that_were_accepted_behind_all_that_is_overdue(self, store, epochs):
        running = await run(store, epochs, *[task(store, shard=n) for n in range(3)])
        at = now(store)
        await store.accept([lease(one, at - SECOND) for one in running[:2]])
        await store.accept([lease(running[2], at + HOUR)])
        await stored(store, *[task(store, late=HOUR, shard=n % 2) for n in range(400)])
        found = await store.running(ALL, 100, at + SECOND)
        assert sorted(ids_of(found)) == sorted(ids_of(running[:2]))
        assert ids_of(await store.running([1], 100, at + SECOND)) == [running[1].id]
        assert all(one.body == b"" and one.due_at_ms == one.lease_until_ms for one in found)

    @pytest.mark.parametrize("hours", [1, 100])
    async def test_a_whole_look_shows_one_whose_lease_ends_after_the_clock_was_set_back(
        self, store, epochs, hours
    ):
        running, accepted = await run(store, epochs, task(store), task(store))
        await store.accept([lease(accepted, now(store) + hours * HOUR)])
        set_back = await renewed(store, running, hours * HOUR)
        await stored(store, *[later(store) for _ in range(20)])
        found = await store.running(ALL, until_ms=now(store) + SECOND)
        assert found == [set_back._replace(body=b"")]

    async def test_by_id_those_that_run_without_their_bodies(self, store, epochs):
        running, accepted = await run(store, epochs, task(store), task(store, shard=3))
        (waiting,) = await stored(store, task(store))
        (finished,) = await ended(store, epochs, task(store))
        until = now(store) + HOUR
        await store.accept([lease(accepted, until)])
        ids = [*ids_of([running, accepted, waiting, finished]), NOBODY, running.id]
        found = {one.id: one for one in await store.running_by_id(ids)}
        assert found.keys() == {running.id, accepted.id}
        assert found[running.id] == running._replace(body=b"")
        assert found[accepted.id].due_at_ms == found[accepted.id].lease_until_ms == until
        assert await store.running_by_id([]) == []

    async def test_none_that_was_accepted_and_has_ended(self, store, epochs):
        running = await run(store, epochs, *[task(store) for _ in EVENTS])
        at = now(store)
        await store.accept([lease(one, at) for one in running])
        await store.record([ending(one, event) for one, event in zip(running, EVENTS, strict=True)])
        assert await store.running(ALL, 100, at + HOUR) == []


class TestAccept:
    async def test_the_attempt_goes_on_until_then(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        until = now(store) + 48 * HOUR
        assert await store.accept([lease(running, until)]) == [True]
        found = await one(store, running.id)
        assert found == running._replace(lease_until_ms=until, updated_at_ms=found.updated_at_ms)
        assert found.updated_at_ms >= running.updated_at_ms

    async def test_it_may_be_accepted_again(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        at = now(store)
        for hours in (24, 2, 48):
            assert await store.accept([lease(running, at + hours * HOUR)]) == [True]
            found = await one(store, running.id)
            assert found.lease_until_ms == at + hours * HOUR
            assert found.due_at_ms == running.due_at_ms

    async def test_twice_in_one_batch_the_last_counts(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        at = now(store)
        leases = [lease(running, at + hours * HOUR) for hours in (2, 3, 1)]
        leases.insert(1, leases[0]._replace(attempt=7))
        assert await store.accept(leases) == [True, False, True, True]
        (found,) = await store.running(ALL, until_ms=at + 9 * HOUR)
        assert found.lease_until_ms == at + HOUR

    @pytest.mark.parametrize("event", ENDS)
    async def test_the_backlog_has_the_due_time_that_it_had(self, store, epochs, event):
        plain, once, twice = await run(store, epochs, *[task(store, late=n) for n in (7, 8, 9)])
        at = now(store)
        await store.accept([lease(once, at + HOUR), lease(twice, at + HOUR)])
        await store.accept([lease(twice, at + 2 * HOUR)])
        await store.record([ending(given, event) for given in (plain, once, twice)])
        for given in (plain, once, twice):
            assert (await one(store, given.id)).due_at_ms == given.due_at_ms

    async def test_a_lost_one_too(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        at = now(store)
        await store.accept([lease(running, at - 2)])
        (found,) = await store.running(ALL, 100, at)
        end = ending(found, Event.FAIL, at_ms=at, lease_until_ms=found.lease_until_ms)
        assert await store.record([end]) == [True]
        assert (await one(store, running.id)).due_at_ms == running.due_at_ms

    async def test_tried_again_and_accepted_again_it_was_due_at_the_second_time(
        self, store, epochs
    ):
        (running,) = await run(store, epochs, task(store, late=HOUR))
        at = now(store)
        await store.accept([lease(running, at + HOUR)])
        await store.record([ending(running, Event.RETRY, due_at_ms=at - 5)])
        assert (await one(store, running.id)).due_at_ms == at - 5
        (again,) = await claim(store, await store.get([running.id]), epochs)
        await store.accept([lease(again, at + 3 * HOUR)])
        assert (await one(store, running.id)).due_at_ms == at - 5
        await store.record([ending(again)])
        assert (await one(store, running.id)).due_at_ms == at - 5

    async def test_lists_show_and_filter_by_the_due_time_that_it_had(self, store, epochs):
        (running,) = await run(store, epochs, task(store, key="k"))
        at = now(store)
        await store.accept([lease(running, at + HOUR)])
        for which in (Filter(due_before_ms=at), Filter(key="k", due_before_ms=at)):
            (found,) = await walk(store, which)
            assert found.due_at_ms == running.due_at_ms
            assert await walk(store, which._replace(due_before_ms=running.due_at_ms)) == []

    async def test_who_wants_its_key_sees_the_due_time_that_it_had(self, store, epochs):
        (running,) = await run(store, epochs, task(store, key="k"))
        await store.accept([lease(running, now(store) + HOUR)])
        (taken,) = await insert(store, task(store, key="k"), on_conflict="replace")
        assert taken == conflict(await one(store, running.id))
        assert taken.holder.due_at_ms == running.due_at_ms

    async def test_not_an_attempt_that_is_over_or_another(self, store, epochs):
        given = [task(store) for _ in range(5)]
        running = await run(store, epochs, *given)
        await store.record([ending(running[0]), ending(running[1], Event.RETRY)])
        (waiting,) = await stored(store, later(store))
        before = await store.get([*ids_of(given), waiting.id])
        until = now(store) + HOUR
        asked = [
            lease(running[0], until),
            lease(running[1], until),
            lease(running[2], until)._replace(attempt=2),
            lease(running[3], until)._replace(epoch=running[3].epoch + 1),
            lease(running[4], until)._replace(id=NOBODY),
            lease(waiting, until),
        ]
        assert await store.accept(asked) == [False] * 6
        assert await store.get([*ids_of(given), waiting.id]) == before

    async def test_the_answers_are_in_the_order_of_the_leases(self, store, epochs):
        running = await run(store, epochs, *[task(store) for _ in range(4)])
        await store.record([ending(running[2])])
        until = now(store) + HOUR
        asked = [lease(one, until) for one in reversed(running)]
        assert await store.accept(asked) == [True, False, True, True]

    async def test_after_another_node_has_taken_the_shard(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        await store.take(ALL, "n2")
        assert await store.accept([lease(running, now(store) + HOUR)]) == [True]

    async def test_a_thousand_go_together(self, store, epochs):
        running = await run(store, epochs, *[task(store) for _ in range(1_000)])
        until = now(store) + HOUR
        leases = [lease(one, until + n) for n, one in enumerate(running)]
        assert await store.accept(leases) == [True] * 1_000
        found = await store.get(ids_of(running))
        assert [one.lease_until_ms - until for one in found] == list(range(1_000))

    async def test_no_leases_no_answers(self, store):
        assert await store.accept([]) == []

    @pytest.mark.parametrize("event", [Event.FINISH, Event.RETRY, Event.FAIL])
    async def test_what_the_callee_says_ends_it(self, store, epochs, event):
        (running,) = await run(store, epochs, task(store))
        await store.accept([lease(running, now(store) + HOUR)])
        assert await store.record([ending(running, event)]) == [True]
        assert await store.accept([lease(running, now(store) + HOUR)]) == [False]

    async def test_it_is_lost_only_when_its_time_was_not_moved(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        until = now(store) + HOUR
        for ends in (running.lease_until_ms, until):
            await store.accept([lease(running, until + SECOND)])
            lost = ending(running, Event.RETRY, lease_until_ms=ends)
            assert await store.record([lost]) == [False]
        lost = ending(running, Event.RETRY, lease_until_ms=until + SECOND)
        assert await store.record([lost]) == [True]

    @pytest.mark.parametrize("event", EVENTS)
    async def test_the_log_says_where_its_message_is(self, store, epochs, event):
        given = task(store)
        (running,) = await run(store, epochs, given)
        until = now(store) + HOUR
        await store.accept([lease(running, until, MESSAGE)])
        await store.accept([lease(running, until + 1)])  # a heartbeat does not know it
        await store.record([ending(running, event)])
        [row] = await store.attempts(running.id)
        assert (row.delivered_to_body, row.delivered_to) == (MESSAGE, {"stream": "ü", "id": "7-0"})

    async def test_or_where_the_message_of_a_finished_task_is(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        await store.record([ending(running, delivered_to=MESSAGE)])
        assert await delivered_to(store, running) == [MESSAGE]

    async def test_the_log_says_where_the_message_is_of_an_attempt_that_ended_before(
        self, store, epochs
    ):
        tasks = [task(store), task(store)]
        ended, other = await run(store, epochs, *tasks)
        await store.record([ending(ended, Event.RETRY), ending(other, Event.RETRY)])
        await claim(store, tasks, epochs)
        answers = await store.accept([lease(ended, 0, MESSAGE), lease(other, 0)])
        assert answers == [False, False]
        assert await delivered_to(store, ended) == [MESSAGE]
        assert await delivered_to(store, other) == [None]

    async def test_each_attempt_has_its_own_message_or_none(self, store, epochs):
        given = task(store)
        (running,) = await run(store, epochs, given)
        await store.accept([lease(running, now(store) + HOUR, MESSAGE)])
        await store.record([ending(running, Event.RETRY, due_at_ms=given.due_at_ms)])
        for _ in range(2):
            (running,) = await claim(store, [given], epochs)
            await store.accept([lease(running, now(store) + HOUR)])
            await store.record([ending(running, Event.RETRY, due_at_ms=given.due_at_ms)])
        assert await delivered_to(store, running) == [MESSAGE, None, None]

    async def test_a_message_and_a_heartbeat_in_one_batch(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        until = now(store) + HOUR
        leases = [lease(running, until, MESSAGE), lease(running, until + 1)]
        assert await store.accept(leases) == [True, True]
        assert (await one(store, running.id)).lease_until_ms == until + 1
        await store.record([ending(running)])
        assert await delivered_to(store, running) == [MESSAGE]

    async def test_nobody_claims_cancels_or_moves_it(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        await store.accept([lease(running, now(store) - SECOND)])
        accepted = await one(store, running.id)
        assert await store.claim([wanted(accepted)], "n2", epochs) == Claims([], [])
        assert await store.cancel([running.id]) == [Verdict(running.id, False, State.RUNNING)]
        at = now(store)
        assert await store.due([Window("mail", 10, 10)], ALL, at, at + HOUR) == []
