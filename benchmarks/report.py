"""Format tables in Markdown, padded so that they are readable in a terminal, too."""

from __future__ import annotations

from cache import Growth
from goals import Goal, power
from results import OPERATIONS, SETTLED, WORKED, Results

COLUMNS = (
    "schedule",
    "schedule_constant",
    "cancel",
    "churn",
    "expire",
    "drain",
    "bytes",
    "pause_ms",
)
BATCHED = {"schedule": "schedule_many", "cancel": "cancel_many"}
MISSING_CELL = "–"

Row = list[str]


def size_table(results: Results, size: int) -> str:
    """Format every contestant at one size: the figure, and its ratio to tickwheel's."""
    rows: list[Row] = [["", *(OPERATIONS[column] for column in COLUMNS)]]
    for name, label in results.labels.items():
        if name in results.missing:
            rows.append([label, "not here", *[MISSING_CELL] * (len(COLUMNS) - 1)])
        elif name in results.runs[size]:
            rows += contestant_rows(results, size, name)
    return table(rows)


def contestant_rows(results: Results, size: int, name: str) -> list[Row]:
    """Return a contestant's row, and further rows for batches and settled operations."""
    plain = {column: column for column in COLUMNS}
    rows = [[results.labels[name], *cells(results, size, name, plain)]]
    if results.figure(size, name, "schedule_many") is not None:
        rows.append(["– in batches of 1,000", *cells(results, size, name, BATCHED)])
    if name in results.settling:
        settled = {column: column + SETTLED for column in COLUMNS}
        rows.append([f"– {results.settling[name]}", *cells(results, size, name, settled)])
    if results.figure(size, name, "schedule" + WORKED) is not None:
        worked = {column: column + WORKED for column in COLUMNS}
        rows.append(["– work of both threads", *cells(results, size, name, worked)])
    return rows


def cells(results: Results, size: int, name: str, operations: dict[str, str]) -> Row:
    """Return one cell per column; a column may show another operation's figure."""
    return [
        cell(
            results.figure(size, name, operations.get(column, "")),
            results.figure(size, "native", column),
        )
        for column in COLUMNS
    ]


def cell(figure: float | None, ours: float | None) -> str:
    """Format a figure and its ratio, as in `3,356 (41 ×)`."""
    if figure is None:
        return MISSING_CELL
    shown = f"{figure:,.0f}" if figure >= 10 else f"{figure:.1f}"
    return shown if not ours else f"{shown} ({ratio(figure / ours)} ×)"


def ratio(value: float) -> str:
    """Format a ratio with two significant digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def goal_table(all_goals: list[Goal]) -> str:
    """Format the goals with their figures and verdicts."""
    rows = [["goal", "figures", ""]]
    return table(rows + [[goal.text, goal.figures, goal.verdict] for goal in all_goals])


def growth_table(growth: list[Growth]) -> str:
    """Format instructions and simulated cache misses per operation, by size."""
    rows = [
        [
            "pending",
            "schedule",
            "cancel",
            "expire",
            "churn, first level",
            "churn, last level",
            "expire, first level",
            "expire, last level",
        ]
    ]
    for one in growth:
        instructions = (
            one.schedule_instructions,
            one.cancel_instructions,
            one.expire_instructions,
        )
        misses = (
            one.churn_first_misses,
            one.churn_last_misses,
            one.expire_first_misses,
            one.expire_last_misses,
        )
        rows.append(
            [
                power(one.size),
                *[MISSING_CELL if count is None else f"{count:.0f}" for count in instructions],
                *[MISSING_CELL if count is None else f"{count:.2f}" for count in misses],
            ]
        )
    return table(rows)


def table(rows: list[Row], left: int = 1) -> str:
    """Format a padded Markdown table: `left` columns left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = [rows[0], rule, *rows[1:]]
    return "\n".join(f"| {' | '.join(pad(line, widths, left))} |" for line in lines)


def pad(row: Row, widths: list[int], left: int) -> Row:
    """Return the row's values, padded to the width of their columns."""
    return [
        value.ljust(width) if i < left else value.rjust(width)
        for i, (value, width) in enumerate(zip(row, widths, strict=True))
    ]
