"""Inserts on PostgreSQL: a whole batch in one commit, by COPY or by statements.

A task with a key may have to wait for a transaction that holds the key, and may then conflict with
the task that has it. So a batch with keys is a transaction of several statements; a batch without
keys is one statement. The same goes for idempotency keys, here called names of requests. All
transactions lock in one order: shards, names of requests, keys, each of them sorted.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import asyncpg  # type: ignore[import-untyped]

from tickwheel.durable.stores.columns import GIVEN
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres.pool import transaction
from tickwheel.durable.stores.rows import (
    answer_repeated,
    answered_task_id,
    inserted,
    own_task,
    request_name,
    rounds,
    task_of,
)
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import KeyConflict, RepeatedRequest, State, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tickwheel.durable.stores.postgres.pool import Connection
    from tickwheel.values.task import Idempotency, Submission

    Answers = list[Task | KeyConflict | RepeatedRequest | None]
    Settled = dict[str, Task | KeyConflict]

LOCK_MS = 50  # the wait for a key unless `patient`; otherwise the session's timeout
COPY_FROM = 32  # rows from which COPY is as fast as a statement, and then twice as fast
COPY_CHECKED_FROM = 128  # the same with epochs to check, which takes a transaction
TURNS = 8  # tries for a key that changes hands each time


def count_keyed(submissions: Sequence[Submission]) -> int:
    """Return how many submissions may have to wait for others: they have a key or a name."""
    return sum(one.task.key is not None or one.idempotency is not None for one in submissions)


async def insert(
    connection: Connection,
    submissions: Sequence[Submission],
    epochs: Mapping[int, int],
    *,
    again: bool,
    patient: bool,
) -> Answers:
    """Store tasks, all in one commit; return the answers in their order.

    Unless `patient`, tasks with keys wait only a moment for a key that another transaction holds.
    Then `Locked` is raised, and the caller has to insert them one by one.
    """

    async def insert_some(connection: Connection) -> Answers:
        work = insert_rest if again else insert_keyed
        answers = await work(connection, submissions, epochs)
        if any(
            answer is not None and answer is not one.task
            for answer, one in zip(answers, submissions, strict=True)
        ):
            await connection.execute(sql.SYNCED)  # an answer about a task that was found
        return answers

    if again or count_keyed(submissions):
        return await transaction(connection, insert_some, lock_ms=None if patient else LOCK_MS)
    return await insert_plain(connection, [one.task for one in submissions], epochs)


async def insert_rest(
    connection: Connection, submissions: Sequence[Submission], epochs: Mapping[int, int]
) -> Answers:
    """Store the tasks that are not stored yet, live or final."""
    found = await summaries(connection, [one.task.id for one in submissions])
    there = {
        one.task.id: own_task(one, found[one.task.id])
        for one in submissions
        if one.task.id in found
    }
    rest = [one for one in submissions if one.task.id not in there]
    answers = iter(await insert_keyed(connection, rest, epochs))
    return [there.get(one.task.id) or next(answers) for one in submissions]


async def insert_plain(
    connection: Connection, tasks: Sequence[Task], epochs: Mapping[int, int]
) -> Answers:
    """Store tasks without keys."""
    checked = checks(tasks, epochs)
    if len(tasks) >= (COPY_CHECKED_FROM if checked else COPY_FROM):
        with contextlib.suppress(asyncpg.UniqueViolationError, Stale):
            await copy(connection, tasks, checked)
            return [*tasks]
    shards, numbers = [*checked], [*checked.values()]
    rows = await connection.fetch(sql.INSERT, shards, numbers, *columns(tasks))
    stale = checked.keys() - {shard for (shard,) in rows}
    return [None if task.shard in stale else task for task in tasks]


async def copy(connection: Connection, tasks: Sequence[Task], checked: Mapping[int, int]) -> None:
    """Store tasks by COPY, all or none; none if an id exists or a shard is stale."""

    async def copy_rows(connection: Connection) -> None:
        await connection.copy_records_to_table("task", records=map(inserted, tasks), columns=GIVEN)

    async def copy_checked(connection: Connection) -> None:
        # The shards are locked last: a process that hangs amid a COPY, which no timeout of the
        # server ends, must not keep them from their next owner.
        await copy_rows(connection)
        if await stale_shards(connection, checked):
            raise Stale

    await (transaction(connection, copy_checked) if checked else copy_rows(connection))


class Stale(Exception):
    """A shard has another epoch now: nothing was stored, and each task must be checked."""


async def insert_keyed(
    connection: Connection, submissions: Sequence[Submission], epochs: Mapping[int, int]
) -> Answers:
    """Store tasks with and without keys and names, inside a transaction."""
    if not submissions:
        return []
    stale = await stale_shards(connection, checks([one.task for one in submissions], epochs))
    answers: Answers = [None if one.task.shard in stale else one.task for one in submissions]
    places = [at for at, answer in enumerate(answers) if answer is not None]
    if any(one.idempotency is not None for one in submissions):
        for turn in rounds(request_name(submissions[at]) or at for at in places):
            await insert_named(connection, submissions, [places[at] for at in turn], answers)
    else:
        await insert_new(connection, submissions, places, answers)
    return answers


async def insert_named(
    connection: Connection,
    submissions: Sequence[Submission],
    places: Sequence[int],
    answers: Answers,
) -> None:
    """Store tasks whose requests are new, no name twice, and note the names.

    The name comes first: the transaction that gets it stores the task. A refused task releases it.
    """
    names = {name: at for at in places if (name := request_name(submissions[at]))}
    made = await use(connection, submissions, names, answers)
    await insert_new(connection, submissions, [at for at in places if at not in made], answers)
    refused: list[tuple[str, str]] = []
    moved: list[tuple[str, str, str]] = []
    for name, at in names.items():
        if at in made:
            continue
        task_id = answered_task_id(submissions[at], answers[at])
        if task_id is None:
            refused.append(name)
        elif task_id != submissions[at].task.id:
            moved.append((*name, task_id))
    if refused:
        await connection.executemany(sql.UNUSED, refused)
    if moved:
        await connection.executemany(sql.USED_FOR, moved)


async def use(
    connection: Connection,
    submissions: Sequence[Submission],
    names: Mapping[tuple[str, str], int],
    answers: Answers,
) -> set[int]:
    """Take the names of requests and answer the repeated ones; return their positions."""
    made: set[int] = set()
    left = sorted(names)
    if not left:
        return made
    for _ in range(TURNS):
        rows = [
            (*named_by(submissions[names[one]]), submissions[names[one]].task.id) for one in left
        ]
        taken = {tuple(row) for row in await connection.fetch(sql.USE, *zip(*rows, strict=True))}
        left = [one for one in left if one not in taken]
        if left:
            found = await answers_to_repeated(connection, submissions, names, left)
            for at, answer in found.items():
                answers[at] = answer
            made |= found.keys()
            left = [one for one in left if names[one] not in made]
        if not left:
            return made
    raise StoreUnavailable(f"the idempotency key {left[0][1]!r} changes hands all the time")


async def answers_to_repeated(
    connection: Connection,
    submissions: Sequence[Submission],
    names: Mapping[tuple[str, str], int],
    left: Sequence[tuple[str, str]],
) -> dict[int, Task | RepeatedRequest]:
    """Return the answers to repeated requests by position; none if it was deleted just now."""
    rows = await connection.fetch(sql.USED, *zip(*left, strict=True))
    tasks = await summaries(connection, [row[3] for row in rows]) if rows else {}
    return {
        at: answer_repeated(submissions[at], digest, tasks.get(task_id))
        for caller, key, digest, task_id in rows
        for at in [names[caller, key]]
    }


def named_by(submission: Submission) -> Idempotency:
    """Return the name of a request that has one."""
    assert submission.idempotency is not None
    return submission.idempotency


async def summaries(connection: Connection, ids: Sequence[str]) -> dict[str, Task]:
    """Return the stored tasks of these ids, live or final, without payloads and results."""
    rows = await connection.fetch(sql.SUMMARIES, ids)
    return {row[0]: task_of(row) for row in rows}


async def insert_new(
    connection: Connection,
    submissions: Sequence[Submission],
    places: Sequence[int],
    answers: Answers,
) -> None:
    """Store tasks with and without keys, and fill in the answers of those with keys."""
    plain = [submissions[at].task for at in places if submissions[at].task.key is None]
    if plain:
        await connection.fetch(sql.INSERT, [], [], *columns(plain))
    keyed_at = [at for at in places if submissions[at].task.key is not None]
    names = [(submissions[at].task.service, submissions[at].task.key) for at in keyed_at]
    for turn in rounds(names):
        # In the order of keys: otherwise two batches could deadlock.
        ordered = sorted(turn, key=lambda number: names[number])
        settled = await settle(connection, [submissions[keyed_at[number]] for number in ordered])
        for number, answer in zip(ordered, settled, strict=True):
            answers[keyed_at[number]] = answer


async def settle(
    connection: Connection, submissions: Sequence[Submission]
) -> list[Task | KeyConflict]:
    """Store tasks with keys, no key twice, or find the tasks that have the keys."""
    answers: Settled = {}
    left = submissions
    for _ in range(TURNS):
        rows = await connection.fetch(sql.INSERT_KEYED, *columns(one.task for one in left))
        stored = {task_id for (task_id,) in rows}
        answers |= {one.task.id: one.task for one in left if one.task.id in stored}
        left = [one for one in left if one.task.id not in stored]
        if left:
            answers |= await conflicts(connection, left)
            left = [one for one in left if one.task.id not in answers]
        if not left:
            return [answers[one.task.id] for one in submissions]
    raise StoreUnavailable(f"the key {left[0].task.key!r} changes hands all the time")


async def conflicts(connection: Connection, submissions: Sequence[Submission]) -> Settled:
    """Replace the tasks that have the keys if requested, and return them; none: just gone."""
    replacing = [one.task for one in submissions if one.on_conflict == "replace"]
    done: dict[tuple[str, str | None], Task] = {}
    if len(replacing) > 1:
        # Two batches meet at the first key: the one that waited sees everything the other did.
        await connection.fetch(sql.LOCK_HOLDER, replacing[0].key, replacing[0].service)
    for _ in range(2):  # the first statement only locks a task that it had to wait for
        left = [task for task in replacing if (task.service, task.key) not in done]
        if left:
            done |= by_key(await connection.fetch(sql.REPLACE_KEYED, *columns(left)))
    keys = [one.task.key for one in submissions]
    rows = await connection.fetch(sql.HOLDERS, keys, [one.task.service for one in submissions])
    holders = by_key(rows)
    answers: Settled = {}
    for one in submissions:
        task = one.task
        name = task.service, task.key
        if name in done:
            answers[task.id] = done[name]
        elif holder := holders.get(name):
            if holder.id == task.id:
                answers[task.id] = own_task(one, holder)
            elif one.on_conflict != "replace" or holder.state is not State.DELAY:
                answers[task.id] = KeyConflict(holder)
    return answers


def by_key(rows: Iterable[Sequence[Any]]) -> dict[tuple[str, str | None], Task]:
    """Return tasks by service and key."""
    tasks = map(task_of, rows)
    return {(task.service, task.key): task for task in tasks}


def checks(tasks: Iterable[Task], epochs: Mapping[int, int]) -> dict[int, int]:
    """Return the epochs to check: those of shards in the batch."""
    return {shard: epochs[shard] for shard in {task.shard for task in tasks} if shard in epochs}


async def stale_shards(connection: Connection, checked: Mapping[int, int]) -> set[int]:
    """Return the shards that have another epoch now; the others keep theirs until the end."""
    if not checked:
        return set()
    rows = await connection.fetch(sql.OWNED, [*checked], [*checked.values()])
    return set(checked) - {shard for (shard,) in rows}


def columns(tasks: Iterable[Task]) -> list[tuple[Any, ...]]:
    """Return the columns of an insert, one array for each."""
    return list(zip(*map(inserted, tasks), strict=True))
