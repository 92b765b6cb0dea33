"""Inserts on SQLite: a whole batch in one transaction.

A task with a key may conflict with the task that has the key; a repeated request is only answered.
The writer is alone during the transaction, so nothing that it reads changes before the commit.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tickwheel.durable.stores.rows import (
    answer_repeated,
    answered_task_id,
    inserted,
    own_task,
    request_name,
    rounds,
    task_of,
)
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.durable.stores.sqlite.connection import insert_many
from tickwheel.values.task import KeyConflict, State, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tickwheel.durable.stores.sqlite.connection import Connection
    from tickwheel.values.task import RepeatedRequest, Submission

    Answers = list[Task | KeyConflict | RepeatedRequest | None]


def insert(
    connection: Connection,
    submissions: Sequence[Submission],
    epochs: Mapping[int, int],
    *,
    again: bool,
    now_ms: int,
) -> Answers:
    """Store tasks; return the answers in their order."""
    ids = [one.task.id for one in submissions]
    stored = summaries(connection, ids) if again else {}
    stale = stale_shards(connection, epochs)
    answers: Answers = [
        own_task(one, stored[one.task.id])
        if one.task.id in stored
        else (None if one.task.shard in stale else one.task)
        for one in submissions
    ]
    new = [
        place
        for place, answer in enumerate(answers)
        if answer is not None and ids[place] not in stored
    ]
    if any(one.idempotency is not None for one in submissions):
        for turn in rounds(request_name(submissions[at]) or at for at in new):
            insert_named(connection, submissions, [new[at] for at in turn], answers, now_ms)
    else:
        insert_new(connection, submissions, new, answers)
    return answers


def summaries(connection: Connection, ids: Iterable[str]) -> dict[str, Task]:
    """Return the stored tasks of these ids, live or final, without payloads and results."""
    listed = (json.dumps(list(ids)),)
    rows = connection.run(sql.LIVE_SUMMARIES, listed) + connection.run(sql.FINAL_SUMMARIES, listed)
    return {row[0]: task_of(row) for row in rows}


def stale_shards(connection: Connection, epochs: Mapping[int, int]) -> set[int]:
    """Return the shards that have another epoch now."""
    if not epochs:
        return set()
    rows = connection.run("SELECT shard, epoch FROM shard")
    return {shard for shard, epoch in rows if epochs.get(shard, epoch) != epoch}


def insert_named(
    connection: Connection,
    submissions: Sequence[Submission],
    places: Sequence[int],
    answers: Answers,
    now_ms: int,
) -> None:
    """Store tasks whose requests are new, no request twice, and note the requests."""
    names = {name: at for at in places if (name := request_name(submissions[at]))}
    used = connection.run(sql.USED, (json.dumps(list(names)),))
    tasks = summaries(connection, [row[3] for row in used]) if used else {}
    made = set()
    for caller, key, digest, task_id in used:
        at = names.pop((caller, key))
        answers[at] = answer_repeated(submissions[at], digest, tasks.get(task_id))
        made.add(at)
    insert_new(connection, submissions, [at for at in places if at not in made], answers)
    settled = [
        (*named, task_id, now_ms)
        for at in names.values()
        if (named := submissions[at].idempotency)
        and (task_id := answered_task_id(submissions[at], answers[at]))
    ]
    insert_many(connection, sql.USE, settled)


def insert_new(
    connection: Connection,
    submissions: Sequence[Submission],
    places: Sequence[int],
    answers: Answers,
) -> None:
    """Store tasks with and without keys.

    A holder is read once for all who reject or keep it: behind a large payload that takes long.
    """
    plain = [submissions[at].task for at in places if submissions[at].task.key is None]
    if plain:
        insert_many(connection, sql.INSERT, [*map(inserted, plain)])
    if len(plain) == len(places):
        return
    keyed = [at for at in places if submissions[at].task.key is not None]
    names = [(submissions[at].task.service, submissions[at].task.key) for at in keyed]
    conflicts: dict[tuple[str, str | None], KeyConflict] = {}
    for turn in rounds(names):
        unknown = []
        for number in turn:
            at, conflict = keyed[number], conflicts.get(names[number])
            if conflict is None or submissions[at].on_conflict == "replace":
                unknown.append(number)
            else:
                answers[at] = conflict
        if unknown:
            insert_keyed(connection, submissions, [keyed[number] for number in unknown], answers)
        for number in unknown:
            conflicts.pop(names[number], None)
            answer = answers[keyed[number]]
            if isinstance(answer, KeyConflict):
                conflicts[names[number]] = answer


def insert_keyed(
    connection: Connection,
    submissions: Sequence[Submission],
    places: Sequence[int],
    answers: Answers,
) -> None:
    """Store tasks with keys, no key twice, and fill in their answers."""
    connection.run("DELETE FROM temp.submission")
    insert_many(
        connection,
        sql.SUBMISSION,
        [(at, submissions[at].on_conflict, *inserted(submissions[at].task)) for at in places],
    )
    connection.run(sql.INSERT_KEYED)
    connection.run(sql.REPLACE_KEYED)
    for at, *row in connection.run(sql.HOLDERS):
        holder = task_of(tuple(row))
        replaced = submissions[at].on_conflict == "replace" and holder.state is State.DELAY
        answers[at] = own_task(submissions[at], holder) if replaced else KeyConflict(holder)
