"""The contract of a store: long random lives, each answer compared with a model's.

On SQLite by a clock set by hand, so that time passes, too. PostgreSQL has a clock of its own: there
tasks are overdue or due in an hour, whatever the time is.
"""

import asyncio
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from contracts.model_store import ModelStore, due_of
from contracts.stores import (
    AUDIT,
    EVENTS,
    HOUR,
    NOBODY,
    SECOND,
    Place,
    changed,
    ending,
    fire,
    firing,
    lease,
    now,
    schedule,
    task,
    walk,
)
from stage import HandClock
from tickwheel.durable.store import Replay, Window
from tickwheel.values.schedule import firing_key
from tickwheel.values.task import (
    Filter,
    Idempotency,
    KeyConflict,
    RepeatedRequest,
    State,
    Submission,
)

SHARDS = 3
ALL = range(SHARDS)
SERVICES = ["mail", "sms", "acme/sms"]
START = 1_800_000_000.0

places = st.lists(st.integers(0, 999), min_size=1, max_size=4)
late = st.sampled_from([SECOND, 2 * SECOND, -HOUR, -2 * HOUR])
services = st.sampled_from(SERVICES)
keys = st.sampled_from([None, None, "a", "b"])
states = st.sampled_from([None, *State])
filters = st.builds(
    Filter,
    unchanged_since_ms=st.none(),  # the store's own times: see the tests of the bulk verbs
    state=states,
    service=st.sampled_from([None, *SERVICES]),
    key=st.sampled_from([None, None, "a", "b"]),
    due_before_ms=st.none(),
    due_after_ms=st.none() | st.integers(-2 * HOUR, 2 * HOUR).map(round(START * 1000).__add__),
    namespace=st.sampled_from([None, None, "", "acme"]),
    tags=st.just(()),  # the model has none: see the tests of tags
)
indexed = filters.filter(lambda which: which.service or which.key)
submissions = st.tuples(
    services, keys, late, st.sampled_from(ALL), st.sampled_from(["reject", "replace", "keep"])
)
requests = st.none() | st.builds(
    Idempotency,
    caller=st.sampled_from(["c", "d"]),
    key=st.sampled_from(["r1", "r2", "r3"]),
    digest=st.sampled_from(["same", "same", "other"]),
)
known_epochs = st.sampled_from(["none", "right", "stale"])


def timeless(answer):
    """An answer without the times that a store writes by its own clock."""
    if isinstance(answer, KeyConflict):
        return KeyConflict(timeless(answer.holder))
    if isinstance(answer, RepeatedRequest):
        return RepeatedRequest(answer.same, timeless(answer.task))
    if answer is None:
        return None
    return answer._replace(
        updated_at_ms=0, created_at_ms=0, started_at_ms=None, lease_until_ms=None
    )


def timeless_row(row):
    return row._replace(started_at_ms=0, ended_at_ms=0)


class Lives(RuleBasedStateMachine):
    """A store and a model that get the same calls."""

    def __init__(self, place, clock=None):
        super().__init__()
        self.clock = clock
        self.runner = asyncio.Runner()
        self.place = place
        self.options = {"clock": clock} if clock else {}
        self.model = ModelStore(SHARDS)
        self.known = []  # the ids of all tasks ever stored
        self.given = []  # tasks as they were submitted
        self.claimed = []  # tasks as they were claimed
        self.names = itertools.count()
        self.open()

    def open(self):
        self.store = self.place.store(shards=SHARDS, **self.options)
        self.do(self.store.open())

    def do(self, coroutine):
        return self.runner.run(coroutine)

    def teardown(self):
        self.do(self.store.close())
        self.runner.close()

    def chosen(self, places, items):
        return [items[place % len(items)] for place in places] if items else []

    def epochs(self, how):
        right = dict(self.model.epochs)
        return {"none": {}, "right": right, "stale": right | {1: right[1] - 1}}[how]

    def now(self):
        return now(self.store)

    @rule(parts=st.lists(submissions, min_size=1, max_size=4), how=known_epochs)
    def submit(self, parts, how):
        given = [
            Submission(
                task(
                    self.store,
                    service=service,
                    key=key,
                    late=late,
                    shard=shard,
                    body=b"%d" % next(self.names),
                ),
                on_conflict,
            )
            for service, key, late, shard, on_conflict in parts
        ]
        self.insert(given, self.epochs(how), again=False)

    @rule(part=submissions, named=requests, how=known_epochs)
    def request(self, part, named, how):
        service, key, late, shard, on_conflict = part
        new = task(self.store, service=service, key=key, late=late, shard=shard)
        self.insert([Submission(new, on_conflict, named)], self.epochs(how), again=False)

    @precondition(lambda self: self.given)
    @rule(places=places, part=submissions)
    def submit_again(self, places, part):
        service, key, late, shard, on_conflict = part
        if on_conflict == "replace":  # known ones are answered as before or after it: no promise
            on_conflict = "keep"
        new = task(self.store, service=service, key=key, late=late, shard=shard)
        given = {one.id: Submission(one, on_conflict) for one in self.chosen(places, self.given)}
        self.insert([*given.values(), Submission(new, on_conflict)], {}, again=True)

    def insert(self, given, epochs, *, again):
        answers = self.do(self.store.insert(given, epochs, again=again))
        expected = self.model.insert(given, epochs, again=again)
        assert list(map(timeless, answers)) == list(map(timeless, expected))
        self.given += [one.task for one in given]
        self.learn(one.task.id for one in given)

    def learn(self, ids):
        self.known += [one for one in ids if self.model.get(one) and one not in self.known]

    @rule(shards=st.sets(st.sampled_from(ALL)))
    def take(self, shards):
        shards = sorted(shards)
        assert self.do(self.store.take(shards, "n2")) == self.model.take(shards)

    @precondition(lambda self: self.known)
    @rule(places=places, moved=st.sampled_from([0, 0, 0, 1]), how=known_epochs)
    def claim(self, places, moved, how):
        ids = list(dict.fromkeys(self.chosen(places, self.known)))
        asked = [
            due_of(one)._replace(due_at_ms=one.due_at_ms + moved)
            for one in map(self.model.get, ids)
            if one is not None
        ]
        epochs = self.epochs(how)
        claims = self.do(self.store.claim(asked, "n1", epochs))
        running, later = self.model.claim(asked, "n1", epochs, self.now())
        assert sorted(one.id for one in claims.tasks) == sorted(running)
        assert sorted(claims.later) == sorted(later)
        for one in claims.tasks:
            expected = self.model.live[one.id]
            assert timeless(one) == timeless(expected)
            if self.clock:
                assert one.lease_until_ms == expected.lease_until_ms
            self.model.live[one.id] = expected._replace(
                started_at_ms=one.started_at_ms, lease_until_ms=one.lease_until_ms
            )
            self.claimed.append(one)

    @precondition(lambda self: self.claimed)
    @rule(
        places=places,
        event=st.sampled_from(EVENTS),
        late=late,
        lost=st.sampled_from([False, False, True]),
        error=st.sampled_from([None, "boom"]),
    )
    def record(self, places, event, late, lost, error):
        at = self.now()
        ends = [
            ending(
                one, event, at_ms=at, due_at_ms=at - late, error=error,
                lease_until_ms=one.lease_until_ms if lost else None,
            )
            for one in self.chosen(places, self.claimed)
        ]  # fmt: skip
        assert self.do(self.store.record(ends)) == self.model.record(ends)

    @precondition(lambda self: self.claimed)
    @rule(places=places, moved=st.sampled_from([1 - HOUR, 2 * HOUR + 1]))  # never to a due time
    def renew(self, places, moved):
        chosen = {one.attempt_key: one for one in self.chosen(places, self.claimed)}
        answers = self.do(self.store.renew([*chosen], moved))
        found = {one.id: one for one in self.do(self.store.running_by_id([*self.known]))}
        assert answers == self.model.renew([*chosen], self.now() + moved)
        for task_id, *_ in chosen:  # by the store's own clock, where it has one
            one = self.model.live.get(task_id)
            if one is not None and one.state is State.RUNNING and not self.clock:
                self.model.live[task_id] = one._replace(
                    lease_until_ms=found[task_id].lease_until_ms
                )

    @precondition(lambda self: self.claimed)
    @rule(places=places, moved=st.sampled_from([SECOND, HOUR, 24 * HOUR]))
    def accept(self, places, moved):
        at = self.now() + moved
        leases = [lease(one, at + n) for n, one in enumerate(self.chosen(places, self.claimed))]
        assert self.do(self.store.accept(leases)) == self.model.accept(leases)

    @precondition(lambda self: self.known)
    @rule(places=places)
    def cancel(self, places):
        ids = [*dict.fromkeys(self.chosen(places, self.known)), NOBODY]
        assert self.do(self.store.cancel(ids)) == self.model.cancel(ids)

    @precondition(lambda self: self.known)
    @rule(places=places, late=late)
    def reschedule(self, places, late):
        ids = [*dict.fromkeys(self.chosen(places, self.known)), NOBODY]
        due = self.now() - late
        assert self.do(self.store.reschedule(ids, due)) == self.model.reschedule(ids, due)

    @rule(which=indexed, limit=st.sampled_from([1, 100]))
    def cancel_where(self, which, limit):
        won = self.do(changed(self.store.cancel_where(which, limit)))
        assert sorted(won) == sorted(self.unclaimed(which))
        self.model.cancel(won)

    @rule(which=indexed, limit=st.sampled_from([1, 100]), late=late)
    def reschedule_where(self, which, limit, late):
        due = self.now() - late
        matching = [one for one in self.unclaimed(which) if self.model.live[one].due_at_ms != due]
        won = self.do(changed(self.store.reschedule_where(which, due, limit)))
        assert sorted(won) == sorted(matching)
        self.model.reschedule(won, due)

    def unclaimed(self, which):
        found = self.model.find(which, self.now(), final=False)
        return [one.id for one in found if one.state is State.DELAY]

    @rule(which=filters, final=st.sampled_from([None, True, False]), limit=st.integers(1, 5))
    def find(self, which, final, limit):
        found = self.do(walk(self.store, which, final=final, limit=limit))
        expected = self.model.find(which, self.now(), final=final)
        assert list(map(timeless, found)) == list(map(timeless, expected))

    @rule(shards=st.sets(st.sampled_from(ALL)), horizon=st.sampled_from([0, HOUR + 1, 9 * HOUR]))
    def due(self, shards, horizon):
        at = self.now()
        windows = [Window(service, 1_000, 1_000) for service in SERVICES]
        found = self.do(self.store.due(windows, sorted(shards), at, at + horizon))
        for service in SERVICES:
            ours = [due for due in found if due.service == service]
            assert ours == self.model.due(service, shards, -1, at + horizon)

    @rule(shards=st.sets(st.sampled_from(ALL)), ahead=st.sampled_from([0, HOUR, 72 * HOUR]))
    def running(self, shards, ahead):
        until = self.now() + ahead
        rows = self.do(self.store.running(sorted(shards), until_ms=until))
        found = {one.id: one for one in rows}
        expected = {one.id: one for one in self.model.running(shards, until)}
        assert found.keys() >= expected.keys()
        longer = self.model.running(shards, 2**63)
        expected |= {one.id: one for one in longer if one.id not in self.model.accepted}
        for task_id, one in found.items():
            assert timeless(one) == timeless(expected[task_id]._replace(body=b""))
            assert one.lease_until_ms == expected[task_id].lease_until_ms

    @precondition(lambda self: self.known)
    @rule(places=places, late=late, force=st.booleans())
    def replay(self, places, late, force):
        new = [task(self.store, late=late, shard=2) for _ in places]
        replays = [
            Replay(old, one.id, 2, one.due_at_ms)
            for old, one in zip(self.chosen(places, self.known), new, strict=True)
        ]
        if force:  # which of two forced ones of a batch the backlog notes is not promised
            replays = list({one.id: one for one in replays}.values())
        answers = self.do(self.store.replay(replays, force=force))
        expected = self.model.replay(replays, self.now(), force=force)
        assert list(map(timeless, answers)) == list(map(timeless, expected))
        self.learn(one.new_id for one in replays)

    @rule(limit=st.integers(1, 3))
    def prune(self, limit):
        before = set(self.model.final)
        count = self.do(self.store.prune(self.now() + HOUR, limit))
        assert count == min(limit, len(before))
        left = self.do(self.store.get(sorted(before)))
        gone = before - {one.id for one in left if one is not None}
        assert len(gone) == count
        for task_id in gone:
            self.model.forget(task_id)
            assert self.do(self.store.attempts(task_id)) == []

    @rule(
        name=st.sampled_from(["nightly", "hourly"]),
        tz=st.sampled_from(["UTC", "Asia/Tokyo"]),
        enabled=st.sampled_from([True, True, True, False]),
    )
    def put_schedule(self, name, tz, enabled):
        there = self.model.schedules.get(name) or schedule(self.store, name, service="sms")
        given = there._replace(tz=tz, enabled=enabled)
        assert self.do(self.store.schedules.put(given, AUDIT)) == self.model.put_schedule(given)

    @rule(name=st.sampled_from(["nightly", "hourly"]))
    def delete_schedule(self, name):
        assert self.do(self.store.schedules.delete(name, AUDIT)) == self.model.delete_schedule(name)

    @precondition(lambda self: self.model.schedules)
    @rule(place=st.integers(0, 9), moved=st.sampled_from([-1, 0, 1, 2]), late=late)
    def fire(self, place, moved, late):
        given = self.chosen([place], sorted(self.model.schedules.values()))[0]
        changed = given._replace(tz="Europe/Paris")
        until = given.fired_until_ms + moved
        due = now(self.store) - late
        fields = {"due_at_ms": due, "key": firing_key(given.name, due)}
        firings = [firing(self.store, one, until, **fields) for one in (changed, given, given)]
        assert self.do(fire(self.store, firings)) == self.model.fire(firings)
        self.learn(one.task.id for one in firings)

    @precondition(lambda self: self.clock)
    @rule(hours=st.sampled_from([0.001, 1.5]))
    def pass_time(self, hours):
        self.clock.add(hours * 3_600)

    @rule()
    def reopen(self):
        self.do(self.store.close())
        self.open()

    @invariant()
    def both_hold_the_same(self):
        found = self.do(walk(self.store, Filter(), limit=1_000))
        expected = self.model.find(Filter(), self.now())
        assert list(map(timeless, found)) == list(map(timeless, expected))
        assert sum(self.do(self.store.counts()).values()) == len(expected)
        schedules = sorted(self.model.schedules.values(), key=lambda one: one.name)
        assert self.do(self.store.schedules.read()) == schedules

    @invariant()
    def both_have_the_same_log(self):
        for task_id in self.model.log:
            rows = self.do(self.store.attempts(task_id))
            expected = self.model.log[task_id]
            assert list(map(timeless_row, rows)) == list(map(timeless_row, expected))


@pytest.mark.parametrize("kind", ["sqlite-sqlite3", "sqlite-apsw"])
def test_a_sqlite_store_does_what_the_model_does(kind, tmp_path):
    files = (tmp_path / f"{number}.db" for number in itertools.count())

    def lives():
        return Lives(Place(kind, str(next(files))), HandClock(START))

    run_state_machine_as_test(lives, settings=settings(max_examples=25, stateful_step_count=30))


def test_a_postgres_store_does_what_the_model_does(postgres_server, contract_database):
    names = (f"lives_{number}" for number in itertools.count())

    def lives():
        name = next(names)
        postgres_server.execute(f"CREATE SCHEMA {name}", contract_database)
        url = postgres_server.url_for(contract_database)
        return Lives(Place("postgres", f"{url}?schema={name}"))

    run_state_machine_as_test(lives, settings=settings(max_examples=10, stateful_step_count=30))
