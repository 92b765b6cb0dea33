"""Statements on PostgreSQL that depend on a filter: lists, and walks along unclaimed tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.durable.store import ERROR_WEIGHT
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.rows import namespace_range
from tickwheel.values.task import State

if TYPE_CHECKING:
    from tickwheel.values.task import Filter


class Values:
    """The values of a composed statement, each with its number."""

    def __init__(self, *first: Any) -> None:
        self.list = [*first]

    def add(self, value: Any) -> str:
        """Return the placeholder of the value in the statement."""
        self.list.append(value)
        return f"${len(self.list)}"


def tag_condition(filter: Filter, values: Values) -> str:
    """Return the condition of a filter's tags, on a table called `t`."""
    if not filter.tags:
        return "true"
    return f"string_to_array(t.tags, ' ') @> {values.add([*filter.tags])}::text[]"


def matching(filter: Filter, now_ms: int, values: Values) -> str:
    """Return the condition of a filter, on a table called `t`."""
    conditions = [tag_condition(filter, values)]
    if filter.service is not None:
        conditions.append(f"t.service = {values.add(filter.service)}")
    if filter.key is not None:  # with `=`, an order by key and id would be one by id
        conditions.append(f"t.key = ANY (ARRAY[{values.add(filter.key)}])")
    if filter.namespace:
        low, high = map(values.add, namespace_range(filter.namespace))
        conditions.append(f"t.service >= {low} AND t.service < {high}")
    elif filter.namespace is not None:
        conditions.append("strpos(t.service, '/') = 0")
    if filter.unchanged_since_ms is not None:
        # A later time than now is from before the clock was set back, for example by a failover.
        since, now = values.add(filter.unchanged_since_ms), values.add(now_ms)
        conditions.append(f"(t.updated_at_ms < {since} OR t.updated_at_ms > {now})")
    if filter.due_before_ms is not None:
        conditions.append(f"t.due_at_ms < {values.add(filter.due_before_ms)}")
    if filter.due_after_ms is not None:
        conditions.append(f"t.due_at_ms >= {values.add(filter.due_after_ms)}")
    if filter.state in (State.DELAY, State.READY):
        side = ">" if filter.state is State.DELAY else "<="
        conditions.append(f"t.state = 'delay' AND t.due_at_ms {side} {values.add(now_ms)}")
    elif filter.state is not None:
        conditions.append(f"t.state = {values.add(str(filter.state))}")
    return " AND ".join(conditions)


def _columns_with_sizes(table: str, order: str) -> str:
    """Return the columns of a list, preceded by the bytes so far and the bytes of the row."""
    size = f"{sql.BYTES[table]} + {ERROR_WEIGHT} * coalesce(octet_length(t.error), 0)"
    return f"""
        sum({size}) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) AS total, {size} AS bytes,
        {sql.COLUMNS[table]}"""


class Place(NamedTuple):
    """The position of a walk along the unclaimed tasks."""

    service: str = ""
    shard: int = -1
    due_at_ms: int = -1
    id: str = "0" * 32


def select_unclaimed(
    filter: Filter, now_ms: int, limit: int, place: Place, moved_ms: int | None = None
) -> tuple[str, list[Any]]:
    """Return the statement for the next unclaimed tasks that match a filter, and its values.

    It walks along the index of keys or of due times, shard by shard: the order decides which. Its
    columns are those of a place, and the payload's bytes, null if the task does not have the tags:
    a statement reads at most `limit` tasks, however few have them. `moved_ms`: only tasks due at
    another time.
    """
    values = Values()
    untagged = filter._replace(tags=())
    chosen = f"FROM task t WHERE t.state = 'delay' AND {matching(untagged, now_ms, values)}"
    if moved_ms is not None:
        chosen += f" AND t.due_at_ms <> {values.add(moved_ms)}"
    most = f"LIMIT {values.add(limit)}::bigint"
    size = f"CASE WHEN {tag_condition(filter, values)} THEN octet_length(t.payload) END"
    columns = f"SELECT t.service, t.shard, t.due_at_ms, t.id, {size}"
    if filter.key is not None:
        chosen += f" AND t.service > {values.add(place.service)}"
        return f"{columns} {chosen} ORDER BY t.key, t.service {most}", values.list
    shard, due, last = (
        f"{values.add(part)}::{kind}"
        for part, kind in zip(place[1:], ("integer", "bigint", "uuid"), strict=True)
    )
    here = f"CASE WHEN s.shard = {shard} THEN {{}} ELSE {{}} END"
    start = f"""({here.format(due, "-1")}, {here.format(last, f"'{Place().id}'::uuid")})"""
    statement = f"""
        SELECT t.* FROM (SELECT shard FROM shard WHERE shard >= {shard} ORDER BY shard) s
        CROSS JOIN LATERAL (
            {columns} {chosen} AND t.shard = s.shard AND (t.due_at_ms, t.id) > {start}
            ORDER BY t.due_at_ms, t.id {most}
        ) t {most}
    """
    return statement, values.list


def select_due(filter: Filter, low_ms: int, high_ms: int, values: Values, most: int) -> str:
    """Return the statement for the ids of up to `most` tasks in a range of due times.

    It reads an index: that of the service, shard by shard, or that of times.
    """
    limit = f"LIMIT {values.add(most)}::bigint"
    low, high = (f"{values.add(at)}::bigint" for at in (low_ms, high_ms))
    if filter.service is None:
        at = "t.due_at_ms + 0"  # the expression of the index of times
        return f"""
            SELECT t.id FROM task t WHERE {at} >= {low} AND {at} < {high} ORDER BY {at} {limit}
        """
    return f"""
        SELECT d.id FROM shard s CROSS JOIN LATERAL (
            SELECT t.id FROM task t
            WHERE t.service = {values.add(filter.service)} AND t.shard = s.shard
                AND t.due_at_ms >= {low} AND t.due_at_ms < {high}
            ORDER BY t.due_at_ms, t.id {limit}
        ) d {limit}
    """


def count_due(filter: Filter, due: tuple[int, int], most: int) -> tuple[str, list[Any]]:
    """Return the statement that counts the tasks in a range of due times, up to `most`."""
    values = Values()
    return f"SELECT count(*) FROM ({select_due(filter, *due, values, most)}) f", values.list


def find_due(
    filter: Filter,
    due: tuple[int, int],
    *,
    now_ms: int,
    before: str,
    scan: int,
    limit: int,
    most_bytes: int,
) -> tuple[str, list[Any]]:
    """Return the statement of `find` for tasks that are few in their range of due times.

    `ORDER BY t.id` makes the planner use the primary key; PostgreSQL 18 may skip-scan `task_due`
    without it.
    """
    values = Values()
    where = matching(filter, now_ms, values)
    order = "t.id DESC"
    statement = f"""
        WITH few AS MATERIALIZED (
            SELECT {sql.SHOWN} FROM task t
            WHERE t.id = ANY (ARRAY({select_due(filter, *due, values, scan)})) ORDER BY t.id
        )
        SELECT NULL::uuid AS stop, f.* FROM (
            SELECT {_columns_with_sizes("task", order)} FROM few t
            WHERE t.id < {values.add(before)}::uuid AND {where}
            ORDER BY {order} LIMIT {values.add(limit)}::bigint
        ) f
        WHERE f.total - f.bytes < {values.add(most_bytes)}::bigint
    """
    return statement, values.list


def find(
    table: str, filter: Filter, *, now_ms: int, before: str, scan: int, limit: int, most_bytes: int
) -> tuple[str, list[Any]]:
    """Return the statement for a list, and its values: the matches among the next `scan` rows.

    Newest first, up to the row that reaches `most_bytes`, errors included; of later rows it reads
    only the sizes. The first column is where the scan ended if there may be more, else null; the
    next two are the bytes up to and including a row, and those of the row.
    """
    values = Values()
    where = matching(filter, now_ms, values)
    range_ = f"t.id < {values.add(before)}::uuid"
    most = f"LIMIT {values.add(limit)}::bigint"
    fits = f"f.total - f.bytes < {values.add(most_bytes)}::bigint"
    order = "t.id DESC"
    if table == "task" and filter.key is not None:  # at most one per service
        statement = f"""
            WITH keyed AS MATERIALIZED (
                SELECT {sql.SHOWN} FROM task t WHERE t.key = {values.add(filter.key)}
            )
            SELECT NULL::uuid AS stop, f.* FROM (
                SELECT {_columns_with_sizes(table, order)} FROM keyed t WHERE {range_} AND {where}
                ORDER BY {order} {most}
            ) f
            WHERE {fits}
        """
        return statement, values.list
    if filter.key is not None:
        range_ += f" AND t.key = ANY (ARRAY[{values.add(filter.key)}])"
        order = "t.key DESC, t.id DESC"
    statement = f"""
        WITH stop AS MATERIALIZED (
            SELECT (
                SELECT t.id FROM {table} t WHERE {range_}
                ORDER BY {order} LIMIT 1 OFFSET {values.add(scan - 1)}::bigint
            ) AS id
        )
        SELECT s.id AS stop, f.* FROM stop s LEFT JOIN (
            SELECT {_columns_with_sizes(table, order)} FROM {sql.TABLES[table]} t
            WHERE {range_} AND t.id >= coalesce((SELECT id FROM stop), '{"0" * 32}'::uuid)
                AND {where}
            ORDER BY {order} {most}
        ) f ON {fits}
    """
    return statement, values.list
