"""What the stores on SQL do alike: rows become tasks, pages are merged, doubles wait their turn.

Pure: no connection, no statement.
"""

from __future__ import annotations

import sys
from itertools import accumulate, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from tickwheel.durable.registry import Audit, Token
from tickwheel.durable.store import error_bytes
from tickwheel.values.task import (
    FIELDS,
    FINAL,
    Attempt,
    Event,
    Page,
    Repeated,
    State,
    Taken,
    Task,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence

    from tickwheel.values.task import Lease, Submission

    Answer = Task | Taken | Repeated | None

PAGE = 2048  # bytes that count as a row when they are deleted
STATES = {str(state): state for state in State}
LAST_NAME = "\U0010ffff" * 2  # no name is behind it
BODY, ERROR, RESULT = map(Task._fields.index, ("body", "error", "result_body"))
MISSING = [Task._field_defaults.get(name) for name in Task._fields]  # live rows have no result


inserted = attrgetter(*(field.name for field in FIELDS if field.given))
"""Return the columns that an insert gives."""


def task_of(row: Sequence[Any]) -> Task:
    """Return a row of columns in the order of Task's fields as a task."""
    return Task._make((*row[:4], STATES[row[4]], *row[5:], *MISSING[len(row) :]))


def attempt_of(row: Sequence[Any]) -> Attempt:
    """Return a row of columns in the order of Attempt's fields as an attempt."""
    return Attempt._make((*row[:2], Event(row[2]), *row[3:]))


def rounds(keys: Iterable[Hashable]) -> list[list[int]]:
    """Split places so that each key appears once in a round; its first one is in the first."""
    seen: dict[Hashable, int] = {}
    turns: list[list[int]] = []
    for place, key in enumerate(keys):
        turn = seen.get(key, 0)
        seen[key] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(place)
    return turns


def may_hold(state: State | None, table: str) -> bool:
    """Say whether tasks of this state can be in this table."""
    return state is None or (state in FINAL) == (table == "backlog")


def verdicts_on(
    ids: Iterable[str], won: Container[str], state: State, states: Mapping[str, str]
) -> list[Verdict | None]:
    """Say for each id whether it won, and the state that it has; None for one that is unknown."""
    return [
        Verdict(one, True, state)
        if one in won
        else Verdict(one, False, STATES[states[one]])
        if one in states
        else None
        for one in ids
    ]


def last_of_each(leases: Iterable[Lease]) -> list[Lease]:
    """Return the last lease of each attempt."""
    return list({lease[:3]: lease for lease in leases}.values())


class Filling:
    """A page that fills: called with a row of it, says whether the page is full with that one."""

    def __init__(self, most: int, weight: Callable[[Sequence[Any]], int] | None = None) -> None:
        self._left = most
        self._weight = weight or bytes_of

    @property
    def full(self) -> bool:
        return self._left <= 0

    def __call__(self, row: Sequence[Any]) -> bool:
        self._left -= self._weight(row)
        return self.full


def fitting(sizes: Iterable[int], most: int) -> int:
    """Return how many fit: the first, and those behind it that are `most` bytes together."""
    totals = enumerate(accumulate(islice(sizes, 1, None)), 1)
    return next((number for number, total in totals if total > most), sys.maxsize)


def bytes_of(row: Sequence[Any]) -> int:
    """Return how much of a page a task fills, whose row this is."""
    result = len((len(row) > RESULT and row[RESULT]) or "")
    return len(row[BODY]) + result + error_bytes(row[ERROR])


def turn_of(rows: Sequence[tuple[str, int, int]], most: int) -> tuple[list[str], bool]:
    """Return which final tasks to delete in one turn, of rows of id, attempts and bytes.

    At least the first; then whether it has more attempts than a turn may take: it goes alone, its
    attempts first, in parts.
    """
    ids: list[str] = []
    left = most
    for task_id, attempts, size in rows:
        left -= pruned_rows(attempts, size)
        if ids and left < 0:
            break
        ids.append(task_id)
    return ids, bool(rows) and rows[0][1] > most


def pruned_rows(attempts: int, size: int) -> int:
    """Return how many rows a final task counts as when it is deleted."""
    return 1 + attempts + size // PAGE


def merged(pages: list[tuple[list[Task], str | None]], limit: int, most_bytes: int) -> Page:
    """Make one page of several, newest first; a task in two of them counts as in the last.

    Beyond the place where the first of them stopped, nothing is known: there the page ends; or
    earlier, where it is full.
    """
    stop = max((stop for _, stop in pages if stop is not None), default=None)
    found = {task.id: task for tasks, _ in pages for task in tasks}
    tasks = sorted(found.values(), key=lambda task: task.id, reverse=True)
    if stop is not None:
        tasks = [task for task in tasks if task.id >= stop]
    full = Filling(most_bytes)
    limit = next((count for count, task in enumerate(tasks[:limit], 1) if full(task)), limit)
    if len(tasks) > limit:
        return Page(tasks[:limit], tasks[limit - 1].id)
    return Page(tasks, stop)


def names_in(namespace: str) -> tuple[str, str]:
    """Return the range, its end left out, that all names of a namespace are in."""
    return f"{namespace}/", f"{namespace}0"  # "0" is the next character after "/"


def schedules_in(namespace: str | None, after: str) -> tuple[str, str, bool]:
    """Return what the names of schedules are between, and whether any such name is one.

    Otherwise those that have a namespace are not.
    """
    if not namespace:
        return after, LAST_NAME, namespace is None
    first, before = names_in(namespace)
    return max(after, first), before, True


def name_of(submission: Submission) -> tuple[str, str] | None:
    """Return what an idempotent submission is known by, or None."""
    named = submission.idempotency
    return None if named is None else (named.caller, named.key)


def answered_with(submission: Submission, answer: Answer) -> str | None:
    """Return the id of the task that a submission is answered with; None when it is refused."""
    if isinstance(answer, Task):
        return answer.id
    if isinstance(answer, Taken) and submission.on_conflict == "keep":
        return answer.holder.id
    return None


def repeated(submission: Submission, digest: str, task: Task | None) -> Task | Repeated:
    """Return the answer to a request that was made before, with this digest, for this task."""
    named = submission.idempotency
    assert named is not None
    if named.digest != digest:
        return Repeated(False, None)
    if task is not None and task.id == submission.task.id:
        return task  # this very submission: its answer was lost
    return Repeated(True, task)


def token_row(token: Token) -> tuple[Any, ...]:
    """Return a token's columns."""
    return *token[:4], " ".join(token.scopes), *token[5:]


def token_of(row: Sequence[Any]) -> Token:
    """Return a row of columns in the order of Token's fields as a token."""
    return Token._make((*row[:4], tuple(row[4].split()), *row[5:]))


def audit_page(rows: Sequence[Sequence[Any]], limit: int) -> tuple[list[Audit], int | None]:
    """Return lines of the audit log, and the cursor when there is one more than wished for."""
    lines = [Audit._make(row[1:]) for row in rows[:limit]]
    return lines, rows[limit - 1][0] if len(rows) > limit else None
