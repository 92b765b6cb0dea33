"""The store on SQLite: one file, a writer thread that commits in groups, and a reader thread.

Full durability: WAL with synchronous=FULL, so that an acknowledged write survives a power cut.
Any process may open the file; the coordinator decides which one dispatches.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.clock import WallClock
from tickwheel.durable.coordinator import ShardRow
from tickwheel.durable.store import (
    BATCH,
    LEASE_MS,
    PAGE_BYTES,
    PRUNE_ROWS,
    SCAN,
    STATEMENT_BYTES,
    Claims,
    InsertLimit,
    error_bytes,
)
from tickwheel.durable.stores.rows import (
    LOGGED_ERROR,
    PageFill,
    attempt_of,
    count_fitting,
    last_leases,
    late_deliveries,
    may_contain,
    merge_pages,
    prune_batch,
    pruned_rows,
    task_of,
)
from tickwheel.durable.stores.sqlite import schema
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.durable.stores.sqlite.cancel_reschedule import (
    Place,
    cancel_unclaimed,
    count_that_fits,
    next_unclaimed,
    reschedule_unclaimed,
    verdicts,
)
from tickwheel.durable.stores.sqlite.connection import (
    DRIVERS,
    default_driver,
    insert_many,
    run_array,
)
from tickwheel.durable.stores.sqlite.due_counts import due_counts, few_due
from tickwheel.durable.stores.sqlite.file import SqliteFile
from tickwheel.durable.stores.sqlite.insert import insert
from tickwheel.durable.stores.sqlite.notify import SqliteNotifications
from tickwheel.durable.stores.sqlite.registry import SqliteRegistry
from tickwheel.durable.stores.sqlite.schedules import SqliteSchedules
from tickwheel.durable.stores.sqlite.writer import Rank
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import (
    SHARDS,
    Attempt,
    AttemptKey,
    Due,
    KeyConflict,
    Lease,
    Page,
    State,
    Task,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from tickwheel.clock import Clock
    from tickwheel.durable.store import Replay, Window
    from tickwheel.durable.stores.sqlite.connection import Connection, Row
    from tickwheel.values.task import (
        Change,
        DueCount,
        DueSpans,
        Ending,
        Filter,
        RepeatedRequest,
        Submission,
    )

T = TypeVar("T")

NEVER_MS = 2**63 - 1
# One transaction takes some milliseconds: a claim may have to wait for it.
INSERT_ROWS = 300
INSERT_BYTES = 512 << 10
INSERT_KEYED = 64  # each may meet a holder with a large payload: 0.3 ms for 1 MiB


class SqliteStore:
    """Tasks in a SQLite file.

    - `shards` counts when the file is created; afterwards the number in the file counts.
    - `clock` gives the wall time, in nanoseconds since 1970.
    - `driver`: "apsw" or "sqlite3"; by default apsw if it is installed.
    """

    joins_transactions = False

    def __init__(
        self,
        path: str | Path,
        *,
        shards: int = SHARDS,
        clock: Clock | None = None,
        driver: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.insert_limit = InsertLimit(INSERT_ROWS, INSERT_BYTES, INSERT_KEYED)
        self._clock = clock or WallClock()
        self._file = SqliteFile(self.path, DRIVERS[driver or default_driver()], shards)
        self.notifications = SqliteNotifications(self.path, self._file.impatient)
        self.registry = SqliteRegistry(self)
        self.schedules = SqliteSchedules(self)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return self._file.shards

    @property
    def where(self) -> str:
        """The database as messages name it."""
        return f"SQLite database {self.path.absolute()}"

    @property
    def schema_needed(self) -> int:
        """The schema version that this program works with."""
        return len(schema.MIGRATIONS)

    async def schema_version(self) -> int | None:
        """Return how many migrations the file has had; None: there is no file."""
        return await self._file.schema_version()

    async def migrate(self, notify: Callable[[str], None]) -> None:
        """Open the file, which migrates it, and close it; there are no sessions to wait for."""
        del notify
        if not self._file.is_open:
            await self._file.open()
            await self._file.close()

    async def open(self) -> None:
        """Open the file, or create it, and migrate it."""
        await self._file.open()

    async def close(self) -> None:
        """Finish the queued work, and close the file."""
        self.notifications.close()
        await self._file.close()

    async def require_writable(self) -> None:
        """Begin a transaction that writes, and write nothing."""
        await self._write(Rank.CLAIM, lambda _: None)

    def fault(self) -> str | None:
        """Return that the file is damaged, if it is."""
        return self._file.fault()

    def warning(self) -> str | None:
        """Return that the log grows, if it does."""
        return self._file.warning()

    @property
    def log_bytes(self) -> int:
        """The size of the log next to the file: a metric."""
        return self._file.log_bytes()

    def now_ms(self) -> float:
        """Return the host's time."""
        return self._clock.time_ns() / 1_000_000  # int by int is exact

    def latest_ms(self) -> float:
        """Return the host's time, which is known exactly."""
        return self.now_ms()

    def _now(self) -> int:
        return self._clock.time_ns() // 1_000_000

    async def _write(
        self, rank: Rank, work: Callable[[Connection], T], payload_bytes: int = 0
    ) -> T:
        return await self._file.write(rank, work, payload_bytes)

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await self._file.read(work)

    async def insert(
        self,
        submissions: Sequence[Submission],
        epochs: Mapping[int, int],
        *,
        again: bool = False,
        patient: bool = True,
    ) -> list[Task | KeyConflict | RepeatedRequest | None]:
        """Store tasks, all in one commit; there is one writer, so no key is ever locked."""
        del patient

        def work(connection: Connection) -> list[Task | KeyConflict | RepeatedRequest | None]:
            return insert(connection, submissions, epochs, again=again, now_ms=self._now())

        payloads = sum(len(one.task.body) for one in submissions)
        return await self._write(Rank.SUBMIT, work, payloads)

    async def within(self, connection: Any, change: Change) -> Any:
        """Refuse: only a store on PostgreSQL shares a transaction with the user."""
        return self.within_now(connection, change)

    def within_now(self, connection: Any, change: Change) -> Any:
        """Refuse: only a store on PostgreSQL shares a transaction with the user."""
        raise TypeError("connection= needs a store on PostgreSQL; this one is on SQLite")

    async def due(
        self, windows: Sequence[Window], shards: Sequence[int], now_ms: int, until_ms: int
    ) -> list[Due]:
        """Return unclaimed tasks: overdue, and due up to `until_ms`."""
        if not windows or not shards:
            return []
        some = None if len(shards) == self.shards else json.dumps(list(shards))

        def work(connection: Connection) -> list[Due]:
            found: list[Due] = []
            for start in range(0, len(windows), sql.SERVICES):
                part = windows[start : start + sql.SERVICES]
                values: list[Any] = []
                for window in part:
                    for limit, low, high in (
                        (window.overdue, window.since_ms, now_ms),
                        (window.later, now_ms, until_ms),
                    ):
                        values += [window.service, low, high]
                        values += [limit] if some is None else [some, limit]
                found += map(Due._make, connection.run(sql.due(len(part), some is None), values))
            return found

        return await self._read(work)

    async def claim(
        self,
        wanted: Sequence[Due],
        node: str,
        epochs: Mapping[int, int],
        lease_ms: int = LEASE_MS,
        most_bytes: int = STATEMENT_BYTES,
    ) -> Claims:
        """Claim tasks that are unclaimed, due, and in a shard of that epoch."""
        rows = [(due.id, due.due_at_ms, epochs.get(due.shard, -1)) for due in wanted]

        def work(connection: Connection) -> Claims:
            now = self._now()
            asked = count_that_fits(connection, rows, most_bytes)
            listed = json.dumps(rows[:asked])
            values = {"wanted": listed, "node": node, "now": now, "lease": lease_ms}
            claimed = connection.run(sql.CLAIM, values)
            claims = Claims([task_of(row) for row in claimed], [], left=tuple(wanted[asked:]))
            if len(claims.tasks) < asked:
                later = connection.run(sql.LATER, {"wanted": listed})
                claims = claims._replace(later=[Due._make(row) for row in later])
            return claims

        return await self._write(Rank.CLAIM, work)

    async def record(self, endings: Sequence[Ending]) -> list[bool | None]:
        """End attempts, and return who won; as many in one transaction as fit."""
        rows = [
            (number, one.id, one.attempt, one.epoch, one.event, one.state, one.at_ms, one.due_at_ms,
             one.failures, one.result_body, one.error, one.lease_until_ms, one.delivered_to)
            for number, one in enumerate(endings)
        ]  # fmt: skip

        def work(connection: Connection, first: int) -> tuple[set[int], int]:
            connection.run("DELETE FROM temp.ending")
            insert_many(connection, sql.ENDING, rows[first:])
            connection.run(sql.KEEP_WINNERS)
            if len({row[1] for row in rows}) < len(rows):
                connection.run(sql.KEEP_FIRST_OF_EACH)
            winners = run_array(connection, sql.WINNERS)
            count = count_fitting((size for _, size in winners), STATEMENT_BYTES)
            done = len(rows)
            if count < len(winners):
                done = winners[count][0]
                connection.run(sql.KEEP_FIRST, (done,))
            for statement in sql.RECORD:
                connection.run(statement)
            return {number for number, _ in winners[:count]}, done

        won: set[int] = set()
        done = 0
        while done < len(rows):
            try:
                numbers, done = await self._write(Rank.OUTCOME, partial(work, first=done))
            except StoreUnavailable:
                if not done:
                    raise
                break
            won |= numbers
        return [number in won if number < done else None for number in range(len(rows))]

    async def renew(self, attempts: Sequence[AttemptKey], lease_ms: int = LEASE_MS) -> list[bool]:
        """Extend leases; return for each whether it is still the running attempt."""

        def work(connection: Connection) -> list[bool]:
            values = {"attempts": json.dumps(attempts), "now": self._now(), "lease": lease_ms}
            return still_running(attempts, connection.run(sql.RENEW, values))

        return await self._write(Rank.CLAIM, work)

    async def accept(self, leases: Sequence[Lease]) -> list[bool]:
        """Let attempts continue without the node; return for each whether it still runs."""

        def work(connection: Connection) -> list[bool]:
            values = {"leases": json.dumps(last_leases(leases)), "now": self._now()}
            answers = still_running(leases, connection.run(sql.ACCEPT, values))
            if late := late_deliveries(leases, answers):
                connection.run(sql.DELIVERED, (json.dumps(late),))
            return answers

        return await self._write(Rank.OUTCOME, work)

    async def services(self, until_ms: int | None = None, since_ms: int = -1) -> list[str]:
        """Return the services with live tasks, or with tasks due in that time, by name.

        The statement reads tasks by due time, and costs as much as is due. If that is very much, it
        returns with `since_ms` the services of the latest tasks.
        """

        def work(connection: Connection) -> list[str]:
            if until_ms is None:
                return [name for (name,) in connection.run(sql.SERVICES_LIVE)]
            rows = connection.run(sql.SERVICES_OF_LATEST, (since_ms, until_ms))
            if since_ms < 0 and sum(count for _, count in rows) >= sql.LATEST_ROWS:
                rows = connection.run(sql.SERVICES_DUE, (since_ms, until_ms))
            return [row[0] for row in rows]

        return await self._read(work)

    async def running(
        self, shards: Sequence[int], behind: int | None = None, until_ms: int | None = None
    ) -> list[Task]:
        """Return the running tasks of these shards, without their bodies, by an index."""
        until = NEVER_MS if until_ms is None else until_ms

        def work(connection: Connection) -> list[Task]:
            values = {"shards": json.dumps(list(shards)), "until": until}
            rows = connection.run(sql.RUNNING, values)
            if behind is None:
                rows += connection.run(sql.RUNNING_HERE, {"shards": values["shards"]})
            return [*{row[0]: task_of(row) for row in rows}.values()]

        return await self._read(work)

    async def running_by_id(self, ids: Sequence[str]) -> list[Task]:
        """Return the tasks of these ids that are running, without their bodies."""
        listed = (json.dumps(list(ids)),)
        return await self._read(
            lambda connection: [task_of(row) for row in connection.run(sql.RUNNING_BY_ID, listed)]
        )

    async def cancel(self, ids: Sequence[str]) -> list[Verdict | None]:
        """Cancel tasks that are unclaimed; as many in one transaction as fit."""
        unique = list(dict.fromkeys(ids))

        def work(connection: Connection, first: int) -> list[Verdict | None]:
            rows = [(task_id,) for task_id in unique[first:]]
            part = unique[first : first + count_that_fits(connection, rows, STATEMENT_BYTES)]
            won = cancel_unclaimed(connection, part, self._now())
            return verdicts(connection, part, won, State.CANCELLED)

        answers: list[Verdict | None] = []
        while len(answers) < len(unique):
            answers += await self._write(Rank.CLAIM, partial(work, first=len(answers)))
        found = dict(zip(unique, answers, strict=True))
        return [found[task_id] for task_id in ids]

    def cancel_where(self, filter: Filter, limit: int) -> AsyncIterator[list[Due]]:
        """Cancel all unclaimed tasks that match the filter."""
        return self._change_where(filter, limit, cancel_unclaimed)

    async def reschedule(self, ids: Sequence[str], due_at_ms: int) -> list[Verdict | None]:
        """Give unclaimed tasks another due time."""

        def work(connection: Connection) -> list[Verdict | None]:
            won = reschedule_unclaimed(connection, ids, due_at_ms, self._now())
            return verdicts(connection, ids, won, State.DELAY)

        return await self._write(Rank.CLAIM, work)

    def reschedule_where(
        self, filter: Filter, due_at_ms: int, limit: int
    ) -> AsyncIterator[list[Due]]:
        """Reschedule all unclaimed tasks that match and are due at another time."""

        def change(connection: Connection, ids: Sequence[str], now_ms: int) -> list[Due]:
            return reschedule_unclaimed(connection, ids, due_at_ms, now_ms)

        return self._change_where(filter, limit, change, due_at_ms)

    async def _change_where(
        self,
        filter: Filter,
        limit: int,
        change: Callable[[Connection, Sequence[str], int], list[Due]],
        moved_ms: int | None = None,
    ) -> AsyncIterator[list[Due]]:
        """Change tasks batch by batch, after claims and outcomes."""
        place: Place | None = Place()

        def work(connection: Connection, place: Place) -> tuple[list[Due], Place | None]:
            now = self._now()
            ids, further = next_unclaimed(connection, filter, place, limit, now, moved_ms)
            return change(connection, ids, now), further

        while place is not None:
            changed, place = await self._write(Rank.SUBMIT, partial(work, place=place))
            if changed:
                yield changed

    async def expire(self, shards: Sequence[int], limit: int) -> list[Due]:
        """Fail up to `limit` unclaimed tasks of these shards whose deadline has passed.

        The reader finds them: while there are none, the writer is not used.
        """
        found = await self._read(lambda connection: self._past_deadline(connection, shards, limit))
        if not found:
            return []

        def work(connection: Connection) -> list[Due]:
            values = {"ids": json.dumps(found), "now": self._now()}
            rows = connection.run(sql.EXPIRE, values)
            connection.run(sql.EXPIRE_LIVE, values)
            return [Due._make(row) for row in rows]

        return await self._write(Rank.OUTCOME, work)

    def _past_deadline(
        self, connection: Connection, shards: Sequence[int], limit: int
    ) -> list[str]:
        """Return ids of tasks to expire, as many as one short transaction can move."""
        values = {"now": self._now(), "shards": json.dumps(list(shards)), "limit": limit}
        full = PageFill(STATEMENT_BYTES, lambda row: row[1])
        return [row[0] for row in connection.run_until(full, sql.PAST_DEADLINE, values)]

    async def get(self, ids: Sequence[str]) -> list[Task | None]:
        """Return tasks, live or final."""

        def work(connection: Connection) -> list[Task | None]:
            listed = (json.dumps(list(ids)),)
            # Live tasks first: a task that ends in between is then found in the backlog.
            found = {row[0]: task_of(row) for row in connection.run(sql.LIVE_BY_ID, listed)}
            found |= {row[0]: task_of(row) for row in connection.run(sql.FINAL_BY_ID, listed)}
            return [found.get(task_id) for task_id in ids]

        return await self._read(work)

    async def find(
        self, filter: Filter, *, final: bool | None, cursor: str | None, limit: int
    ) -> Page:
        """Return tasks newest first."""
        tables = [
            table
            for table, wanted in (("task", final is not True), ("backlog", final is not False))
            if wanted and may_contain(filter.state, table)
        ]

        def work(connection: Connection) -> Page:
            connection.run("BEGIN")  # one snapshot of both tables: tasks move from one to the other
            try:
                pages = [self._scan(connection, table, filter, cursor, limit) for table in tables]
            finally:
                connection.run("COMMIT")
            return merge_pages(pages, limit, PAGE_BYTES)

        return await self._read(work)

    def _scan(
        self, connection: Connection, table: str, filter: Filter, cursor: str | None, limit: int
    ) -> tuple[list[Task], str | None]:
        """Return the matches among the next rows of a table, and where it stopped, or None."""
        where, values = sql.matching(filter, self._now())
        by_key = filter.key is not None
        few = few_due(connection, filter, self._now(), SCAN) if table == "task" else None
        statement = sql.find(table, where, by_key=by_key, among=few is not None)
        values |= {"cursor": cursor or "g", "scan": SCAN, "limit": limit + 1}
        values |= few or {}
        page = PageFill(PAGE_BYTES)
        tasks = [task_of(row) for row in connection.run_until(page, statement, values)]
        if len(tasks) > limit:
            return tasks[:limit], tasks[limit - 1].id
        if page.full:
            return tasks, tasks[-1].id
        if by_key or few is not None:
            return tasks, None
        last = connection.run(sql.LAST.format(table=table), (values["cursor"], SCAN, SCAN - 1))
        return tasks, last[0][0] if last else None

    async def attempts(self, task_id: str, *, after: int = 0, limit: int = BATCH) -> list[Attempt]:
        """Return the execution log of a task in the order of attempts, from after `after`."""

        def work(connection: Connection) -> list[Attempt]:
            values = {"id": task_id, "after": after, "limit": limit}
            page = PageFill(PAGE_BYTES, lambda row: error_bytes(row[LOGGED_ERROR]))
            return [attempt_of(row) for row in connection.run_until(page, sql.ATTEMPTS, values)]

        return await self._read(work)

    async def replay(
        self, replays: Sequence[Replay], *, force: bool
    ) -> list[Task | KeyConflict | None]:
        """Submit final tasks again, as new tasks; each once, unless `force`."""

        def work(connection: Connection) -> list[Task | KeyConflict | None]:
            wanted = replays if force else first_replays(replays)
            values = {"replays": json.dumps(wanted), "force": force, "now": self._now()}
            inserted_ids = {row[0] for row in connection.run(sql.REPLAY, values)}
            connection.run(
                sql.REPLAYED, (json.dumps([one[:2] for one in replays if one[1] in inserted_ids]),)
            )
            taken: dict[str, str] = dict(connection.run(sql.REPLAY_TAKEN, values))
            stored = connection.run(sql.LIVE_BY_ID, (json.dumps([*inserted_ids]),))
            holders = connection.run(sql.LIVE_SUMMARIES, (json.dumps([*taken.values()]),))
            found = {row[0]: task_of(row) for row in stored + holders}
            return [
                found[one.new_id]
                if one.new_id in inserted_ids
                else KeyConflict(found[taken[one.id]])
                if one.id in taken
                else None
                for one in replays
            ]

        return await self._write(Rank.SUBMIT, work)

    async def prune(self, before_ms: int, limit: int) -> int:
        """Delete up to `limit` final tasks that ended before `before_ms`, with their attempts."""

        def work(connection: Connection) -> int | None:
            full = PageFill(PRUNE_ROWS, lambda row: pruned_rows(*row[1:]))
            values = {"before": before_ms, "limit": limit}
            rows: Any = connection.run_until(full, sql.OLD, values)
            ids, in_parts = prune_batch(rows, PRUNE_ROWS)
            if in_parts:
                part = connection.run(sql.PRUNE_SOME, {"id": ids[0], "limit": PRUNE_ROWS})
                if len(part) == PRUNE_ROWS:
                    return None  # it has more
            listed = (json.dumps(ids),)
            connection.run(sql.PRUNE_ATTEMPTS, listed)
            connection.run(sql.PRUNE_BACKLOG, listed)
            return len(ids)

        while (count := await self._write(Rank.PRUNE, work)) is None:
            pass
        return count

    async def take(
        self,
        shards: Sequence[int],
        node: str,
        *,
        owner_is_dead: bool = False,
        above: int = 0,
        if_epochs: Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Make this node the owner of these shards; return their new epochs."""
        listed = json.dumps(list(shards))
        wanted = json.dumps([(shard, if_epochs and if_epochs[shard]) for shard in shards])

        def work(connection: Connection) -> dict[int, int]:
            self._file.check_version(connection)
            if owner_is_dead:
                connection.run(sql.END_LEASES, {"shards": listed, "now": self._now()})
            values = {"node": node, "above": above, "wanted": wanted}
            return dict(connection.run(sql.TAKE, values))

        return await self._write(Rank.CLAIM, work)

    async def give_up(self, epochs: Mapping[int, int]) -> None:
        """Give up these shards, if they still have these epochs."""
        listed = (json.dumps(list(epochs.items())),)
        await self._write(Rank.CLAIM, lambda connection: connection.run(sql.GIVE_UP, listed))

    async def owners(self) -> list[ShardRow]:
        """Return all shards by number."""
        return await self._read(
            lambda connection: list(map(ShardRow._make, connection.run(sql.OWNERS)))
        )

    async def due_counts(self, spans: DueSpans, namespace: str | None) -> list[DueCount]:
        """Return how many live tasks are due in each of some equal times."""
        return await self._read(lambda connection: due_counts(connection, spans, namespace))

    async def counts(self) -> dict[str, int]:
        """Return the number of live and final tasks; the count stops at 100,000."""

        def work(connection: Connection) -> dict[str, int]:
            return {name: connection.run(count)[0][0] for name, count in sql.COUNTS.items()}

        return await self._read(work)


def still_running(attempts: Sequence[AttemptKey | Lease], rows: Sequence[Row]) -> list[bool]:
    """Return for each attempt whether it is among the changed rows."""
    changed = {tuple(row) for row in rows}
    return [(one.id, one.attempt, one.epoch) in changed for one in attempts]


def first_replays(replays: Sequence[Replay]) -> list[Replay]:
    """Return the first replay of each final task, in order."""
    seen: dict[str, Replay] = {}
    for one in replays:
        seen.setdefault(one.id, one)
    return list(seen.values())
