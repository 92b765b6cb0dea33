"""Helpers of both SQL stores: rows become tasks, pages are merged, batches are split.

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
    KeyConflict,
    Page,
    RepeatedRequest,
    State,
    Task,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence

    from tickwheel.values.task import Lease, Submission

    Answer = Task | KeyConflict | RepeatedRequest | None

BYTES_PER_ROW = 2048  # deleted bytes that count as a row
STATES = {str(state): state for state in State}
LAST_NAME = "\U0010ffff" * 2  # after every name
BODY, ERROR, RESULT = map(Task._fields.index, ("body", "error", "result_body"))
LOGGED_ERROR = Attempt._fields.index("error")
MISSING = [Task._field_defaults.get(name) for name in Task._fields]  # live rows have no result


inserted = attrgetter(*(field.name for field in FIELDS if field.given))
"""Return the columns that an insert gives."""


def task_of(row: Sequence[Any]) -> Task:
    """Return a task from a row in the order of Task's fields."""
    return Task._make((*row[:4], STATES[row[4]], *row[5:], *MISSING[len(row) :]))


def attempt_of(row: Sequence[Any]) -> Attempt:
    """Return an attempt from a row in the order of Attempt's fields."""
    return Attempt._make((*row[:2], Event(row[2]), *row[3:]))


def rounds(keys: Iterable[Hashable]) -> list[list[int]]:
    """Split positions into rounds with each key at most once; the first of a key comes first."""
    seen: dict[Hashable, int] = {}
    turns: list[list[int]] = []
    for place, key in enumerate(keys):
        turn = seen.get(key, 0)
        seen[key] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(place)
    return turns


def may_contain(state: State | None, table: str) -> bool:
    """Return whether tasks of this state can be in this table."""
    return state is None or (state in FINAL) == (table == "backlog")


def verdicts_on(
    ids: Iterable[str], won: Container[str], state: State, states: Mapping[str, str]
) -> list[Verdict | None]:
    """Return for each id whether it won, and its state; None for an unknown id."""
    return [
        Verdict(one, True, state)
        if one in won
        else Verdict(one, False, STATES[states[one]])
        if one in states
        else None
        for one in ids
    ]


def last_leases(leases: Iterable[Lease]) -> list[Lease]:
    """Return the last lease of each attempt, and where its message is if any of them says so."""
    found: dict[tuple[str, int, int], Lease] = {}
    for lease in leases:
        before = found.get(lease[:3], lease)
        found[lease[:3]] = lease._replace(delivered_to=lease.delivered_to or before.delivered_to)
    return list(found.values())


def late_deliveries(leases: Sequence[Lease], answers: Sequence[bool | None]) -> list[Lease]:
    """Return the leases of messages whose attempts had ended before."""
    return [
        lease
        for lease, still in zip(leases, answers, strict=True)
        if still is False and lease.delivered_to is not None
    ]


class PageFill:
    """The rest of a page: called with each row, it returns whether the page is full now."""

    def __init__(self, most: int, weight: Callable[[Sequence[Any]], int] | None = None) -> None:
        self._left = most
        self._weight = weight or bytes_of

    @property
    def full(self) -> bool:
        return self._left <= 0

    def __call__(self, row: Sequence[Any]) -> bool:
        self._left -= self._weight(row)
        return self.full


def count_fitting(sizes: Iterable[int], most: int) -> int:
    """Return how many fit: the first, and the next ones while they are `most` bytes together."""
    totals = enumerate(accumulate(islice(sizes, 1, None)), 1)
    return next((number for number, total in totals if total > most), sys.maxsize)


def bytes_of(row: Sequence[Any]) -> int:
    """Return how many bytes of a page a task's row fills."""
    result = len((len(row) > RESULT and row[RESULT]) or "")
    return len(row[BODY]) + result + error_bytes(row[ERROR])


def prune_batch(rows: Sequence[tuple[str, int, int]], most: int) -> tuple[list[str], bool]:
    """Return the final tasks to delete in one transaction, from rows of (id, attempts, bytes).

    At least the first; and whether it has more attempts than one transaction may delete. Then it
    goes alone, and its attempts go first, in parts.
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
    """Return the rows that the deletion of a final task counts as."""
    return 1 + attempts + size // BYTES_PER_ROW


def merge_pages(pages: list[tuple[list[Task], str | None]], limit: int, most_bytes: int) -> Page:
    """Merge pages into one, newest first; a task in two pages counts as in the last one.

    The page ends where the first of them stopped, since nothing is known beyond, or where it is
    full.
    """
    stop = max((stop for _, stop in pages if stop is not None), default=None)
    found = {task.id: task for tasks, _ in pages for task in tasks}
    tasks = sorted(found.values(), key=lambda task: task.id, reverse=True)
    if stop is not None:
        tasks = [task for task in tasks if task.id >= stop]
    full = PageFill(most_bytes)
    limit = next((count for count, task in enumerate(tasks[:limit], 1) if full(task)), limit)
    if len(tasks) > limit:
        return Page(tasks[:limit], tasks[limit - 1].id)
    return Page(tasks, stop)


def namespace_range(namespace: str) -> tuple[str, str]:
    """Return the half-open range of all names in a namespace."""
    return f"{namespace}/", f"{namespace}0"  # "0" is the next character after "/"


def schedule_range(namespace: str | None, after: str) -> tuple[str, str, bool]:
    """Return the bounds of the names of schedules, and whether every name between them matches.

    If not, names with a namespace do not match.
    """
    if not namespace:
        return after, LAST_NAME, namespace is None
    first, before = namespace_range(namespace)
    return max(after, first), before, True


def request_name(submission: Submission) -> tuple[str, str] | None:
    """Return the caller and key of an idempotent submission, or None."""
    named = submission.idempotency
    return None if named is None else (named.caller, named.key)


def answered_task_id(submission: Submission, answer: Answer) -> str | None:
    """Return the id of the task in the answer to a submission; None if it is refused."""
    if isinstance(answer, Task):
        return answer.id
    if isinstance(answer, KeyConflict) and submission.on_conflict == "keep":
        return answer.holder.id
    return None


def answer_repeated(
    submission: Submission, digest: str, task: Task | None
) -> Task | RepeatedRequest:
    """Return the answer to a repeated request; the first had this digest and this task."""
    named = submission.idempotency
    assert named is not None
    if named.digest != digest:
        return RepeatedRequest(False, None)
    if task is not None and task.id == submission.task.id:
        return own_task(submission, task)  # the same submission again: its answer was lost
    return RepeatedRequest(True, task)


def own_task(submission: Submission, stored: Task) -> Task:
    """Return the task that a submission stored; `stored` was read without its payload."""
    return stored._replace(body=submission.task.body)


def token_row(token: Token) -> tuple[Any, ...]:
    """Return the columns of a token."""
    return *token[:4], " ".join(token.scopes), *token[5:]


def token_of(row: Sequence[Any]) -> Token:
    """Return a token from a row in the order of Token's fields."""
    return Token._make((*row[:4], tuple(row[4].split()), *row[5:]))


def audit_page(rows: Sequence[Sequence[Any]], limit: int) -> tuple[list[Audit], int | None]:
    """Return a page of the audit log, and a cursor if more lines follow."""
    lines = [Audit._make(row[1:]) for row in rows[:limit]]
    return lines, rows[limit - 1][0] if len(rows) > limit else None
