"""The columns of a task, derived from the table of its fields. Pure text, no connection.

A statement that copies rows names the columns that differ, and takes the rest from these lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.values.task import FIELDS

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from tickwheel.values.task import Field


def column_of(field: Field) -> str:
    """Return the column of a field."""
    return field.column or field.name


KINDS = {column_of(field): field.kind for field in FIELDS}  # types on PostgreSQL
LIVE = [column_of(field) for field in FIELDS if field.live]
KEPT = [column_of(field) for field in FIELDS if field.live and field.final]
GIVEN = [column_of(field) for field in FIELDS if field.given]
REPLACED = [column_of(field) for field in FIELDS if field.replaced]
REPLAYED = [column_of(field) for field in FIELDS if field.replayed]
FIRED = [column_of(field) for field in FIELDS if field.fired]


def column_list(columns: Iterable[str], table: str = "", **values: str) -> str:
    """Return columns as a statement lists them: "t.id, t.service".

    `values` take the place of columns: `column_list(KEPT, "t", state="'failed'")`.
    """
    prefix = f"{table}." if table else ""
    return ", ".join(values.get(name, f"{prefix}{name}") for name in columns)


def insert_values(copied: Container[str], table: str, **values: str) -> str:
    """Return what an insert gives: values, columns copied from a table, and NULL for the rest."""
    rest = {name: "NULL" for name in GIVEN if name not in copied}
    return column_list(GIVEN, table, **(rest | values))


def final_columns(null: str = "NULL", **values: str) -> str:
    """Return the columns of a final task in the order of all fields; `null` may name the type.

    `values` take the place of columns.
    """
    missing = {
        field.name: null.format(name=field.name, kind=field.kind)
        for field in FIELDS
        if not field.final
    }
    return column_list(map(column_of, FIELDS), **(missing | values))


def replacements(source: str) -> str:
    """Return the assignments with which a new task takes the place of the stored one."""
    return ", ".join(f"{name} = {source}.{name}" for name in REPLACED)
