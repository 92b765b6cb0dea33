"""The contract of tasks, on every store: when they are due, and what changes one before its call.

The neighbours `test_tasks_*.py` cover inserts, attempts, lists, sizes and races, and
`test_store_stateful.py` long random lives against a model. No test waits: by the store's own clock
tasks are overdue by a second, or due in an hour.
"""

import itertools

import pytest

from contracts.stores import (
    ALL,
    HOUR,
    NOBODY,
    ONE_DRIVER,
    SECOND,
    SHARDS,
    all_of,
    claim,
    due_of,
    ended,
    ending,
    everything,
    ids_of,
    insert,
    later,
    now,
    one,
    run,
    stored,
    task,
    various,
    wanted,
)
from tickwheel.durable.store import LEASE_MS, Claims, Window
from tickwheel.values.task import (
    Event,
    State,
    Verdict,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("watched"),
    pytest.mark.parametrize("place", ONE_DRIVER, indirect=True),
]


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
        assert again.key == "k"  # no other task has it any more

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
