"""Changes in the user's own transaction: statements on the user's connection.

- A submitted task exists once that transaction commits. Its shard is that of its key, or any, and
  no shard row is locked, so the transaction may stay open for long. It holds only the task's key
  and idempotency key, if it has them.
- A cancelled or rescheduled task is locked until then: no node claims it.
- A change is a generator of statements; each one is answered with its first row. `within` and
  `within_now` execute them, on any kind of connection.
- A statement names the schema of its table, since the connection has the user's search_path. Errors
  of that connection are raised unchanged.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from tickwheel.durable.stores import columns
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres.drivers import blocking_driver_of, driver_of
from tickwheel.durable.stores.postgres.manual import at_time_of
from tickwheel.durable.stores.postgres.pool import valid_ids
from tickwheel.durable.stores.rows import (
    BODY,
    answer_repeated,
    answered_task_id,
    inserted,
    task_of,
    verdicts_on,
)
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import (
    Cancel,
    CancelKey,
    KeyConflict,
    RepeatedRequest,
    Reschedule,
    State,
    Submission,
    Task,
    Verdict,
)

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.values.task import Change, Idempotency

Row = Sequence[Any] | Mapping[str, Any]
Statement = tuple[str, list[Any]]
Answer = Task | KeyConflict | RepeatedRequest
Verdicts = list[Verdict | None]
Steps = Generator[Statement, Row | None, Answer | Verdicts]

TURNS = 8
# Ids are text: drivers differ in their type for uuids.
_AS_ID = {"uuid": "text::uuid"}
_IDS = {
    name: f"translate({name}::text, '-', '') AS {name}"
    for name, kind in columns.KINDS.items()
    if kind == "uuid"
}
RETURNED = columns.column_list(columns.LIVE, **_IDS)
FINAL_RETURNED = columns.column_list(sql.FINAL.split(", "), **_IDS)
# now() is the time of the transaction; without one, each statement has its own.
BEGAN = "SELECT extract(epoch FROM now())::text AS began"
USE = f"""
    WITH used AS (
        INSERT INTO {{schema}}.idempotency (caller, key, digest, task_id, used_at_ms)
        SELECT {{0}}::text, {{1}}::text, {{2}}::text, {{3}}::text::uuid,
            floor({sql.EPOCH} * 1000)::bigint
        WHERE extract(epoch FROM now())::text = {{4}}::text
        ON CONFLICT (caller, key) DO NOTHING RETURNING true
    )
    SELECT extract(epoch FROM now())::text AS began, EXISTS (SELECT 1 FROM used) AS used
"""  # noqa: S608
USED = """
    SELECT digest, translate(task_id::text, '-', '') AS task_id FROM {schema}.idempotency
    WHERE caller = {0}::text AND key = {1}::text
"""
USED_FOR = """
    UPDATE {schema}.idempotency SET task_id = {0}::text::uuid
    WHERE caller = {1}::text AND key = {2}::text RETURNING true AS used
"""
UNUSED = """
    DELETE FROM {schema}.idempotency WHERE caller = {0}::text AND key = {1}::text
    RETURNING true AS unused
"""
LIVE_BY_ID = f"SELECT {RETURNED} FROM {{schema}}.task WHERE id = {{0}}::text::uuid"  # noqa: S608
FINAL_BY_ID = f"SELECT {FINAL_RETURNED} FROM {{schema}}.backlog WHERE id = {{0}}::text::uuid"  # noqa: S608
_AS_TEXT = "translate(t.id::text, '-', '')"
_THESE = "::text[]::uuid[]"


def _returning_ids(ctes: str, change: str) -> str:
    """Return a statement that returns the changed ids in one row."""
    ids = f"SELECT ARRAY(SELECT {_AS_TEXT} FROM changed t) AS won"  # noqa: S608
    return f"WITH {ctes}, changed AS ({change} RETURNING t.id) {ids}"


CANCEL = _returning_ids(*sql.cancelling(None, "{0}::text[]", "{schema}."))
RESCHEDULE = _returning_ids(*sql.rescheduling(None, "{0}::text[]", "{1}::bigint", "{schema}."))
STATES = f"""
    SELECT ARRAY(
        SELECT {_AS_TEXT} || ' ' || t.state FROM (
            (SELECT id, state FROM {{schema}}.task WHERE id = ANY ({{0}}{_THESE}) ORDER BY id)
            UNION ALL SELECT id, state FROM {{schema}}.backlog WHERE id = ANY ({{1}}{_THESE})
        ) t
    ) AS states
"""  # noqa: S608
BY_KEY = f"""
    SELECT ARRAY(
        SELECT {_AS_TEXT} FROM {{schema}}.task t
        WHERE t.key = {{0}}::text AND ({{1}}::text IS NULL OR t.service = {{2}}::text)
    ) AS ids
"""  # noqa: S608
_HOLDER = sql.by_key("(SELECT key FROM given)", "(SELECT service FROM given)")
# Not DO UPDATE … WHERE: that locks the holder of the key also where it leaves it as it is, and the
# end of a running task could not be written before the user's transaction ends. A task that is
# being claimed at this moment is locked nevertheless: then its own end waits, and no other.
REPLACE = f"""
    UPDATE {{table}} t SET {columns.replacements("g")}, failures = 0, error = NULL
    FROM given g
    WHERE {_HOLDER} AND t.state = 'delay' AND NOT EXISTS (SELECT 1 FROM stored)
    RETURNING {columns.column_list(columns.LIVE, "t")}
"""  # noqa: S608


def insert_statement(
    submission: Submission, schema: str, style: str = "$1"
) -> tuple[str, list[Any]]:
    """Return a statement that stores a task, and its values, for drivers of a style: "$1" or "%s".

    It returns one row: whether the task was stored (or replaced the one with its key), and the
    columns of that task, or of the task that has the key. No row means that another transaction has
    just committed or released the key: run the statement again.
    """
    if style not in {"$1", "%s"}:
        raise ValueError(f'the style of a statement is "$1" or "%s", got {style!r}')
    values: list[Any] = []
    table = f'"{schema}".task'

    def mark(value: Any, kind: str) -> str:
        values.append(value)
        return f"{'%s' if style == '%s' else f'${len(values)}'}::{kind}"

    task, replaces = submission.task, submission.on_conflict == "replace"
    kinds = [_AS_ID.get(columns.KINDS[name], columns.KINDS[name]) for name in columns.GIVEN]
    marks = ", ".join(mark(value, kind) for value, kind in zip(inserted(task), kinds, strict=True))
    if task.key is None:
        insert = f"INSERT INTO {table} ({sql.GIVEN}) VALUES ({marks})"  # noqa: S608
        return f"{insert} RETURNING true AS stored, {RETURNED}", values
    replaced = f", replaced AS ({REPLACE.format(table=table)})" if replaces else ""
    others = "UNION ALL SELECT * FROM replaced" if replaces else ""
    # A holder that was claimed since the snapshot cannot be replaced: the next statement reads it.
    keeps = " AND t.state <> 'delay'" if replaces else ""
    statement = f"""
        WITH given ({sql.GIVEN}) AS (SELECT {marks}), stored AS (
            INSERT INTO {table} ({sql.GIVEN}) SELECT {sql.GIVEN} FROM given
            ON CONFLICT (key, service) WHERE key IS NOT NULL DO NOTHING
            RETURNING {sql.LIVE}
        ){replaced}, done AS (SELECT * FROM stored {others})
        SELECT true AS stored, {RETURNED} FROM done
        UNION ALL
        SELECT false AS stored, {RETURNED} FROM {table} t
        WHERE {_HOLDER}{keeps} AND NOT EXISTS (SELECT 1 FROM done)
    """  # noqa: S608
    return statement, values


def steps(change: Change, schema: str, style: str) -> Steps:
    """Return the statements of a change, for drivers of a style."""
    match change:
        case Submission():
            return submitting(change, schema, style)
        case Cancel(ids):
            return changing(CANCEL, State.CANCELLED, ids, schema, style)
        case CancelKey(key, service):
            return cancelling_key(key, service, schema, style)
        case Reschedule(ids, due_at_ms):
            return changing(RESCHEDULE, State.DELAY, ids, schema, style, due_at_ms)


def submitting(submission: Submission, schema: str, style: str) -> Steps:
    """Yield the statements of a submit with their values; each is answered with its first row.

    The idempotency key comes first, as everywhere: the transaction that gets it stores the task. A
    refused task releases it.
    """
    named = submission.idempotency
    if named is not None:
        made = yield from use(submission, named, schema, style)
        if made is not None:
            return made
    for _ in range(TURNS):
        row = yield insert_statement(submission, schema, style)
        if row is not None:
            break
    else:
        raise StoreUnavailable(f"the key {submission.task.key!r} changes hands all the time")
    found = answer(row)
    if named is not None:
        task_id = answered_task_id(submission, found)
        if task_id is None:
            yield render_statement(UNUSED, schema, style, named.caller, named.key)
        elif task_id != submission.task.id:
            yield render_statement(USED_FOR, schema, style, task_id, named.caller, named.key)
    return found


def use(
    submission: Submission, named: Idempotency, schema: str, style: str
) -> Generator[Statement, Row | None, Task | RepeatedRequest | None]:
    """Take an idempotency key; return the answer if it was used before, else None.

    Without a transaction, the key would be taken for good before the task is stored.
    """
    [began] = columns_of((yield render_statement(BEGAN, schema, style)))
    for _ in range(TURNS):
        row = yield render_statement(USE, schema, style, *named, submission.task.id, began)
        at, took = columns_of(row)
        if at != began:
            raise ValueError(
                "idempotency_key with connection= needs a transaction: begin one first"
            )
        if took:
            return None
        row = yield render_statement(USED, schema, style, named.caller, named.key)
        if row is not None:
            digest, task_id = columns_of(row)
            # Live tasks first: a task that ends in between is then found in the backlog.
            for statement in (LIVE_BY_ID, FINAL_BY_ID):
                row = yield render_statement(statement, schema, style, task_id)
                if row is not None:
                    break
            return answer_repeated(submission, digest, None if row is None else stored_task(row))
    raise StoreUnavailable(f"the idempotency key {named.key!r} changes hands all the time")


def render_statement(text: str, schema: str, style: str, *values: Any) -> Statement:
    """Return a statement for drivers of a style, and its values."""
    marks = ["%s" if style == "%s" else f"${number}" for number in range(1, len(values) + 1)]
    return text.format(*marks, schema=f'"{schema}"'), [*values]


def changing(
    statement: str, state: State, ids: Sequence[str], schema: str, style: str, *values: Any
) -> Steps:
    """Yield the statements that bring unclaimed tasks into a state; return who won."""
    won: set[str] = set()
    states: dict[str, str] = {}
    left = sorted(valid_ids(ids))
    turns = 0
    while left and turns < TURNS:
        [changed] = columns_of((yield render_statement(statement, schema, style, left, *values)))
        won.update(changed)
        turns = 0 if changed else turns + 1  # a statement changes as many as fit: there may be more
        left = [one for one in left if one not in won]
        if left:
            [found] = columns_of((yield render_statement(STATES, schema, style, left, left)))
            states.update(one.split() for one in found)
        # Running a moment ago and unclaimed again now: it can still be changed.
        left = [one for one in left if states.get(one) == State.DELAY]
    return verdicts_on(ids, won, state, states)


def cancelling_key(key: str, service: str | None, schema: str, style: str) -> Steps:
    """Yield the statements that cancel the live tasks with a key, of one service or of all."""
    [ids] = columns_of((yield render_statement(BY_KEY, schema, style, key, service, service)))
    return (yield from changing(CANCEL, State.CANCELLED, ids, schema, style))


async def within(
    connection: Any, change: Change, schema: str, clock: Clock | None = None
) -> Answer | Verdicts:
    """Make a change on an asynchronous connection, at the time of `clock` if it is given."""
    driver = await driver_of(connection)
    work = steps(change, schema, driver.style)
    row = None
    while True:
        try:
            statement, values = work.send(row)
        except StopIteration as end:
            return cast("Answer | Verdicts", end.value)
        row = await driver.first_row(at_time_of(clock, statement), values)


def within_now(
    connection: Any, change: Change, schema: str, clock: Clock | None = None
) -> Answer | Verdicts:
    """Make a change on a blocking connection, at the time of `clock` if it is given."""
    driver = blocking_driver_of(connection)
    work = steps(change, schema, driver.style)
    row = None
    while True:
        try:
            statement, values = work.send(row)
        except StopIteration as end:
            return cast("Answer | Verdicts", end.value)
        row = driver.first_row(at_time_of(clock, statement), values)


def answer(row: Row) -> Task | KeyConflict:
    """Return the answer in the row of an insert."""
    stored, *values = columns_of(row)
    task = stored_task(values)
    return task if stored else KeyConflict(task)


def stored_task(row: Row) -> Task:
    """Return the task of a row."""
    values = columns_of(row)
    values[BODY] = bytes(values[BODY])
    return task_of(values)


def columns_of(row: Row | None) -> list[Any]:
    """Return the values of an existing row; some drivers return them by name."""
    assert row is not None
    return [*(row.values() if isinstance(row, Mapping) else row)]
