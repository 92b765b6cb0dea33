"""The contract of a store, run on every one of them: SQLite by both drivers, and PostgreSQL.

This file is the life of a task, from due to its end, and the store's own. Its neighbours: `insert`,
lists and the backlog, schedules, what several do at once, and long random lives against a model.
No test waits for a time to come: tasks are overdue by a second, or due in an hour, by the store's
own clock.
"""

import asyncio
import itertools
import time

import pytest

from contracts.stores import (
    ALL,
    AUDIT,
    ENDS,
    EVENTS,
    EVERYTHING,
    HOUR,
    NOBODY,
    PATIENCE,
    RETURNS,
    SECOND,
    SHARDS,
    all_of,
    changed,
    claim,
    due_of,
    ended,
    ending,
    everything,
    fire,
    firing,
    ids_of,
    insert,
    later,
    lease,
    now,
    one,
    put,
    renewed,
    replay_of,
    run,
    schedule,
    stored,
    task,
    various,
    walk,
    wanted,
)
from tickwheel.durable.store import LEASE_MS, Claims, Window
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import (
    FINAL,
    TRANSITIONS,
    Attempt,
    Event,
    Filter,
    State,
    Taken,
    Verdict,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class TestDue:
    async def test_overdue_up_to_now_and_later_up_to_the_horizon(self, store):
        at = now(store)
        dues = [at - 1, at, at + 1, at + 999, at + 1_000, at + 1_001]
        tasks = await stored(store, *[task(store, due_at_ms=due) for due in dues])

        async def read(overdue, later):
            return await store.due([Window("mail", overdue, later)], ALL, at, at + 1_000)

        assert await read(100, 100) == [due_of(one) for one in tasks[:5]]
        assert await read(100, 0) == [due_of(one) for one in tasks[:2]]
        assert await read(0, 100) == [due_of(one) for one in tasks[2:5]]

    async def test_a_limit_leaves_the_latest_out(self, store):
        at = now(store)
        dues = [at - 30, at - 20, at - 10, at + 10, at + 20, at + 30]
        tasks = await stored(store, *[task(store, due_at_ms=due) for due in reversed(dues)])
        tasks.reverse()
        found = await store.due([Window("mail", 1, 2)], ALL, at, at + HOUR)
        assert found == [due_of(tasks[0]), due_of(tasks[3]), due_of(tasks[4])]

    async def test_a_task_of_1970_is_overdue(self, store):
        (old,) = await stored(store, task(store, due_at_ms=0))
        at = now(store)
        assert await store.due([Window("mail", 1, 0)], ALL, at, at) == [due_of(old)]

    async def test_each_services_come_by_due_time_then_id(self, store):
        at = now(store)
        tasks = [
            task(store, service=service, due_at_ms=at + moved, shard=moved % SHARDS)
            for service, moved in itertools.product(["b", "a"], [7, -7, 3, -3, -7, 3])
        ]
        await stored(store, *tasks)
        windows = [Window("a", 10, 10), Window("b", 10, 10)]
        found = await store.due(windows, ALL, at, at + 100)
        for service in ("a", "b"):
            expected = sorted(
                (due_of(one) for one in tasks if one.service == service),
                key=lambda due: (due.due_at_ms, due.id),
            )
            assert [due for due in found if due.service == service] == expected

    async def test_only_the_shards_asked_for(self, store):
        tasks = await stored(store, *[task(store, shard=shard) for shard in ALL])
        at = now(store)
        for shards in ([], [3], [1, 6], [7, 0, 2], ALL):
            found = await store.due([Window("mail", 100, 100)], shards, at, at + HOUR)
            assert sorted(found) == sorted(due_of(tasks[shard]) for shard in shards)

    async def test_a_limit_counts_tasks_of_the_shards_only(self, store):
        await stored(store, *[task(store, late=HOUR, shard=1) for _ in range(20)])
        (wanted_one,) = await stored(store, task(store, shard=2))
        at = now(store)
        assert await store.due([Window("mail", 1, 0)], [2], at, at) == [due_of(wanted_one)]

    async def test_only_what_is_unclaimed(self, store, epochs):
        cancelled, finished, running, retried, left = (task(store) for _ in range(5))
        await stored(store, cancelled, left)
        await store.cancel([cancelled.id])
        await ended(store, epochs, finished)
        await run(store, epochs, running)
        moved = now(store) - 5
        await ended(store, epochs, retried, event=Event.RETRY, due_at_ms=moved)
        at = now(store)
        found = await store.due([Window("mail", 10, 10)], ALL, at, at + HOUR)
        assert sorted(found) == sorted([due_of(left), due_of(retried)._replace(due_at_ms=moved)])

    async def test_many_services_each_with_its_own_window(self, store):
        names = [f"s{n:03}" for n in range(250)]
        await stored(store, *[task(store, service=name) for name in names for _ in range(3)])
        at = now(store)
        windows = [Window(name, n % 4, 0) for n, name in enumerate(names)]
        found = await store.due(windows, ALL, at, at + HOUR)
        counts = [sum(due.service == name for due in found) for name in names]
        assert counts == [n % 4 for n in range(250)]

    async def test_the_services_that_have_tasks(self, store, epochs):
        await stored(store, task(store, service="mail"), task(store, service="acme/mail"))
        at = now(store)
        await stored(store, later(store, service="bill"), later(store, service="bill", shard=1))
        await run(store, epochs, task(store, service="runs"))
        await ended(store, epochs, task(store, service="over"))
        assert await store.services() == ["acme/mail", "bill", "mail", "runs"]
        assert {"acme/mail", "mail"} <= {*await store.services(at)} <= {"acme/mail", "mail", "runs"}
        assert "bill" in await store.services(at + 2 * HOUR)

    async def test_a_window_may_begin_later(self, store):
        at = now(store)
        old, new, future = await stored(
            store, *[task(store, due_at_ms=at - ago) for ago in (HOUR, SECOND, -SECOND)]
        )
        for since, expected in (
            (-1, [old, new, future]),
            (at - HOUR - 1, [old, new, future]),
            (at - HOUR, [new, future]),
            (at - SECOND, [future]),
        ):
            found = await store.due([Window("mail", 9, 9, since)], ALL, at, at + HOUR)
            assert sorted(due.id for due in found) == sorted(ids_of(expected))

    async def test_the_services_that_have_tasks_due_in_a_time(self, store):
        at = now(store)
        for name, ago in (("old", HOUR), ("new", SECOND), ("next", -SECOND), ("later", -HOUR)):
            await stored(store, task(store, service=name, due_at_ms=at - ago))
        assert sorted(await store.services(at, at - 2 * SECOND)) == ["new"]
        assert sorted(await store.services(at + SECOND, at - HOUR - 1)) == ["new", "next", "old"]
        assert sorted(await store.services(at + SECOND, at - HOUR)) == ["new", "next"]

    async def test_a_service_with_one_due_behind_very_many_is_named(self, store):
        await stored(store, *[later(store, shard=n % SHARDS) for n in range(300)])
        await stored(store, task(store, shard=SHARDS - 1))
        assert await store.services(now(store)) == ["mail"]

    async def test_no_service_no_tasks(self, store):
        await stored(store, task(store))
        at = now(store)
        assert await store.due([], ALL, at, at + HOUR) == []
        assert await store.due([Window("sms", 10, 10)], ALL, at, at + HOUR) == []

    async def test_what_it_holds_is_enough_to_claim(self, store, epochs):
        (given,) = await stored(store, task(store, priority=3, shard=6))
        at = now(store)
        (found,) = await store.due([Window("mail", 10, 0)], ALL, at, at)
        assert found == (given.id, given.due_at_ms, "mail", 3, 6)
        assert ids_of(await claim(store, [given], epochs)) == [given.id]


class TestClaim:
    async def test_a_claimed_task_runs_here(self, store, epochs):
        given = task(store, shard=3, body=b"payload", priority=2)
        await stored(store, given)
        (running,) = await claim(store, [given], epochs, "here")
        assert running.state is State.RUNNING
        assert (running.attempt, running.node, running.epoch) == (1, "here", epochs[3])
        assert running.started_at_ms >= given.due_at_ms
        assert running.updated_at_ms == running.started_at_ms
        assert (
            running._replace(
                state=State.DELAY,
                attempt=0,
                node=None,
                epoch=0,
                started_at_ms=None,
                lease_until_ms=None,
                updated_at_ms=given.updated_at_ms,
            )
            == given
        )
        assert await one(store, given.id) == running

    @pytest.mark.parametrize("timeout_ms", [None, 7_000, 24 * HOUR])
    async def test_its_lease_is_as_long_whatever_its_timeout_is(self, store, epochs, timeout_ms):
        (running,) = await run(store, epochs, task(store, timeout_ms=timeout_ms))
        assert running.lease_until_ms == running.started_at_ms + LEASE_MS
        assert LEASE_MS == 30_000

    async def test_its_lease_may_be_of_another_length(self, store, epochs):
        (given,) = await stored(store, task(store))
        (running,) = (await store.claim([wanted(given)], "n1", epochs, 7_000)).tasks
        assert running.lease_until_ms == running.started_at_ms + 7_000

    async def test_each_claim_is_an_attempt(self, store, epochs):
        given = task(store)
        await stored(store, given)
        for number in range(1, 6):
            (running,) = await claim(store, [given], epochs)
            assert running.attempt == number
            await store.record([ending(running, Event.SNOOZE)])

    async def test_what_is_not_due_yet_is_later(self, store, epochs):
        (given,) = await stored(store, later(store))
        assert await store.claim([wanted(given)], "n1", epochs) == Claims([], [due_of(given)])
        assert await one(store, given.id) == given

    @pytest.mark.parametrize("moved", [-HOUR, -1, 1, HOUR])
    async def test_what_was_rescheduled_is_later_with_its_new_time(self, store, epochs, moved):
        (given,) = await stored(store, task(store))
        await store.reschedule([given.id], given.due_at_ms + moved)
        claims = await store.claim([wanted(given)], "n1", epochs)
        assert claims == Claims([], [due_of(given)._replace(due_at_ms=given.due_at_ms + moved)])
        assert (await one(store, given.id)).state is State.DELAY

    async def test_what_is_gone_or_running_is_neither(self, store, epochs):
        cancelled, finished, running, unknown = (task(store) for _ in range(4))
        await stored(store, cancelled)
        await store.cancel([cancelled.id])
        await ended(store, epochs, finished)
        (running,) = await run(store, epochs, running)
        asked = [wanted(one) for one in (cancelled, finished, running, unknown)]
        assert await store.claim(asked, "n2", epochs) == Claims([], [])
        assert await one(store, running.id) == running

    @pytest.mark.parametrize("moved", [-1, 1])
    async def test_another_epoch_claims_nothing(self, store, epochs, moved):
        due, not_yet = await stored(store, task(store, shard=4), later(store, shard=4))
        wrong = epochs | {4: epochs[4] + moved}
        assert await store.claim([wanted(due), wanted(not_yet)], "n1", wrong) == Claims([], [])
        assert await everything(store) == all_of(due, not_yet)

    async def test_epochs_rise_above_what_is_asked_for(self, store, epochs):
        assert await store.take([1, 2], "n2", above=50) == {1: 51, 2: 51}
        assert await store.take([1, 2, 3], "n2", above=20) == {1: 52, 2: 52, 3: 21}

    async def test_a_shard_that_was_taken_is_claimed_by_its_new_owner_only(self, store, epochs):
        given = await stored(store, *[task(store, shard=shard) for shard in (0, 1)])
        newer = await store.take([1], "n2")
        first = await store.claim([wanted(one) for one in given], "n1", epochs)
        second = await store.claim([wanted(one) for one in given], "n2", newer)
        assert (ids_of(first.tasks), ids_of(second.tasks)) == ([given[0].id], [given[1].id])

    async def test_a_shard_without_an_epoch_is_not_claimed_from(self, store, epochs):
        (given,) = await stored(store, task(store, shard=4))
        del epochs[4]
        assert await store.claim([wanted(given)], "n1", epochs) == Claims([], [])
        assert await store.claim([wanted(given)], "n1", {}) == Claims([], [])

    async def test_an_epoch_of_an_unknown_shard_does_no_harm(self, store, epochs):
        (given,) = await stored(store, task(store))
        epochs |= {SHARDS: 1, 4_095: 7, -1: 0}
        claims = await store.claim([wanted(given)], "n1", epochs)
        assert ids_of(claims.tasks) == [given.id]

    async def test_of_a_task_named_twice_there_is_one_claim(self, store, epochs):
        (given,) = await stored(store, task(store))
        claims = await store.claim([wanted(given), wanted(given)], "n1", epochs)
        assert [(one.id, one.attempt) for one in claims.tasks] == [(given.id, 1)]
        assert claims.later == []

    async def test_a_thousand_are_claimed_at_once(self, store, epochs):
        due = [task(store, shard=n % SHARDS) for n in range(900)]
        not_yet = [later(store) for _ in range(100)]
        await stored(store, *due, *not_yet)
        asked = [wanted(one) for one in (*not_yet, *reversed(due))]
        claims = await store.claim(asked, "n1", epochs)
        assert sorted(ids_of(claims.tasks)) == sorted(ids_of(due))
        assert sorted(claims.later) == sorted(due_of(one) for one in not_yet)

    async def test_of_nothing_there_is_nothing(self, store, epochs):
        assert await store.claim([], "n1", epochs) == Claims([], [])


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
        assert taken == Taken(await one(store, running.id))
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

    async def test_nobody_claims_cancels_or_moves_it(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        await store.accept([lease(running, now(store) - SECOND)])
        accepted = await one(store, running.id)
        assert await store.claim([wanted(accepted)], "n2", epochs) == Claims([], [])
        assert await store.cancel([running.id]) == [Verdict(running.id, False, State.RUNNING)]
        at = now(store)
        assert await store.due([Window("mail", 10, 10)], ALL, at, at + HOUR) == []


class TestCancel:
    async def test_what_is_unclaimed_is_cancelled(self, store):
        overdue = task(store, key="k", shard=3, body=b"\x00\xff")
        not_yet = later(store)
        await stored(store, overdue, not_yet)
        assert await store.cancel([not_yet.id, overdue.id]) == [
            Verdict(not_yet.id, True, State.CANCELLED),
            Verdict(overdue.id, True, State.CANCELLED),
        ]
        for given in (overdue, not_yet):
            final = await one(store, given.id)
            assert final == given._replace(state=State.CANCELLED, updated_at_ms=final.updated_at_ms)
            assert final.updated_at_ms >= given.updated_at_ms
            assert await store.attempts(given.id) == []
        assert await everything(store, final=False) == []

    async def test_who_lost_hears_the_state(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        (finished,) = await ended(store, epochs, task(store))
        (failed,) = await ended(store, epochs, task(store), event=Event.FAIL)
        (cancelled,) = await stored(store, task(store))
        await store.cancel([cancelled.id])
        before = await everything(store)
        ids = [running.id, finished.id, NOBODY, failed.id, cancelled.id]
        assert await store.cancel(ids) == [
            Verdict(running.id, False, State.RUNNING),
            Verdict(finished.id, False, State.FINISHED),
            None,
            Verdict(failed.id, False, State.FAILED),
            Verdict(cancelled.id, False, State.CANCELLED),
        ]
        assert await everything(store) == before

    async def test_a_task_between_attempts_keeps_its_log(self, store, epochs):
        given = task(store)
        (waiting,) = await ended(store, epochs, given, event=Event.RETRY, error="boom")
        assert await store.cancel([given.id]) == [Verdict(given.id, True, State.CANCELLED)]
        final = await one(store, given.id)
        assert (final.attempt, final.failures, final.error) == (1, 1, "boom")
        assert len(await store.attempts(given.id)) == 1
        assert waiting.state is State.DELAY

    async def test_a_cancelled_task_never_runs(self, store, epochs):
        (given,) = await stored(store, task(store))
        await store.cancel([given.id])
        at = now(store)
        assert await store.due([Window("mail", 10, 10)], ALL, at, at + HOUR) == []
        assert await store.claim([wanted(given)], "n1", epochs) == Claims([], [])
        verdicts = await store.reschedule([given.id], at)
        assert verdicts == [Verdict(given.id, False, State.CANCELLED)]

    async def test_a_thousand_are_cancelled_together(self, store):
        given = await stored(store, *[task(store) for _ in range(1_000)])
        ids = ids_of(given)[::-1]
        assert await store.cancel(ids) == [Verdict(one, True, State.CANCELLED) for one in ids]

    async def test_no_ids_no_verdicts(self, store):
        assert await store.cancel([]) == []


class TestExpire:
    async def test_what_waits_past_its_deadline_is_failed(self, store):
        at = now(store)
        overdue = task(store, deadline_at_ms=at - 1, key="k")
        not_yet_due = later(store, deadline_at_ms=at - 1)
        await stored(store, overdue, not_yet_due)
        expired = await store.expire(ALL, 10)
        assert sorted(expired) == sorted(map(due_of, (overdue, not_yet_due)))
        assert await store.expire(ALL, 10) == []
        for given in (overdue, not_yet_due):
            final = await one(store, given.id)
            assert final.error == "expired: its deadline has passed"
            assert final.updated_at_ms >= at
            same = {"state": State.FAILED, "error": final.error}
            assert final == given._replace(**same, updated_at_ms=final.updated_at_ms)
            assert await store.attempts(given.id) == []
        (again,) = await insert(store, task(store, key="k"))
        assert again.key == "k"  # nobody has it any more

    async def test_nothing_else_is(self, store, epochs):
        at = now(store)
        running = await run(store, epochs, task(store, deadline_at_ms=at - 1))
        await stored(store, task(store), task(store, deadline_at_ms=at + HOUR))
        await stored(store, later(store, deadline_at_ms=at + HOUR))
        assert await store.expire(ALL, 10) == []
        assert len(await everything(store, final=False)) == 3 + len(running)

    async def test_only_the_shards_asked_for(self, store):
        at = now(store)
        tasks = [task(store, shard=shard, deadline_at_ms=at - 1) for shard in ALL]
        await stored(store, *tasks)
        assert [due.id for due in await store.expire([1], 10)] == [tasks[1].id]
        assert len(await everything(store, final=True)) == 1

    async def test_a_limit_leaves_the_latest_deadlines_for_the_next_time(self, store):
        at = now(store)
        tasks = [task(store, deadline_at_ms=at - 1 - age) for age in range(5)]
        await stored(store, *tasks)
        for expected in (tasks[3:], tasks[1:3], tasks[:1], []):
            found = await store.expire(ALL, 2)
            assert sorted(due.id for due in found) == sorted(ids_of(expected))

    async def test_one_that_was_tried_before_keeps_its_log_and_its_error(self, store, epochs):
        given = task(store, deadline_at_ms=now(store) - 1)
        await ended(store, epochs, given, event=Event.RETRY, error="refused", failures=1)
        assert len(await store.expire(ALL, 10)) == 1
        final = await one(store, given.id)
        assert final.error == "expired: its deadline has passed\nrefused"
        assert (final.state, final.attempt, final.failures) == (State.FAILED, 1, 1)
        assert [row.event for row in await store.attempts(given.id)] == [Event.RETRY]

    async def test_no_shards_no_tasks(self, store):
        await stored(store, task(store, deadline_at_ms=now(store) - 1))
        assert await store.expire([], 10) == []


class TestReschedule:
    async def test_what_is_unclaimed_is_due_at_another_time(self, store):
        overdue, not_yet = await stored(store, task(store, key="k"), later(store))
        moved = now(store) + 2 * HOUR
        assert await store.reschedule([not_yet.id, overdue.id], moved) == [
            Verdict(not_yet.id, True, State.DELAY),
            Verdict(overdue.id, True, State.DELAY),
        ]
        for given in (overdue, not_yet):
            after = await one(store, given.id)
            assert after == given._replace(due_at_ms=moved, updated_at_ms=after.updated_at_ms)
            assert after.updated_at_ms >= given.updated_at_ms

    async def test_it_is_loaded_and_claimed_at_that_time(self, store, epochs):
        (given,) = await stored(store, later(store))
        moved = now(store) - SECOND
        await store.reschedule([given.id], moved)
        at = now(store)
        (found,) = await store.due([Window("mail", 10, 10)], ALL, at, at + 9 * HOUR)
        assert found == due_of(given)._replace(due_at_ms=moved)
        await claim(store, [given._replace(due_at_ms=moved)], epochs)

    async def test_who_lost_hears_the_state(self, store, epochs):
        tasks = await various(store, epochs)
        names = ["running", "finished", "failed", "cancelled"]
        ids = [NOBODY, *[tasks[name].id for name in names]]
        assert await store.reschedule(ids, now(store) + HOUR) == [
            None,
            *[Verdict(tasks[name].id, False, State(name)) for name in names],
        ]
        assert await store.get(ids) == [None, *[tasks[name] for name in names]]

    async def test_the_same_time_wins_as_well(self, store):
        (given,) = await stored(store, later(store))
        verdicts = await store.reschedule([given.id], given.due_at_ms)
        assert verdicts == [Verdict(given.id, True, State.DELAY)]

    async def test_no_ids_no_verdicts(self, store):
        assert await store.reschedule([], 0) == []


class TestTake:
    async def test_the_epochs_rise_shard_by_shard(self, store):
        first = await store.take(ALL, "n1")
        assert sorted(first) == list(ALL)
        second = await store.take([2, 5], "n2")
        assert second == {2: first[2] + 1, 5: first[5] + 1}
        third = await store.take(ALL, "n1")
        assert third == {shard: second.get(shard, first[shard]) + 1 for shard in ALL}

    async def test_an_owner_that_takes_its_shards_again_gets_newer_epochs(self, store):
        first = await store.take([1], "n1")
        assert await store.take([1], "n1") == {1: first[1] + 1}

    async def test_no_shards_no_epochs(self, store):
        assert await store.take([], "n1") == {}

    async def test_an_owner_that_gave_its_shards_up_keeps_its_leases(self, store, epochs):
        running = await run(store, epochs, *[task(store, shard=n) for n in (1, 2)])
        await store.give_up({1: epochs[1], 2: epochs[2]})
        await store.take(ALL, "n2", owner_is_dead=True)
        await store.take(ALL, "n3", owner_is_dead=True)
        assert await store.get(ids_of(running)) == running
        assert await store.renew([one.attempt_key for one in running]) == [True, True]

    async def test_a_shard_is_given_up_by_its_last_owner_only(self, store, epochs):
        newer = await store.take([1], "n2")
        await store.give_up({1: epochs[1], 2: epochs[2]})
        owners = {row.shard: row.owner for row in await store.registry.shards()}
        assert (owners[1], owners[2]) == ("n2", None)
        (given,) = await stored(store, task(store, shard=1))
        assert len((await store.claim([wanted(given)], "n2", newer)).tasks) == 1

    async def test_a_dead_owner_leaves_what_was_accepted_to_its_callee(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        await store.accept([lease(running, now(store) + HOUR)])
        before = await one(store, running.id)
        await store.take(ALL, "n2", owner_is_dead=True)
        assert await one(store, running.id) == before


class TestTelling:
    async def test_one_store_hears_another(self, store, opened):
        other = await opened()
        heard = asyncio.Event()
        store.listen(heard.set)
        async with asyncio.timeout(PATIENCE):
            while not heard.is_set():  # listening may take a moment to begin
                await other.tell([0])
                try:
                    await asyncio.wait_for(heard.wait(), 0.1)
                except TimeoutError:
                    continue

    async def test_telling_nobody_is_no_error(self, store):
        await store.tell([0, 1])
        await store.tell([])
        await store.tell_hold("mail", 5)


CALLS = {
    "insert": lambda store: insert(store, task(store)),
    "due": lambda store: store.due([Window("mail", 1, 1)], ALL, 0, 1),
    "claim": lambda store: store.claim([wanted(task(store))], "n1", {}),
    "record": lambda store: store.record([ending(task(store), at_ms=0)]),
    "renew": lambda store: store.renew([task(store).attempt_key]),
    "accept": lambda store: store.accept([lease(task(store), 0)]),
    "running": lambda store: store.running(ALL),
    "cancel": lambda store: store.cancel([NOBODY]),
    "cancel_where": lambda store: changed(store.cancel_where(Filter(service="mail"), 1)),
    "reschedule": lambda store: store.reschedule([NOBODY], 0),
    "reschedule_where": lambda store: changed(store.reschedule_where(Filter(service="mail"), 0, 1)),
    "expire": lambda store: store.expire(ALL, 1),
    "get": lambda store: store.get([NOBODY]),
    "find": lambda store: store.find(EVERYTHING, final=None, cursor=None, limit=1),
    "attempts": lambda store: store.attempts(NOBODY),
    "replay": lambda store: store.replay([replay_of(store, task(store))], force=False),
    "prune": lambda store: store.prune(0, 1),
    "take": lambda store: store.take([0], "n1"),
    "give_up": lambda store: store.give_up({0: 1}),
    "running_by_id": lambda store: store.running_by_id([NOBODY]),
    "counts": lambda store: store.counts(),
    "schedules": lambda store: store.schedules(),
    "put_schedule": lambda store: store.put_schedule(schedule(store), AUDIT),
    "delete_schedule": lambda store: store.delete_schedule("nightly", AUDIT),
    "fire": lambda store: fire(store, [firing(store, schedule(store), 0)]),
}


class TestOpenAndClose:
    async def test_a_closed_store_says_so(self, place):
        store = place.store()
        await store.open()
        await store.close()
        for name, call in CALLS.items():
            with pytest.raises((RuntimeError, StoreUnavailable), match=r"not open|closed"):
                assert not await call(store), name

    async def test_closing_it_twice_is_no_error(self, place):
        store = place.store()
        await store.open()
        await store.close()
        await store.close()

    async def test_one_that_was_never_opened_can_be_closed(self, place):
        await place.store().close()

    async def test_what_was_under_way_ends_first(self, place):
        store = place.store()
        await store.open()
        given = [task(store) for _ in range(100)]
        inserting = [asyncio.ensure_future(insert(store, one)) for one in given]
        await asyncio.sleep(0)
        await store.close()
        answers = await asyncio.gather(*inserting)
        assert answers == [[one] for one in given]

    async def test_another_store_finds_everything_as_it_was(self, place):
        first = place.store()
        await first.open()
        epochs = await first.take(ALL, "n1")
        tasks = await various(first, epochs)
        logs = {name: await first.attempts(one.id) for name, one in tasks.items()}
        nightly = schedule(first)
        await put(first, nightly)
        counts = await first.counts()
        await first.close()

        second = place.store()
        await second.open()
        try:
            found = await second.get([one.id for one in tasks.values()])
            assert found == list(tasks.values())
            for name, one in tasks.items():
                assert await second.attempts(one.id) == logs[name]
            assert await second.schedules() == [nightly]
            assert await second.counts() == counts
            assert await second.record([ending(tasks["running"])]) == [True]
            newer = await second.take(ALL, "n2")
            assert newer == {shard: epoch + 1 for shard, epoch in epochs.items()}
        finally:
            await second.close()

    async def test_a_store_can_be_opened_again(self, place):
        store = place.store()
        await store.open()
        (given,) = await stored(store, task(store))
        await store.close()
        await store.open()
        assert await everything(store) == [given]
        await store.close()

    async def test_the_number_of_shards_is_settled_when_it_is_made(self, place):
        for shards in (SHARDS, 64, 2):
            store = place.store(shards=shards)
            await store.open()
            assert store.shards == SHARDS
            assert sorted(await store.take(range(100), "n1")) == list(ALL)
            await store.close()

    async def test_the_stores_time_is_about_the_hosts(self, store):
        """Both run on this machine; by which rules the time is kept is each store's business."""
        assert abs(store.now_ms() - time.time() * 1_000) < PATIENCE * SECOND

    async def test_the_latest_that_its_time_can_be_is_no_earlier(self, store):
        for _ in range(10):
            earliest = store.now_ms()
            assert earliest <= store.latest_ms() < earliest + PATIENCE * SECOND
