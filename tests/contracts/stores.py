"""Helpers for tests of stores: the stores under test, and short names for their arguments."""

import contextlib
import importlib
import itertools
import signal
import sys
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from tickwheel.durable.registry import Audit, NotedTimes, Token
from tickwheel.durable.store import Replay, Window
from tickwheel.durable.stores.sqlite.memory import MemoryStore
from tickwheel.durable.stores.sqlite.store import SqliteStore
from tickwheel.durable.stores.sqlite.writer import Rank
from tickwheel.values.schedule import Firing, Schedule, Start, Timing, firing_key
from tickwheel.values.shard import hash_shard, key_shard
from tickwheel.values.task import (
    FAILURE_EVENTS,
    Due,
    Ending,
    Event,
    Filter,
    Idempotency,
    Ids,
    KeyConflict,
    Lease,
    RepeatedRequest,
    State,
    Submission,
    Task,
)

KINDS = ["sqlite-sqlite3", "sqlite-apsw", "memory", "postgres"]
ONE_DRIVER = ["sqlite-apsw", "memory", "postgres"]  # for what does not depend on SQLite's driver
SHARDS = 8
PATIENCE = 60  # seconds after which a test has hung
SECOND = 1_000  # in milliseconds, as all times here
HOUR = 3_600 * SECOND
EVERYTHING = Filter()
GO_ON = (Event.ACCEPT, Event.CLAIM, Event.CANCEL, Event.RESCHEDULE)  # these end no attempt
EVENTS = [event for event in Event if event not in GO_ON]
ENDS = [Event.FINISH, Event.FAIL, Event.EXPIRE]
RETURNS = [Event.RETRY, Event.SNOOZE, Event.RELEASE]
BELIEVED = (0, 1, 10**9)  # rows of each page, which PostgreSQL's planner may believe in
NOBODY = "0" * 32  # an id that no task has
AUDIT = Audit(1_000, "local", "", "schedule.put", "nightly")

_ids = Ids()


@dataclass
class Place:
    """Where a database is, and by which store it is opened."""

    kind: str
    address: str
    stores: int = 0  # made on it

    @property
    def outlives_its_store(self):
        """Whether what was stored is there when a store is opened again."""
        return self.kind != "memory"

    def store(self, *, shards=SHARDS, **options):
        """A store on it, not opened yet; a test that needs a second one in memory is left out."""
        self.stores += 1
        if not self.outlives_its_store:
            if self.stores > 1:
                pytest.skip("a second store on memory:// is another database")
            return MemoryStore(shards=shards, **options)
        if self.kind == "postgres":
            module = importlib.import_module("tickwheel.durable.stores.postgres.store")
            return module.PostgresStore(self.address, shards=shards, **options)
        driver = self.kind.removeprefix("sqlite-")
        return SqliteStore(self.address, shards=shards, driver=driver, **options)


@contextlib.asynccontextmanager
async def several(place, **options):
    """Gives a function that opens stores on one database, and closes them all in the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened():
            store = place.store(**options)
            await store.open()
            stack.push_async_callback(store.close)
            return store

        yield opened


@contextlib.contextmanager
def watchdog(seconds=PATIENCE):
    """Ends a test that hangs, with a traceback of where it does."""

    def bark(*_):
        raise TimeoutError(f"this test has hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def scan_less(monkeypatch, rows):
    """Have lists look at so few rows before they answer with a cursor."""
    change(monkeypatch, "SCAN", rows)


def change(monkeypatch, name, value):
    """Have every module of the stores that has this name use another value for it."""
    for path, module in list(sys.modules.items()):
        if path.startswith("tickwheel.durable.store") and hasattr(module, name):
            monkeypatch.setattr(module, name, value)


async def believe(fetch, rows, others):
    """Have PostgreSQL's planner believe that a page of `task` has `rows`, one of others `others`.

    Its estimate is the rows per page when it last looked, times the pages that there are: tables
    that it saw while they were empty, it believes to be so for long.
    """
    believed = f"CASE WHEN relname ~ '^task(_|$)' THEN {rows} ELSE {others} END"
    changed = await fetch(f"""
        UPDATE pg_class SET relpages = 1, reltuples = {believed}
        WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'i')
        RETURNING relname
    """)
    assert ("task",) in [tuple(row) for row in changed]


def now(store):
    """The store's time, whole."""
    return int(store.now_ms())


def task(store, *, late=SECOND, shard=0, **fields):
    """Return a new task, overdue by `late` milliseconds; due later if `late` is negative."""
    at = now(store)
    given = {
        "id": _ids.make(at, shard),
        "service": "mail",
        "body": b'{"to": "a@example.org"}',
        "key": None,
        "state": State.DELAY,
        "due_at_ms": at - late,
        "shard": shard,
        "priority": 0,
        "attempt": 0,
        "failures": 0,
        "max_attempts": 3,
        "timeout_ms": None,
        "deadline_at_ms": None,
        "created_at_ms": at,
        "updated_at_ms": at,
    }
    return Task(**(given | fields))


def later(store, **fields):
    """A new task that is due in an hour."""
    return task(store, late=-HOUR, **fields)


async def insert(store, *tasks, on_conflict="reject", epochs=None, again=False):
    """The answers to the submission of these tasks."""
    submissions = [Submission(one, on_conflict) for one in tasks]
    return await store.insert(submissions, epochs or {}, again=again)


def request(task, key="r1", *, caller="c", digest="d", on_conflict="reject"):
    """A submission under a name of the caller's own."""
    return Submission(task, on_conflict, Idempotency(caller, key, digest))


def summary(task):
    """A task as an answer has it that does not show it: without payload and result."""
    return task._replace(body=b"", result_body=None)


def conflict(holder):
    """The answer to a submission whose key this task has."""
    return KeyConflict(summary(holder))


def repeated(task):
    """The answer to a repeated request whose task this is; None: it is gone."""
    return RepeatedRequest(True, task and summary(task))


async def stored(store, *tasks):
    """These tasks, which must all have been stored."""
    answers = await insert(store, *tasks)
    assert all(isinstance(answer, Task) for answer in answers)
    return answers


# The fields that an insert of the first version had.
FIRST_FIELDS = (
    "id", "service", "body", "key", "due_at_ms", "shard", "priority", "max_attempts", "timeout_ms",
    "deadline_at_ms", "created_at_ms", "updated_at_ms", "replay_of",
)  # fmt: skip


async def stored_before(store, *tasks):
    """Store tasks as the first version did, into tables that may lack later columns."""
    columns = ", ".join(FIRST_FIELDS).replace("body", "payload")
    for one in tasks:
        values = [getattr(one, name) for name in FIRST_FIELDS]
        if isinstance(store, SqliteStore):
            marks = ", ".join("?" for _ in values)
            await execute_sqlite(store, f"INSERT INTO task ({columns}) VALUES ({marks})", values)
        else:
            marks = ", ".join(f"${number}" for number in range(1, len(values) + 1))
            await store.fetch(f"INSERT INTO task ({columns}) VALUES ({marks})", *values)
    return [*tasks]


def keyed_before(store):
    """Tasks with keys as the version before stored them, in wrong shards, and one without a key.

    The last ones are firings of a schedule: the shard of their schedule is right.
    """
    pairs = [("mail", f"größe:{n}") for n in range(30)] + [("почта", "注文:🛒"), ("bill", "k")]
    given = [
        later(store, service=service, key=key, shard=(key_shard(service, key, SHARDS) + 1) % SHARDS)
        for service, key in pairs
    ]
    shard = hash_shard("nightly", SHARDS)
    firings = [later(store, key=firing_key("nightly", n), shard=shard) for n in range(5)]
    return [*given, later(store, shard=3), *firings]


def right_shard(task):
    """Return the shard of a task of `keyed_before` after the migration."""
    return task.shard if task.key is None else key_shard(task.service, task.key, SHARDS)


async def execute_sqlite(store, statement, values):
    """Execute a statement by the writer of a store on SQLite."""
    await store._write(Rank.SUBMIT, lambda connection: connection.run(statement, values))


def due_of(task):
    """Return the part of a task that the wheel holds."""
    return Due(task.id, task.due_at_ms, task.service, task.priority, task.shard)


def wanted(task):
    """Return the argument with which to claim a task."""
    return due_of(task)


async def claim(store, tasks, epochs, node="n1"):
    """The tasks as they run now: all of them, in the order given; large ones in several claims."""
    running = {}
    while left := [wanted(one) for one in tasks if one.id not in running]:
        claims = await store.claim(left, node, epochs)
        assert claims.tasks
        running |= {one.id: one for one in claims.tasks}
    assert len(running) == len(tasks)
    return [running[one.id] for one in tasks]


async def run(store, epochs, *tasks, node="n1"):
    """The tasks, stored and claimed."""
    await stored(store, *tasks)
    return await claim(store, tasks, epochs, node)


async def answered(method, items):
    """The answers of `record`, `renew` or `accept`: again while a transaction has a task locked."""
    answers = await method(items)
    while None in answers:
        left = [at for at, answer in enumerate(answers) if answer is None]
        for at, answer in zip(left, await method([items[at] for at in left]), strict=True):
            answers[at] = answer
    return answers


def ending(task, event=Event.FINISH, *, at_ms=None, due_at_ms=None, **fields):
    """The end of a running task's attempt, as feedback would write it."""
    at_ms = task.started_at_ms + 5 if at_ms is None else at_ms
    given = {
        "id": task.id,
        "attempt": task.attempt,
        "epoch": task.epoch,
        "event": event,
        "at_ms": at_ms,
        "due_at_ms": task.due_at_ms if due_at_ms is None else due_at_ms,
        "failures": task.failures + (event in FAILURE_EVENTS),
    }
    return Ending(**(given | fields))


async def ended(store, epochs, *tasks, event=Event.FINISH, **fields):
    """The tasks, stored, claimed, and ended with one event; as they are stored then."""
    running = await run(store, epochs, *tasks)
    won = await store.record([ending(one, event, **fields) for one in running])
    assert all(won)
    return await store.get([one.id for one in tasks])


def lease(task, until_ms, delivered_to=None):
    """How long the callee of a running task may take, which accepts it."""
    return Lease(*task.attempt_key, until_ms, delivered_to)


async def renewed(store, task, lease_ms):
    """Return a running task after its lease was renewed; a negative time ends the lease."""
    assert await store.renew([task.attempt_key], lease_ms) == [True]
    return await one(store, task.id)


async def one(store, task_id):
    """A task as it is stored, or None."""
    (found,) = await store.get([task_id])
    return found


async def everything(store, *, final=None):
    """All tasks, newest first."""
    return await walk(store, EVERYTHING, final=final, limit=1_000)


async def walk(store, which, *, final=None, limit=10, pages=10_000):
    """All tasks that a list gives, page by page."""
    found, cursor = [], None
    for _ in range(pages):
        page = await store.find(which, final=final, cursor=cursor, limit=limit)
        assert len(page.items) <= limit
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise AssertionError(f"the list has not ended after {pages} pages")


def schedule(store, name="nightly", **fields):
    """A schedule that has not fired yet."""
    at = now(store)
    given = {
        "name": name,
        "service": "report",
        "body": b"{}",
        "cron": "0 3 * * *",
        "interval_ms": None,
        "tz": "Europe/Berlin",
        "missed": "once",
        "fired_until_ms": at - HOUR,
        "created_at_ms": at - 2 * HOUR,
    }
    return Schedule(**(given | fields))


ALL = range(SHARDS)


def all_of(*tasks):
    """Tasks as a list gives them: newest first."""
    return sorted(tasks, key=lambda one: one.id, reverse=True)


async def changed(parts):
    """The ids of what a change of many tasks gives, all of its parts together."""
    return [one.id async for part in parts for one in part]


def ids_of(tasks):
    """The ids of tasks."""
    return [one.id for one in tasks]


def replay_of(store, given, *, late=SECOND, shard=1):
    """A replay of a final task, under a new id."""
    new = task(store, shard=shard, late=late)
    return Replay(given.id, new.id, shard, new.due_at_ms)


def timing(schedule):
    """Return the part of a schedule that a node keeps."""
    return Timing(
        schedule.name, schedule.cron, schedule.interval_ms, schedule.tz, schedule.missed,
        schedule.fired_until_ms, schedule.created_at_ms, schedule.enabled,
    )  # fmt: skip


class Fire(NamedTuple):
    """A firing of a schedule as it was read, and the task that it is to make, if any."""

    schedule: Schedule
    until_ms: int
    task: Task | None

    @property
    def firing(self):
        """Return it in the form that a store takes."""
        start = None
        if self.task is not None:
            given = self.task
            start = Start(given.id, given.due_at_ms, given.shard, given.created_at_ms)
        return Firing(timing(self.schedule), self.until_ms, start)


def firing(store, schedule, until_ms, **fields):
    """A firing of a schedule, and its task: due when it fires, with a firing's key."""
    given = {
        "service": schedule.service,
        "body": schedule.body,
        "priority": schedule.priority,
        "max_attempts": schedule.max_attempts,
        "timeout_ms": schedule.timeout_ms,
        "due_at_ms": until_ms,
        "key": firing_key(schedule.name, until_ms),
    }
    return Fire(schedule, until_ms, task(store, **(given | fields)))


async def fire(store, fires):
    """For each firing whether it won; each that did says what it has stored."""
    answers = await store.schedules.fire([one.firing for one in fires])
    for one, answer in zip(fires, answers, strict=True):
        assert answer.due in (None, one.task and due_of(one.task))
        assert answer.won or answer.due is None
    return [answer.won for answer in answers]


async def put(store, *schedules):
    for given in schedules:
        await store.schedules.put(given, AUDIT)


async def various(store, epochs):
    """Tasks of all states, two services, and two keys; as they are stored."""
    at = now(store)
    given = {
        "overdue": task(store, shard=1),
        "overdue sms": task(store, service="sms", key="a"),
        "later": later(store, key="a"),
        "later sms": later(store, service="sms", key="b", shard=2),
        "much later": task(store, due_at_ms=at + 3 * HOUR),
        "running": task(store, key="b", late=2 * SECOND),
        "retried": task(store, late=3 * SECOND),
        "finished": task(store, service="sms", key="a2"),
        "failed": task(store, key="c"),
        "cancelled": later(store, service="sms", key="c"),
    }
    await stored(store, *given.values())
    await store.cancel([given["cancelled"].id])
    names = ["running", "retried", "finished", "failed"]
    running = dict(
        zip(names, await claim(store, [given[name] for name in names], epochs), strict=True)
    )
    await store.record(
        [
            ending(running["retried"], Event.RETRY, due_at_ms=at - 2 * SECOND),
            ending(running["finished"], Event.FINISH),
            ending(running["failed"], Event.FAIL),
        ]
    )
    found = await store.get([one.id for one in given.values()])
    return dict(zip(given, found, strict=True))


def holds(which, task, at):
    """Whether a filter holds for a task, by the words of `Filter`."""
    shown = task.state
    if shown is State.DELAY and task.due_at_ms <= at:
        shown = State.READY
    return (
        which.state in (None, shown)
        and which.service in (None, task.service)
        and which.key in (None, task.key)
        and (which.due_before_ms is None or task.due_at_ms < which.due_before_ms)
        and (which.due_after_ms is None or task.due_at_ms >= which.due_after_ms)
        and in_namespace(which.namespace, task.service)
    )


def in_namespace(namespace, service):
    """Whether a namespace, None being all, has a service of this name."""
    if not namespace:
        return namespace is None or "/" not in service
    return service.startswith(f"{namespace}/")


STATES = [None, *State]
INDEXED = [  # state, service, key, due before: what an index serves
    (state, service, key, due)
    for state in STATES
    for service, key, due in [
        ("sms", None, None),
        ("mail", "a", None),
        (None, "a", None),
        ("mail", None, 0),
        ("mail", None, 2 * HOUR),
        ("sms", "b", 2 * HOUR),
        ("nobody", None, None),
        (None, "nobody", None),
    ]
]
FILTERS = [
    *INDEXED,
    *[(state, None, None, due) for state in STATES for due in (None, 0, 2 * HOUR)],
]


def made(parts, at):
    """A filter of these parts, the last of which is relative to now."""
    state, service, key, due = parts
    return Filter(state, service, key, None if due is None else at + due)


async def everything_that_a_registry_does(registry):
    """Each method."""
    line = Audit(1, "local", "", "service.put", "mail")
    for _ in range(2):
        await registry.put_service("fax", "{}", line)
        await registry.put_token(Token("i", "n", "d", "*", ("read",), None, 1), line)
    await registry.delete_service("fax", line)
    await registry.delete_token("i", line)
    await registry.note(line)
    for namespace in (None, "acme"):
        await registry.audit(namespace=namespace, cursor=None, limit=10)
    await registry.prune(0, 10, audit_before_ms=0)
    for times in (NotedTimes(1, 0), NotedTimes(2, 1)):
        await registry.note_times(times)
    await registry.noted_times()
    await registry.version()
    await registry.services()
    await registry.tokens()


async def everything_that_a_store_does(store):
    """Each method, with every filter and every way that an attempt can end."""
    epochs = await store.take(ALL, "n1")
    await various(store, epochs)
    for on_conflict in ("reject", "replace", "keep"):
        again = [later(store, key="k"), later(store)]
        await insert(store, *again, on_conflict=on_conflict, epochs=epochs)
        await insert(store, *again, on_conflict=on_conflict, again=True)
    at = now(store)
    for _ in range(2):
        await store.insert(
            [request(later(store, key="named")), request(later(store), "r2")], epochs
        )
    await everything_that_a_registry_does(store.registry)
    await store.due([Window("mail", 10, 10), Window("sms", 10, 10)], ALL, at, at + HOUR)
    await store.due([Window("mail", 10, 10)], [1, 2], at, at + HOUR)
    await store.claim([wanted(later(store))], "n1", epochs)
    for event in EVENTS:
        (running,) = await run(store, epochs, task(store))
        await store.renew([running.attempt_key])
        await store.running_by_id([running.id])
        await store.running([0])
        await store.running([0], until_ms=at)
        await store.accept([lease(running, at + HOUR)])
        await store.record([ending(running, event)])
        await store.attempts(running.id)
        await store.cancel([running.id])
        await store.reschedule([running.id], at)
        await store.get([running.id])
    for parts, final in itertools.product(FILTERS, (None, True, False)):
        await store.find(made(parts, at), final=final, cursor=None, limit=3)
        await store.find(made(parts, at), final=final, cursor="8" * 32, limit=3)
        which = made(parts, at)._replace(namespace="acme")
        await store.find(which, final=final, cursor=None, limit=3)
    for parts, namespace in itertools.product(INDEXED, (None, "", "acme")):
        which = made(parts, at)._replace(namespace=namespace)
        await changed(store.cancel_where(which, 1))
        await changed(store.reschedule_where(which, at + HOUR, 1))
    (final,) = await ended(store, epochs, task(store, key="r"))
    for force in (False, True):
        await store.replay([replay_of(store, final)], force=force)
    nightly = schedule(store)
    await put(store, nightly)
    await fire(store, [firing(store, nightly, at)])
    await store.schedules.read()
    await store.schedules.timings()
    await store.schedules.delete(nightly.name, AUDIT)
    await stored(store, task(store, deadline_at_ms=at - 1))
    assert len(await store.expire(ALL, 10)) == 1
    await store.prune(at - HOUR, 10)
    await store.services(at)
    await store.counts()
    await store.owners()
    await store.give_up(epochs)
    await store.take(ALL, "n2", owner_is_dead=True)
