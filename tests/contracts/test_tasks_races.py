"""The contract of a store: what two nodes on one database do at the same moment.

Each race is run many times over, and whoever wins it: exactly one does. No outcome here depends on
who is faster.
"""

import asyncio
import random

import pytest

from contracts.stores import (
    ALL,
    AUDIT,
    HOUR,
    SECOND,
    SHARDS,
    all_of,
    answered,
    change,
    changed,
    claim,
    conflict,
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
    repeated,
    replay_of,
    request,
    run,
    schedule,
    stored,
    summary,
    task,
    wanted,
)
from tickwheel.durable.store import Claims
from tickwheel.errors import Locked
from tickwheel.values.task import Event, Filter, KeyConflict, RepeatedRequest, State, Task, Verdict

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

ROUNDS = 20


def missed(claims, given, found):
    """A claim came too late, or while the other was at it."""
    assert claims in (Claims([], [due_of(found)]), Claims([], [], (due_of(given),)))


def shuffled(items):
    """The items in another order: whoever locks rows as they come would deadlock."""
    return random.sample(items, len(items))


async def test_many_claims_of_the_same_tasks_give_each_to_one(store, opened, epochs):
    other = await opened()
    tasks = await stored(store, *[task(store, shard=n % SHARDS) for n in range(200)])
    claims = await asyncio.gather(
        *[
            node.claim([wanted(one) for one in shuffled(tasks)], f"n{number}", epochs)
            for number, node in enumerate([store, other] * 8)
        ]
    )
    running = [one for some in claims for one in some.tasks]
    assert sorted(ids_of(running)) == sorted(ids_of(tasks))
    assert {one.attempt for one in running} == {1}
    assert all(some.later == [] for some in claims)
    assert await everything(other) == all_of(*running)


async def test_of_a_cancel_and_a_claim_one_wins(store, opened, epochs):
    other = await opened()
    for _ in range(ROUNDS):
        tasks = await stored(store, *[task(store) for _ in range(10)])
        verdicts, claims = await asyncio.gather(
            store.cancel(ids_of(shuffled(tasks))),
            other.claim([wanted(one) for one in shuffled(tasks)], "n2", epochs),
        )
        cancelled = {verdict.id for verdict in verdicts if verdict.won}
        claimed = set(ids_of(claims.tasks))
        assert cancelled | claimed == set(ids_of(tasks))
        assert not cancelled & claimed
        assert {one.state for one in verdicts if not one.won} <= {State.RUNNING}
        assert claims.later == []


async def test_of_a_cancel_by_filter_and_a_claim_one_wins(store, opened, epochs):
    other = await opened()
    for number in range(ROUNDS):
        service = f"s{number}"
        tasks = await stored(store, *[task(store, service=service) for _ in range(10)])
        cancelled, claims = await asyncio.gather(
            changed(store.cancel_where(Filter(service=service), 100)),
            other.claim([wanted(one) for one in shuffled(tasks)], "n2", epochs),
        )
        assert sorted([*cancelled, *ids_of(claims.tasks)]) == sorted(ids_of(tasks))


async def test_of_a_reschedule_and_a_claim_one_wins(store, opened, epochs):
    other = await opened()
    for _ in range(ROUNDS):
        (given,) = await stored(store, task(store))
        moved = now(store) + HOUR
        (verdict,), claims = await asyncio.gather(
            store.reschedule([given.id], moved), other.claim([wanted(given)], "n2", epochs)
        )
        if verdict.won:
            missed(claims, given, given._replace(due_at_ms=moved))
        else:
            assert verdict.state is State.RUNNING
            assert ids_of(claims.tasks) == [given.id]


async def test_of_a_replace_and_a_claim_one_wins(store, opened, epochs):
    other = await opened()
    for number in range(ROUNDS):
        (given,) = await stored(store, task(store, key=f"k{number}"))
        second = later(store, key=given.key, body=b"2")
        (answer,), claims = await asyncio.gather(
            insert(store, second, on_conflict="replace"),
            other.claim([wanted(given)], "n2", epochs),
        )
        found = await one(store, given.id)
        if isinstance(answer, Task):
            assert (found.state, found.body) == (State.DELAY, b"2")
            missed(claims, given, found)
        else:
            assert isinstance(answer, KeyConflict)
            assert (found.state, found.body) == (State.RUNNING, given.body)
            assert ids_of(claims.tasks) == [given.id]


async def test_of_two_endings_one_wins(store, opened, epochs):
    other = await opened()
    for _ in range(ROUNDS):
        running = await run(store, epochs, *[task(store) for _ in range(10)])
        finishing = [ending(one, Event.FINISH) for one in running]
        failing = [ending(one, Event.RETRY) for one in running]
        random.shuffle(failing)
        finished, failed = await asyncio.gather(
            answered(store.record, finishing), answered(other.record, failing)
        )
        won = {end.id for end, one in zip(finishing, finished, strict=True) if one}
        lost = {end.id for end, one in zip(failing, failed, strict=True) if one}
        assert won | lost == set(ids_of(running))
        assert not won & lost
        for one_of_them in running:
            (row,) = await store.attempts(one_of_them.id)
            assert row.event is (Event.FINISH if row.task_id in won else Event.RETRY)


async def test_of_a_renewal_and_a_lost_lease_one_wins(store, opened, epochs):
    other = await opened()
    for _ in range(ROUNDS):
        (running,) = await run(store, epochs, task(store))
        over = await renewed(store, running, -5 * SECOND)
        lost = ending(running, Event.RETRY, lease_until_ms=over.lease_until_ms)
        (goes_on,), (ended_it,) = await asyncio.gather(
            answered(store.renew, [running.attempt_key]),
            answered(other.record, [lost]),
        )
        assert goes_on is not ended_it
        assert (await one(store, running.id)).state is (State.RUNNING if goes_on else State.DELAY)


async def test_of_many_submits_of_one_key_one_is_stored(store, opened):
    other = await opened()
    for number in range(ROUNDS):
        tasks = [task(store, key=f"k{number}") for _ in range(8)]
        answers = await asyncio.gather(
            *[insert(node, given) for node, given in zip([store, other] * 4, tasks, strict=True)]
        )
        winners = [answer for (answer,) in answers if isinstance(answer, Task)]
        assert len(winners) == 1
        taken = [answer for (answer,) in answers if not isinstance(answer, Task)]
        assert taken == [conflict(winners[0])] * 7


async def test_of_many_requests_of_one_name_one_is_stored(store, opened):
    other = await opened()
    for number in range(ROUNDS):
        key = f"k{number}" if number % 2 else None
        asked = [request(task(store, key=key), f"r{number}") for _ in range(6)]
        answers = await asyncio.gather(
            *[
                node.insert([submission], {})
                for node, submission in zip([store, other] * 3, asked, strict=True)
            ]
        )
        (made,) = [answer for (answer,) in answers if isinstance(answer, Task)]
        assert sorted(map(str, answers)) == sorted(map(str, [[made]] + [[repeated(made)]] * 5))
    assert len(await everything(store)) == ROUNDS


async def test_of_two_different_requests_of_one_name_one_is_stored(store, opened):
    other = await opened()
    for number in range(ROUNDS):
        answers = await asyncio.gather(
            store.insert([request(task(store), f"r{number}", digest="a")], {}),
            other.insert([request(task(store), f"r{number}", digest="b")], {}),
        )
        kinds = sorted(type(answer).__name__ for (answer,) in answers)
        assert kinds == ["RepeatedRequest", "Task"]
        (refused,) = [answer for (answer,) in answers if isinstance(answer, RepeatedRequest)]
        assert refused == RepeatedRequest(False, None)


async def test_batches_with_the_same_names_in_other_orders_do_not_lock_each_other(store, opened):
    """Batches that meet may be refused as a whole; each request is stored at most once."""
    other = await opened()
    names = [f"r{n}" for n in range(50)]

    async def submit(node):
        asked = [request(task(node, key=f"k{name}"), name) for name in shuffled(names)]
        try:
            return await node.insert(asked, {})
        except Locked:
            return []

    batches = await asyncio.gather(*[submit(node) for node in [store, other] * 4])
    made = [answer for answers in batches for answer in answers if isinstance(answer, Task)]
    assert len(made) == len(names)
    assert await everything(other) == all_of(*made)
    repeats = [
        answer for answers in batches for answer in answers if isinstance(answer, RepeatedRequest)
    ]
    assert {answer.task for answer in repeats} <= set(map(summary, made))
    assert all(answer.same for answer in repeats)


async def test_of_an_acceptance_and_an_ending_the_ending_wins(store, opened, epochs):
    other = await opened()
    for _ in range(ROUNDS):
        (running,) = await run(store, epochs, task(store))
        (accepted,), (won,) = await asyncio.gather(
            answered(store.accept, [lease(running, now(store) + HOUR)]),
            answered(other.record, [ending(running)]),
        )
        assert won
        assert (await one(store, running.id)).state is State.FINISHED
        assert accepted in (True, False)


async def test_of_an_acceptance_and_a_lost_lease_one_wins(store, opened, epochs):
    other = await opened()
    for _ in range(ROUNDS):
        (running,) = await run(store, epochs, task(store))
        until = running.lease_until_ms
        (accepted,), (lost,) = await asyncio.gather(
            answered(store.accept, [lease(running, until + HOUR)]),
            answered(other.record, [ending(running, Event.RETRY, lease_until_ms=until)]),
        )
        assert accepted is not lost


async def test_batches_with_the_same_keys_in_other_orders_do_not_lock_each_other(
    store, opened, monkeypatch
):
    change(monkeypatch, "LOCK_MS", 30_000)  # they may wait for each other, but not in a circle
    change(monkeypatch, "TRIES", 1)
    other = await opened()
    keys = [f"k{number}" for number in range(100)]

    async def insert_all():
        batches = [[task(store, key=key) for key in shuffled(keys)] for _ in range(8)]
        nodes = [store, other] * 4
        given = zip(nodes, batches, strict=True)
        return await asyncio.gather(
            *[insert(node, *batch, on_conflict="replace") for node, batch in given]
        )

    answers = await insert_all()
    assert all(isinstance(answer, Task) for some in answers for answer in some)
    live = await everything(store)
    assert sorted(one.key for one in live) == sorted(keys)


async def test_a_shard_that_is_taken_meanwhile_gets_nothing_under_its_old_epoch(store, opened):
    other = await opened()
    for _ in range(ROUNDS):
        epochs = await store.take(ALL, "n1")
        tasks = await stored(store, *[task(store, shard=n % SHARDS) for n in range(16)])
        claims, newer = await asyncio.gather(
            store.claim([wanted(one) for one in tasks], "n1", epochs), other.take(ALL, "n2")
        )
        late = [task(store, shard=n % SHARDS) for n in range(16)]
        assert await insert(store, *late, epochs=epochs) == [None] * 16
        assert await store.claim([wanted(one) for one in tasks], "n1", epochs) == Claims([], [])
        rest = await other.claim([wanted(one) for one in tasks], "n2", newer)
        both = ids_of(claims.tasks) + ids_of(rest.tasks)
        assert sorted(both) == sorted(ids_of(tasks))


async def test_two_that_take_a_shard_get_two_epochs(store, opened):
    other = await opened()
    taken = await asyncio.gather(
        *[node.take(shuffled(list(ALL)), f"n{n}") for n, node in enumerate([store, other] * 8)]
    )
    for shard in ALL:
        epochs = sorted(one[shard] for one in taken)
        assert epochs == list(range(epochs[0], epochs[0] + 16))


async def test_of_two_firings_until_the_same_time_one_wins(store, opened):
    other = await opened()
    nightly = schedule(store)
    await put(store, nightly)
    for number in range(1, ROUNDS):
        until = nightly.fired_until_ms + 1
        firings = [firing(store, nightly, until) for _ in range(6)]
        won = await asyncio.gather(
            *[fire(node, [fired]) for node, fired in zip([store, other] * 3, firings, strict=True)]
        )
        assert sum(yes for (yes,) in won) == 1
        assert len(await everything(store)) == number
        nightly = nightly._replace(fired_until_ms=until)


async def test_a_schedule_that_is_deleted_meanwhile_leaves_no_firing(store, opened):
    other = await opened()
    for _ in range(ROUNDS):
        nightly = schedule(store)
        await put(store, nightly)
        await asyncio.gather(
            fire(store, [firing(store, nightly, now(store) + HOUR)]),
            other.schedules.delete(nightly.name, AUDIT),
        )
        assert await everything(store, final=False) == []


async def test_of_two_replays_one_wins(store, opened, epochs):
    other = await opened()
    for _ in range(ROUNDS):
        (final,) = await ended(store, epochs, task(store))
        replays = [replay_of(store, final) for _ in range(2)]
        answers = await asyncio.gather(
            store.replay([replays[0]], force=False), other.replay([replays[1]], force=False)
        )
        made = [answer for (answer,) in answers if answer is not None]
        assert len(made) == 1
        assert (await one(store, final.id)).replayed_as == made[0].id


async def test_prunes_at_once_count_each_task_once(store, opened, epochs):
    other = await opened()
    await ended(store, epochs, *[task(store) for _ in range(100)])
    before = now(store) + HOUR
    gone = await asyncio.gather(*[node.prune(before, 30) for node in [store, other] * 2])
    while more := await store.prune(before, 30):
        gone.append(more)
    assert sum(gone) == 100
    assert await everything(store) == []


async def test_whole_lives_at_once_lose_and_double_nothing(store, opened, epochs):
    """Two nodes submit, claim, end, cancel and move the same tasks all the time."""
    other = await opened()
    tasks = await stored(store, *[task(store, shard=n % SHARDS) for n in range(120)])
    attempts = dict.fromkeys(ids_of(tasks), 0)
    cancelled = set()

    async def work(node, name):
        for _ in range(4):
            batch = shuffled(tasks)[:60]
            claims = await node.claim([wanted(one) for one in batch], name, epochs)
            for given in claims.tasks:
                attempts[given.id] += 1
            events = [random.choice([Event.RELEASE, Event.RETRY]) for _ in claims.tasks]
            ends = [
                ending(given, event)
                for given, event in zip(shuffled(claims.tasks), events, strict=True)
            ]
            assert await answered(node.record, ends) == [True] * len(ends)

    async def cancel(node):
        for _ in range(4):
            verdicts = await node.cancel(ids_of(shuffled(tasks)[:10]))
            won = {verdict.id for verdict in verdicts if verdict.won}
            assert not won & cancelled
            cancelled.update(won)

    await asyncio.gather(
        *[work(node, f"n{number}") for number, node in enumerate([store, other] * 3)],
        *[cancel(node) for node in (store, other)],
    )
    for found in await store.get(ids_of(tasks)):
        assert (found.state is State.CANCELLED) == (found.id in cancelled)
        assert found.attempt == attempts[found.id]
        log = await store.attempts(found.id)
        assert [row.attempt for row in log] == list(range(1, found.attempt + 1))
    left = [found for found in await store.get(ids_of(tasks)) if not found.final]
    running = await claim(store, left, epochs)
    assert await store.record([ending(given) for given in running]) == [True] * len(running)
    assert await everything(store, final=False) == []


async def test_reads_beside_writes_see_a_task_once(store, opened, epochs):
    """A task on its way to the backlog is in a list and in an answer of `get`, and once."""
    other = await opened()
    running = await run(store, epochs, *[task(store) for _ in range(40)])
    done = False

    async def read():
        while not done:
            found = await other.get(ids_of(running))
            assert all(found)
            page = await other.find(Filter(), final=None, cursor=None, limit=100)
            assert ids_of(page.items) == ids_of(all_of(*running))

    async def write():
        nonlocal done
        for given in running:
            await store.record([ending(given)])
        done = True

    await asyncio.gather(read(), read(), write())


async def test_a_verdict_is_true_for_one_of_many_cancels(store, opened):
    other = await opened()
    (given,) = await stored(store, task(store))
    verdicts = await asyncio.gather(*[node.cancel([given.id]) for node in [store, other] * 8])
    won = [verdict for (verdict,) in verdicts if verdict.won]
    assert won == [Verdict(given.id, True, State.CANCELLED)]
    lost = [verdict for (verdict,) in verdicts if not verdict.won]
    assert lost == [Verdict(given.id, False, State.CANCELLED)] * 15
