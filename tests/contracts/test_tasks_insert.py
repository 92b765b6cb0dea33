"""The contract of a store: what an insert stores, keys, a second try, and epochs."""

import pytest

from contracts.stores import (
    ENDS,
    HOUR,
    ONE_DRIVER,
    RETURNS,
    SHARDS,
    all_of,
    claim,
    conflict,
    due_of,
    ended,
    ending,
    everything,
    ids_of,
    insert,
    later,
    now,
    one,
    repeated,
    request,
    run,
    stored,
    task,
    wanted,
)
from tickwheel.durable.store import Claims
from tickwheel.values.task import (
    Event,
    RepeatedRequest,
    Submission,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("watched"),
    pytest.mark.parametrize("place", ONE_DRIVER, indirect=True),
]


class TestInsert:
    async def test_a_task_is_stored_as_it_was_given(self, store):
        given = task(
            store,
            service="größe/✓ 'x' \"y\" %s {z} $1",
            key="schlüssel 'x' %s $1",
            shard=5,
            priority=-7,
            max_attempts=12,
            timeout_ms=1,
            deadline_at_ms=now(store) + HOUR,
        )
        assert await insert(store, given) == [given]
        assert await one(store, given.id) == given

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"null",
            '{"name": "Zoë ✓ 時計"}'.encode(),
            b' { "a" :1.0,  "b": [ ] }\n',
            bytes(range(256)),
            b"x" * (1 << 20),
        ],
        ids=["empty", "null", "non-ascii", "spaces", "every-byte", "1MB"],
    )
    async def test_a_body_is_kept_byte_for_byte(self, store, epochs, body):
        given = task(store, body=body)
        keyed = task(store, body=body, key="k")
        assert [answer.body for answer in await insert(store, given, keyed)] == [body, body]
        assert [found.body for found in await store.get([given.id, keyed.id])] == [body, body]
        assert [found.body for found in await claim(store, [given, keyed], epochs)] == [body, body]
        await store.record([ending(found) for found in await store.running(range(SHARDS))])
        assert [found.body for found in await store.get([given.id, keyed.id])] == [body, body]

    async def test_nothing_is_answered_with_nothing(self, store):
        assert await insert(store) == []
        assert await everything(store) == []

    async def test_a_thousand_go_together(self, store):
        given = [task(store, shard=n % SHARDS, body=b"%d" % n) for n in range(1_000)]
        assert await insert(store, *given) == given
        assert await store.get(ids_of(given)) == given

    async def test_a_thousand_with_keys_go_together(self, store):
        held = await stored(store, *[task(store, key=f"k{n}") for n in range(0, 1_000, 2)])
        given = [task(store, key=f"k{n}") for n in range(1_000)]
        answers = await insert(store, *given)
        assert answers[0::2] == [conflict(holder) for holder in held]
        assert answers[1::2] == given[1::2]

    async def test_the_answers_are_in_the_order_of_the_submissions(self, store, epochs):
        (holder,) = await stored(store, task(store, key="taken"))
        stale = task(store, shard=3)
        given = [
            task(store),
            task(store, key="taken"),
            stale,
            task(store, key="free"),
            later(store),
        ]
        answers = await insert(store, *given, epochs=epochs | {3: epochs[3] - 1})
        assert answers == [given[0], conflict(holder), None, given[3], given[4]]

    async def test_all_or_nothing_of_a_batch_is_stored(self, store):
        good, bad = task(store), task(store, due_at_ms=2**70)
        keyed = task(store, key="k")
        with pytest.raises((OverflowError, ValueError)):
            await insert(store, good, keyed, bad)
        assert await everything(store) == []
        assert await insert(store, good, keyed) == [good, keyed]

    async def test_the_largest_times_are_kept(self, store):
        last = 253_402_300_799_999
        given = task(store, due_at_ms=last, deadline_at_ms=last, timeout_ms=10**12)
        await stored(store, given)
        assert await one(store, given.id) == given


class TestKeys:
    async def test_reject_answers_with_the_holder(self, store):
        (holder,) = await stored(store, task(store, key="k"))
        second = task(store, key="k", body=b"2")
        assert await insert(store, second) == [conflict(holder)]
        assert await everything(store) == [holder]

    async def test_keep_answers_with_the_holder_and_leaves_it(self, store):
        (holder,) = await stored(store, task(store, key="k"))
        second = later(store, key="k", body=b"2")
        assert await insert(store, second, on_conflict="keep") == [conflict(holder)]
        assert await everything(store) == [holder]

    @pytest.mark.parametrize("on_conflict", ["reject", "replace", "keep"])
    async def test_a_free_key_is_taken_whatever_is_to_happen_otherwise(self, store, on_conflict):
        given = task(store, key="k")
        assert await insert(store, given, on_conflict=on_conflict) == [given]
        assert await everything(store) == [given]

    async def test_replace_changes_the_holder_in_place(self, store):
        (holder,) = await stored(store, task(store, key="k"))
        second = later(
            store,
            key="k",
            body=b"2",
            shard=4,
            priority=9,
            max_attempts=8,
            timeout_ms=7,
            deadline_at_ms=now(store) + 2 * HOUR,
        )
        (answer,) = await insert(store, second, on_conflict="replace")
        expected = second._replace(
            id=holder.id,
            shard=holder.shard,
            created_at_ms=holder.created_at_ms,
            updated_at_ms=answer.updated_at_ms,
        )
        assert answer == expected
        assert answer.updated_at_ms >= holder.updated_at_ms
        assert await everything(store) == [expected]
        assert await one(store, second.id) is None

    async def test_replace_leaves_the_count_of_attempts_and_forgets_failures(self, store, epochs):
        given = task(store, key="k")
        (running,) = await run(store, epochs, given)
        await store.record([ending(running, Event.RETRY, error="boom")])
        (answer,) = await insert(store, later(store, key="k"), on_conflict="replace")
        assert (answer.id, answer.attempt) == (given.id, 1)
        assert (answer.failures, answer.error) == (0, None)
        assert await one(store, given.id) == answer

    async def test_a_replaced_task_is_claimed_at_its_new_time_only(self, store, epochs):
        (holder,) = await stored(store, task(store, key="k"))
        (moved,) = await insert(store, later(store, key="k"), on_conflict="replace")
        claims = await store.claim([wanted(holder)], "n1", epochs)
        assert claims == Claims([], [due_of(moved)])

    @pytest.mark.parametrize("on_conflict", ["reject", "replace", "keep"])
    async def test_a_running_holder_keeps_its_key(self, store, epochs, on_conflict):
        (running,) = await run(store, epochs, task(store, key="k"))
        second = later(store, key="k", body=b"2")
        assert await insert(store, second, on_conflict=on_conflict) == [conflict(running)]
        assert await everything(store) == [running]

    @pytest.mark.parametrize("on_conflict", ["reject", "keep"])
    async def test_of_one_key_twice_in_a_batch_the_first_has_it(self, store, on_conflict):
        first, second = task(store, key="k"), task(store, key="k", body=b"2")
        answers = await insert(store, first, second, on_conflict=on_conflict)
        assert answers == [first, conflict(first)]
        assert await everything(store) == [first]

    async def test_of_one_key_twice_in_a_batch_the_second_replaces_the_first(self, store):
        tasks = [task(store, key="k", body=b"%d" % n) for n in range(3)]
        answers = await insert(store, *tasks, on_conflict="replace")
        assert ids_of(answers) == [tasks[0].id] * 3
        assert answers[2].body == b"2"
        assert await everything(store) == [answers[2]]

    async def test_each_of_a_batch_has_its_own_way_with_conflicts(self, store):
        first, second, third = (task(store, key="k", body=b"%d" % n) for n in range(3))
        answers = await store.insert(
            [Submission(first), Submission(second, "replace"), Submission(third, "keep")], {}
        )
        assert answers[0] == first
        assert (answers[1].id, answers[1].body) == (first.id, b"1")
        assert answers[2] == conflict(answers[1])
        assert await everything(store) == [answers[1]]

    async def test_services_have_their_own_keys(self, store):
        mail, sms = task(store, key="k"), task(store, key="k", service="sms")
        assert await insert(store, mail, sms) == [mail, sms]
        assert await insert(store, task(store, key="k")) == [conflict(mail)]
        assert await insert(store, task(store, key="k", service="sms")) == [conflict(sms)]

    async def test_an_empty_key_is_a_key(self, store):
        (holder,) = await stored(store, task(store, key=""))
        assert holder.key == ""
        assert await insert(store, task(store, key="")) == [conflict(holder)]

    async def test_tasks_without_a_key_do_not_meet(self, store):
        assert len(await stored(store, task(store), task(store))) == 2

    @pytest.mark.parametrize("event", ENDS)
    async def test_a_key_is_free_when_its_task_has_ended(self, store, epochs, event):
        await ended(store, epochs, task(store, key="k"), event=event)
        second = task(store, key="k")
        assert await insert(store, second) == [second]

    async def test_a_key_is_free_when_its_task_is_cancelled(self, store):
        (first,) = await stored(store, task(store, key="k"))
        await store.cancel([first.id])
        second = task(store, key="k")
        assert await insert(store, second) == [second]

    @pytest.mark.parametrize("event", RETURNS)
    async def test_a_key_is_kept_until_the_last_attempt(self, store, epochs, event):
        (holder,) = await ended(store, epochs, task(store, key="k"), event=event)
        assert await insert(store, task(store, key="k")) == [conflict(holder)]


class TestInsertAgain:
    async def test_a_live_task_is_answered_as_it_is_stored(self, store, epochs):
        given = task(store)
        (running,) = await run(store, epochs, given)
        assert await insert(store, given, again=True) == [running]
        assert await everything(store) == [running]

    @pytest.mark.parametrize("key", [None, "k"])
    async def test_a_moved_task_is_answered_as_it_is_stored(self, store, key):
        given = task(store, key=key)
        await stored(store, given)
        await store.reschedule([given.id], given.due_at_ms + HOUR)
        (answer,) = await insert(store, given, again=True)
        assert answer.due_at_ms == given.due_at_ms + HOUR
        assert await everything(store) == [answer]

    @pytest.mark.parametrize("key", [None, "k"])
    async def test_a_final_task_is_answered_as_it_is_stored(self, store, epochs, key):
        given = task(store, key=key)
        (final,) = await ended(store, epochs, given)
        assert await insert(store, given, again=True) == [final]
        assert await everything(store) == [final]

    async def test_a_final_task_leaves_its_key_to_the_next_holder(self, store, epochs):
        given = task(store, key="k")
        (final,) = await ended(store, epochs, given)
        (holder,) = await stored(store, task(store, key="k"))
        assert await insert(store, given, again=True) == [final]
        assert await everything(store) == all_of(final, holder)

    @pytest.mark.parametrize("on_conflict", ["reject", "replace", "keep"])
    async def test_a_holder_is_not_taken_by_itself(self, store, on_conflict):
        given = task(store, key="k")
        await stored(store, given)
        assert await insert(store, given, on_conflict=on_conflict, again=True) == [given]

    async def test_what_was_not_stored_is_stored_now(self, store, epochs):
        final, live, new, keyed = task(store), task(store), task(store), task(store, key="k")
        (final,) = await ended(store, epochs, final)
        await stored(store, live)
        answers = await insert(store, final, live, new, keyed, again=True)
        assert answers == [final, live, new, keyed]
        assert await everything(store) == all_of(final, live, new, keyed)

    async def test_a_key_that_another_task_has_is_still_taken(self, store):
        (holder,) = await stored(store, task(store, key="k"))
        assert await insert(store, task(store, key="k"), again=True) == [conflict(holder)]


class TestInsertEpochs:
    @pytest.mark.parametrize("key", [None, "k"])
    async def test_a_stale_epoch_stores_nothing(self, store, epochs, key):
        given = task(store, shard=2, key=key)
        await store.take([2], "n2")
        assert await insert(store, given, epochs=epochs) == [None]
        assert await one(store, given.id) is None

    async def test_an_epoch_to_come_is_not_the_shards_epoch_either(self, store, epochs):
        given = task(store, shard=2)
        assert await insert(store, given, epochs={2: epochs[2] + 1}) == [None]

    async def test_a_stale_epoch_stops_its_own_shard_only(self, store, epochs):
        stale, fine = task(store, shard=2), task(store, shard=3)
        await store.take([2], "n2")
        assert await insert(store, stale, fine, epochs=epochs) == [None, fine]
        assert await everything(store) == [fine]

    async def test_a_shard_without_an_epoch_is_not_asked(self, store, epochs):
        given = task(store, shard=2)
        assert await insert(store, given, epochs={3: epochs[3] + 5}) == [given]

    async def test_a_stale_epoch_replaces_nothing(self, store, epochs):
        (holder,) = await stored(store, task(store, key="k", shard=2))
        await store.take([2], "n2")
        second = later(store, key="k", shard=2)
        assert await insert(store, second, on_conflict="replace", epochs=epochs) == [None]
        assert await everything(store) == [holder]

    async def test_a_stale_epoch_stops_its_own_shard_only_among_thousands(self, store, epochs):
        await store.take([2, 5], "n2")
        given = [
            task(store, shard=n % SHARDS, key=f"k{n}" if n % 7 == 0 else None) for n in range(2_000)
        ]
        expected = [None if one.shard in (2, 5) else one for one in given]
        assert await insert(store, *given, epochs=epochs) == expected
        assert await store.get([one.id for one in given]) == expected
        newer = epochs | await store.take([2, 5], "n2")
        assert await insert(store, *given, epochs=newer, again=True) == given
        assert (await store.counts())["live"] == 2_000


class TestRequests:
    """Submissions under a name of the caller's own: an idempotency key."""

    async def test_the_first_of_a_name_is_stored(self, store):
        given = task(store)
        assert await store.insert([request(given)], {}) == [given]
        assert await everything(store) == [given]

    @pytest.mark.parametrize("key", [None, "k"])
    async def test_the_same_again_is_answered_with_its_task(self, store, key):
        given = task(store, key=key)
        await store.insert([request(given)], {})
        second = task(store, key=key)
        assert await store.insert([request(second)], {}) == [repeated(given)]
        assert await everything(store) == [given]

    async def test_its_task_is_answered_as_it_is_now(self, store, epochs):
        given = task(store)
        await store.insert([request(given)], {})
        (running,) = await claim(store, [given], epochs)
        assert await store.insert([request(task(store))], {}) == [repeated(running)]
        await store.record([ending(running)])
        final = await one(store, given.id)
        assert await store.insert([request(task(store))], {}) == [repeated(final)]

    async def test_its_task_may_be_gone(self, store, epochs):
        given = task(store)
        await store.insert([request(given)], {})
        await store.record([ending(*await claim(store, [given], epochs))])
        await store.prune(now(store) + HOUR, 10)
        assert await store.insert([request(task(store))], {}) == [RepeatedRequest(True, None)]
        assert await everything(store) == []

    async def test_another_request_under_the_name_is_told_so(self, store):
        (given,) = await store.insert([request(task(store))], {})
        answers = await store.insert([request(task(store), digest="other")], {})
        assert answers == [RepeatedRequest(False, None)]
        assert await everything(store) == [given]

    async def test_callers_have_their_own_names(self, store):
        given = [task(store) for _ in range(4)]
        names = [("c", "r1"), ("d", "r1"), ("c", "r2"), ("cr", "1")]
        asked = [
            request(one, key, caller=who) for one, (who, key) in zip(given, names, strict=True)
        ]
        assert await store.insert(asked, {}) == given

    async def test_of_one_name_twice_in_a_batch_the_second_repeats_the_first(self, store):
        first, second, third, other = (task(store) for _ in range(4))
        asked = [request(first), request(second), request(third, digest="other"), Submission(other)]
        answers = await store.insert(asked, {})
        assert answers == [first, repeated(first), RepeatedRequest(False, None), other]
        assert await everything(store) == all_of(first, other)

    async def test_the_answers_are_in_the_order_of_the_submissions(self, store, epochs):
        (holder,) = await stored(store, task(store, key="taken"))
        (known,) = await store.insert([request(task(store), "known")], {})
        given = [task(store) for _ in range(3)]
        keyed = task(store, key="free")
        answers = await store.insert(
            [
                Submission(given[0]),
                request(task(store), "known"),
                request(given[1], "b"),
                request(task(store, key="taken"), "c"),
                request(task(store, shard=3), "d"),
                request(keyed, "a"),
                Submission(given[2]),
            ],
            epochs | {3: epochs[3] - 1},
        )
        expected = [
            given[0],
            repeated(known),
            given[1],
            conflict(holder),
            None,
            keyed,
            given[2],
        ]
        assert answers == expected

    async def test_a_thousand_go_together(self, store):
        given = [task(store, key=f"k{n}" if n % 3 else None) for n in range(1_000)]
        asked = [request(one, f"r{n}") for n, one in enumerate(given)]
        assert await store.insert(asked, {}) == given
        again = [request(task(store), f"r{n}") for n in range(1_000)]
        assert await store.insert(again, {}) == [repeated(one) for one in given]

    async def test_one_whose_key_was_taken_was_not_made(self, store):
        (holder,) = await stored(store, task(store, key="k"))
        assert await store.insert([request(task(store, key="k"))], {}) == [conflict(holder)]
        await store.cancel([holder.id])
        second = task(store, key="k")
        assert await store.insert([request(second)], {}) == [second]

    async def test_one_that_cannot_replace_was_not_made(self, store, epochs):
        (running,) = await run(store, epochs, task(store, key="k"))
        asked = request(task(store, key="k"), on_conflict="replace")
        assert await store.insert([asked], {}) == [conflict(running)]
        await store.record([ending(running)])
        second = task(store, key="k")
        assert await store.insert([request(second, on_conflict="replace")], {}) == [second]

    async def test_one_whose_shard_was_lost_was_not_made(self, store, epochs):
        asked = request(task(store, shard=3))
        assert await store.insert([asked], {3: epochs[3] - 1}) == [None]
        second = task(store, shard=4)
        assert await store.insert([request(second)], epochs) == [second]

    async def test_in_a_batch_one_that_was_refused_does_not_count(self, store):
        (holder,) = await stored(store, task(store, key="k"))
        second = task(store, key="free")
        asked = [request(task(store, key="k")), request(second), request(task(store))]
        assert await store.insert(asked, {}) == [
            conflict(holder),
            second,
            repeated(second),
        ]

    async def test_one_that_kept_the_holder_is_known_by_that(self, store):
        (holder,) = await stored(store, task(store, key="k"))
        asked = request(task(store, key="k"), on_conflict="keep")
        assert await store.insert([asked], {}) == [conflict(holder)]
        await store.cancel([holder.id])
        cancelled = await one(store, holder.id)
        asked = request(task(store, key="k"), on_conflict="keep")
        assert await store.insert([asked], {}) == [repeated(cancelled)]

    async def test_one_that_replaced_the_holder_is_known_by_that(self, store):
        (holder,) = await stored(store, task(store, key="k"))
        asked = request(later(store, key="k", body=b"2"), on_conflict="replace")
        (replaced,) = await store.insert([asked], {})
        assert (replaced.id, replaced.body) == (holder.id, b"2")
        await insert(store, later(store, key="k", body=b"3"), on_conflict="replace")
        asked = request(later(store, key="k", body=b"2"), on_conflict="replace")
        (answer,) = await store.insert([asked], {})
        assert (answer.same, answer.task.id) == (True, holder.id)

    async def test_all_or_nothing_of_a_batch_is_stored(self, store):
        bad = task(store, due_at_ms=2**70)
        with pytest.raises((OverflowError, ValueError)):
            await store.insert([request(task(store)), Submission(bad)], {})
        second = task(store)
        assert await store.insert([request(second)], {}) == [second]

    async def test_a_request_without_a_name_meets_none(self, store):
        given = [task(store), task(store)]
        await store.insert([request(given[0])], {})
        assert await insert(store, given[1]) == [given[1]]

    @pytest.mark.parametrize("key", [None, "k"])
    async def test_one_whose_answer_was_lost_is_answered_as_it_is_stored(self, store, epochs, key):
        given = request(task(store, key=key))
        await store.insert([given], {})
        assert await store.insert([given], {}, again=True) == [given.task]
        (running,) = await claim(store, [given.task], epochs)
        assert await store.insert([given], {}, again=True) == [running]
        await store.record([ending(running)])
        assert await store.insert([given], {}, again=True) == [await one(store, running.id)]

    async def test_one_that_was_not_stored_yet_is_stored_the_second_time(self, store):
        there, new = request(task(store), "r1"), request(task(store), "r2")
        await store.insert([there], {})
        answers = await store.insert([there, new, request(task(store), "r1")], {}, again=True)
        assert answers == [there.task, new.task, repeated(there.task)]
        assert await store.insert([request(task(store), "r2")], {}) == [repeated(new.task)]
