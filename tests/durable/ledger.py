"""The ledger: the notes of worker processes, kept outside of them, and the audit that compares
them with the tables.

A worker writes a note the moment something has happened, or is about to. `at` is the
machine's monotonic clock in nanoseconds, which all processes share: notes of several are in order.
"""

import contextlib
import re
import sqlite3
import threading
from collections import Counter, defaultdict
from typing import NamedTuple

EXPLAINED = {"lost", "timed out", "not the first time", "snooze", "release"}
PATIENCE = 50.0  # seconds to wait for an expected note


class Row(NamedTuple):
    """A final task, as the backlog has it."""

    id: str
    state: str
    attempt: int
    failures: int
    due_at_ms: int
    error: str | None


class Log(NamedTuple):
    """A row of the execution log."""

    attempt: int
    event: str
    started_at_ms: int
    error: str | None


class Tables:
    """The tables, read without the scheduler."""

    def __init__(self, url):
        if url.startswith("sqlite"):
            with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
                self._read(lambda statement: database.execute(statement).fetchall())
        else:
            import psycopg

            with psycopg.connect(url) as database:
                self._read(lambda statement: database.execute(statement).fetchall())

    def _read(self, rows):
        self.live = {plain(row[0]) for row in rows("SELECT id FROM task")}
        columns = "id, state, attempt, failures, due_at_ms, error"
        final = [Row(plain(row[0]), *row[1:]) for row in rows(f"SELECT {columns} FROM backlog")]
        self.final = {row.id: row for row in final}
        assert len(final) == len(self.final), "a task is in the backlog twice"
        self.log = defaultdict(list)
        columns = "task_id, attempt, event, started_at_ms, error"
        for row in rows(f"SELECT {columns} FROM attempt ORDER BY task_id, attempt"):
            self.log[plain(row[0])].append(Log(*row[1:]))


def plain(task_id):
    """An id as Python has it: the databases write it in different ways."""
    return str(task_id).replace("-", "")


class Ledger:
    """All notes of all workers; filled by the threads that read their pipes."""

    def __init__(self):
        self._changed = threading.Condition()
        self.notes = []
        self.stored = {}  # id -> its due time
        self.runs = defaultdict(list)  # id -> notes of runs that began
        self.done = defaultdict(list)  # id -> attempts whose function returned
        self.cancelled = {}  # id -> the note that a cancel won
        self.tried = defaultdict(Counter)  # id -> verbs whose answer is not known (yet)
        self.errors = []

    def note(self, note):
        """Take a note."""
        with self._changed:
            self.notes.append(note)
            getattr(self, f"_{note['note']}")(note)
            self._changed.notify_all()

    def wait(self, condition, what, seconds=PATIENCE):
        """Return when `condition()` holds, which only a note can make true."""
        with self._changed:
            if not self._changed.wait_for(condition, seconds):
                what = what() if callable(what) else what
                raise TimeoutError(f"not within {seconds:g} s: {what}; the last: {self.notes[-3:]}")

    def ran(self, task_id):
        """How many runs of it began."""
        return len(self.runs[task_id])

    def _stored(self, note):
        self.stored[note["id"]] = note

    def _kept(self, note):
        self.stored.setdefault(note["id"], note)  # a key that was taken: its holder is the answer

    def _begun(self, note):
        self.runs[note["id"]].append(note)

    def _done(self, note):
        self.done[note["id"]].append(note["attempt"])

    def _cancelling(self, note):
        self.tried[note["id"]]["cancel"] += 1

    def _cancelled(self, note):
        self.tried[note["id"]]["cancel"] -= 1
        if note["won"]:
            self.cancelled[note["id"]] = note

    def _moving(self, note):
        self.tried[note["id"]]["move"] += 1

    def _moved(self, note):
        self.tried[note["id"]]["move"] -= 1

    def _error(self, note):
        self.errors.append(note["text"])


class Audit:
    """The proof: each check is one promise, and `figures` says how much was seen.

    - `stepped`: the wall clock was set while they ran; it may show less by the time that a task
      begins than it did when that was claimed, and the claim is what counts.
    """

    def __init__(self, ledger, tables, *, stepped=False):
        self._ledger = ledger
        self._tables = tables
        self._stepped = stepped
        self.figures = Counter()

    def run(self):
        """Check everything; return the figures."""
        assert not self._ledger.errors, self._ledger.errors[:3]
        assert not self._tables.live, f"not drained: {len(self._tables.live)} are live"
        self.no_acknowledged_task_is_lost()
        self.no_acknowledged_cancel_runs_afterwards()
        for task_id, row in self._tables.final.items():
            self.every_end_is_recorded_once(row, self._tables.log[task_id])
        for task_id, runs in self._ledger.runs.items():
            self.every_run_is_an_attempt(task_id, runs)
            self.every_second_run_is_explained(task_id, runs)
        self.no_run_is_early()
        self._count()
        return dict(self.figures)

    def no_acknowledged_task_is_lost(self):
        missing = self._ledger.stored.keys() - self._tables.final.keys()
        assert not missing, f"acknowledged and gone: {sorted(missing)[:3]} of {len(missing)}"
        for row in self._tables.final.values():
            assert row.state in ("finished", "cancelled"), row

    def no_acknowledged_cancel_runs_afterwards(self):
        for task_id, cancelled in self._ledger.cancelled.items():
            assert self._tables.final[task_id].state == "cancelled", self._tables.final[task_id]
            late = [run for run in self._ledger.runs[task_id] if run["at"] > cancelled["at"]]
            assert not late, f"cancelled by {cancelled}, and then {late}"

    def every_end_is_recorded_once(self, row, log):
        """Attempts are numbered without a gap, and only the last one has finished."""
        assert [one.attempt for one in log] == list(range(1, row.attempt + 1)), (row, log)
        before, last = ([one.event for one in log[:-1]], log[-1]) if log else ([], None)
        if row.state == "finished":
            assert last is not None
            assert last.event == "finish", (row, log)
            # A finished task has run, according to its own note.
            assert row.attempt in self._ledger.done[row.id], (row, self._ledger.runs[row.id])
        else:
            assert last is None or last.event in ("retry", "snooze", "release"), (row, log)
            known = row.id in self._ledger.cancelled or self._ledger.tried[row.id]["cancel"]
            assert known, f"cancelled without a request: {row}"
        assert {"finish", "fail", "expire"}.isdisjoint(before), (row, log)
        counted = sum(one.event == "retry" for one in log)
        assert row.failures == counted, (row, log)

    def every_run_is_an_attempt(self, task_id, runs):
        attempts = [run["attempt"] for run in runs]
        assert len(attempts) == len(set(attempts)), f"one attempt ran twice: {runs}"
        recorded = {one.attempt for one in self._tables.log[task_id]}
        assert set(attempts) <= recorded, (runs, self._tables.log[task_id])

    def every_second_run_is_explained(self, task_id, runs):
        """A second run has a higher attempt, and the row of each earlier one says why it ended."""
        begun = sorted(run["attempt"] for run in runs)
        log = {one.attempt: one for one in self._tables.log[task_id]}
        for attempt in begun[:-1]:
            why = reason(log[attempt])
            assert why in EXPLAINED, f"ran again, and why? {log[attempt]}"
            self.figures[f"again: {why}"] += 1
        for attempt in self._ledger.done[task_id]:
            if log[attempt].event != "finish":
                assert reason(log[attempt]) in ("lost", "timed out"), log[attempt]
                self.figures["done, and not known to be done"] += 1

    def no_run_is_early(self):
        """By the wall clock, and the due time that was acknowledged."""
        notes = defaultdict(list)
        for note in sorted(self._ledger.notes, key=lambda note: note["at"]):
            notes[note["id"]].append(note)
        for task_id, runs in self._ledger.runs.items():
            if self._ledger.tried[task_id]["move"] > 0:
                continue  # a call whose answer was lost moved it
            known = acknowledged(notes[task_id])
            for run in runs:
                due_at_ms = known.get(run["attempt"])
                if due_at_ms is None:
                    continue
                claimed = self._tables.log[task_id][run["attempt"] - 1].started_at_ms
                began = claimed if self._stepped else run["wall_ms"]
                assert began >= due_at_ms, f"early: {run}, due at {due_at_ms}: {notes[task_id]}"
                self.figures["runs whose due time is known"] += 1

    def _count(self):
        ledger, final = self._ledger, self._tables.final
        runs = [run for runs in ledger.runs.values() for run in runs]
        self.figures |= {
            "acknowledged": len(ledger.stored),
            "not acknowledged, and there": len(final.keys() - ledger.stored.keys()),
            "finished": sum(row.state == "finished" for row in final.values()),
            "cancelled": sum(row.state == "cancelled" for row in final.values()),
            "runs": len(runs),
            "attempts lost": sum(
                reason(one) == "lost" for log in self._tables.log.values() for one in log
            ),
        }


def acknowledged(notes):
    """Return the earliest due time of each attempt of a task, by its notes in order.

    It is unknown for a run that began during a move, and after concurrent moves of two processes:
    the notes do not show which of them was the last.
    """
    due_at_ms = None
    known = {}
    under_way = 0
    crossed = moved = False
    for note in notes:
        match note["note"]:
            case "stored" if (
                not moved
            ):  # another process may move it before its submitter writes the note
                due_at_ms = note["due_at_ms"]
            case "moving":
                crossed = under_way > 0
                moved = True
                under_way += 1
                due_at_ms = None
            case "moved":
                under_way -= 1
                if note["won"] and not under_way and not crossed:
                    due_at_ms = note["due_at_ms"]
            case "begun":
                known[note["attempt"]] = due_at_ms
    return known


def reason(log):
    """Return why an attempt was not the last, in a word or two."""
    found = re.search(r"^lost|^timed out|not the first time", log.error or "")
    return found[0] if found else log.event
