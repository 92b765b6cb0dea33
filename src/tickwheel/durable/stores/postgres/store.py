"""The store on PostgreSQL: a pool of connections, and one statement per call where possible.

The database's clock is the service's clock. Any number of processes may use one database; the
coordinator decides which of them dispatches what, and the epochs of shards keep them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.durable.batching.capacity import AdaptiveLimit
from tickwheel.durable.coordinator import ShardRow
from tickwheel.durable.store import (
    BATCH,
    LEASE_MS,
    PAGE_BYTES,
    PRUNE_ROWS,
    STATEMENT_BYTES,
    Claims,
    InsertLimit,
)
from tickwheel.durable.stores.postgres import schema
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres.cancel_reschedule import changed_where, verdicts
from tickwheel.durable.stores.postgres.clock import DatabaseClock
from tickwheel.durable.stores.postgres.due_counts import due_counts
from tickwheel.durable.stores.postgres.insert import count_keyed, insert
from tickwheel.durable.stores.postgres.listener import Listener
from tickwheel.durable.stores.postgres.lists import find
from tickwheel.durable.stores.postgres.manual import ManualDatabaseClock
from tickwheel.durable.stores.postgres.migration import migrate, version
from tickwheel.durable.stores.postgres.notify import PostgresNotifications
from tickwheel.durable.stores.postgres.pool import (
    ID,
    AnswerLost,
    Pool,
    clean_text,
    place_of,
    transaction,
    valid_ids,
)
from tickwheel.durable.stores.postgres.registry import PostgresRegistry, line
from tickwheel.durable.stores.postgres.replay import replay
from tickwheel.durable.stores.postgres.schedules import PostgresSchedules
from tickwheel.durable.stores.postgres.session import address_of
from tickwheel.durable.stores.postgres.takeover import take_over
from tickwheel.durable.stores.postgres.transaction import within, within_now
from tickwheel.durable.stores.rows import (
    attempt_of,
    last_leases,
    late_deliveries,
    prune_batch,
    rounds,
    task_of,
)
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import (
    SHARDS,
    Attempt,
    AttemptKey,
    Due,
    DueCount,
    KeyConflict,
    State,
    Task,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from tickwheel.clock import Clock
    from tickwheel.durable.registry import Audit
    from tickwheel.durable.store import Replay, Window
    from tickwheel.durable.stores.postgres.pool import Connection
    from tickwheel.values.task import (
        Change,
        DueSpans,
        Ending,
        Filter,
        Lease,
        Page,
        RepeatedRequest,
        Submission,
    )

    WantedRow = tuple[str, int, int, int]

T = TypeVar("T")

KEYED_LANES = 3  # connections that may wait for keys held by other transactions
BRIEF_LANES = 3  # connections that may do so for a moment
CLOCK_SECONDS = 2.0  # between two samples of the database's clock, if no other statement takes one
SWEEP_SECONDS = 300.0  # for the statement at a takeover, which may have much to read
RENEW_SECONDS = 5.0  # for a renewal: in time for a retry before the leases end
AHEAD = 100  # unclaimed tasks per service and shard that `_running_ahead` reads at most
VERSION_SECONDS = 10.0  # to read the schema's version
WHY_SECONDS = 2.0  # to find out why some tasks were not changed; the changed ones wait for that


class PostgresStore:
    """Tasks in a PostgreSQL database.

    - `shards` counts when the tables are created; afterwards the number in them counts.
    - `clock`: the database's time is computed from it between two samples; it counts suspension.
    - `manual`, for tests: a manual clock, whose time replaces the database's.
    - The URL is asyncpg's: it may have several hosts, `sslmode` and settings. `?schema=NAME` names
      the schema of the tables, "tickwheel" by default. Of several hosts, the one is used that
      accepts writes.
    - A connection pooler must keep a session for each client.
    - If the server does not answer, a call fails after 10 s; calls work again when the server does.
    """

    joins_transactions = True

    def __init__(
        self,
        url: str,
        *,
        shards: int = SHARDS,
        clock: Clock | None = None,
        manual: Clock | None = None,
    ) -> None:
        self._make_pool = functools.partial(Pool, url, manual=manual)
        self._manual = manual
        self.shards = shards
        self.insert_limit = InsertLimit()
        self._record_bytes = AdaptiveLimit(STATEMENT_BYTES)
        self.clock = DatabaseClock(clock) if manual is None else ManualDatabaseClock(manual)
        self.where = place_of(url)
        self.schema = address_of(url).schema
        self._pool: Pool | None = None
        self._listener: Listener | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lanes = asyncio.Semaphore(KEYED_LANES)
        self._brief_lanes = asyncio.Semaphore(BRIEF_LANES)
        self._tables = 0
        self.notifications = PostgresNotifications(self)
        self.registry = PostgresRegistry(self)
        self.schedules = PostgresSchedules(self)

    @property
    def offset_ms(self) -> float:
        """How far the database's clock is ahead of this host's: a metric."""
        return self.clock.offset_ms

    @property
    def pooled(self) -> bool:
        """Whether a connection pooler is in between."""
        return self._require_pool().pooled

    @property
    def schema_needed(self) -> int:
        """The schema version that this program works with."""
        return len(schema.MIGRATIONS)

    async def schema_version(self) -> int | None:
        """Return how many migrations the schema has had; None: it has no tables of a store."""
        async with self._any_pool() as pool:
            return await pool.run(version, VERSION_SECONDS) or None

    async def migrate(self, notify: Callable[[str], None]) -> None:
        """Migrate the schema, however long other sessions take."""
        async with self._any_pool() as pool:
            await migrate(pool, self.shards, patience=math.inf, notify=notify)

    @contextlib.asynccontextmanager
    async def _any_pool(self) -> AsyncIterator[Pool]:
        """Give the pool, or a temporary one if the store is not open."""
        if self._pool is not None:
            yield self._pool
            return
        pool = self._make_pool()
        try:
            yield pool
        finally:
            await pool.close()

    async def open(self) -> None:
        """Connect, and bring the schema to the version that is needed."""
        pool = self._make_pool()
        try:
            self.shards = await migrate(pool, self.shards)
            found = await pool.run(lambda connection: connection.fetch(sql.CHANNELS))
            self._tables = found[0][0]
        except BaseException:
            await pool.close()
            raise
        self._pool = pool
        self._listener = Listener(pool.connect)
        await self._look()
        self._keeper = asyncio.create_task(self._keep_time(), name="tickwheel-clock")

    async def close(self) -> None:
        """Finish the calls under way, and close every connection."""
        pool, self._pool = self._pool, None
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._listener is not None:
            await self._listener.close()
        if pool is not None:
            await pool.close()
        self._keeper = self._listener = None
        self.notifications.close()

    async def require_writable(self) -> None:
        """Raise if transactions are read-only: on a standby, or by a setting."""
        if (await self.fetch(sql.READ_ONLY))[0][0]:
            raise StoreUnavailable(f"{self.where}: it may only be read")

    def now_ms(self) -> float:
        """Return the database's time, or a little less."""
        return self.clock.now_ms()

    def fault(self) -> str | None:
        """Return None: the database itself reports what is wrong with it."""
        return None

    def warning(self) -> str | None:
        """Return None: the database itself reports what is wrong with it."""
        return None

    def latest_ms(self) -> float:
        """Return the database's time, or a little more."""
        return self.clock.latest_ms()

    async def _keep_time(self) -> None:
        """Read the database's clock if no other statement has returned its time lately."""
        while True:
            await asyncio.sleep(CLOCK_SECONDS)
            if self.clock.local_ms() - self.clock.sampled_ms >= CLOCK_SECONDS * 1000:
                with contextlib.suppress(StoreUnavailable):
                    await self._look()

    async def _look(self) -> None:
        await self.run(lambda connection: self._fetch_timed(connection, sql.CLOCK))

    async def _fetch_timed(
        self, connection: Connection, statement: str, *values: Any
    ) -> list[Sequence[Any]]:
        """Fetch rows whose first column is the database's time, and sample that."""
        sent_ms = self.clock.local_ms()
        rows = await connection.fetch(statement, *values)
        self.clock.sample(rows[0][0], sent_ms)
        return rows

    async def run(
        self,
        work: Callable[[Connection], Awaitable[T]],
        seconds: float | None = None,
        *,
        reserved: bool = False,
    ) -> T:
        """Execute `work(connection)` within `seconds`."""
        return await self._require_pool().run(work, seconds, reserved=reserved)

    def _require_pool(self) -> Pool:
        if self._pool is None:
            raise RuntimeError(f"the store {self.where} is not open")
        return self._pool

    async def fetch(
        self, statement: str, *values: Any, seconds: float | None = None, reserved: bool = False
    ) -> list[Sequence[Any]]:
        """Execute one statement, which is a transaction of its own, and return its rows."""
        return await self.run(
            lambda connection: connection.fetch(statement, *values), seconds, reserved=reserved
        )

    async def _transaction(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        return await self.run(lambda connection: transaction(connection, work))

    async def insert(
        self,
        submissions: Sequence[Submission],
        epochs: Mapping[int, int],
        *,
        again: bool = False,
        patient: bool = True,
    ) -> list[Task | KeyConflict | RepeatedRequest | None]:
        """Store tasks, all in one commit.

        A single task with a key or an idempotency key waits up to 2 s for another transaction, and
        then raises `Locked`; several such tasks, or one that is not `patient`, after 0.05 s. They
        should not be in one batch with other tasks.
        """
        self._require_pool()
        if not submissions:
            return []
        count = count_keyed(submissions)
        patient = count == 0 or (patient and count == 1)
        lane = self._lanes if patient else self._brief_lanes
        async with lane if count else contextlib.nullcontext():
            try:
                return await self.run(
                    lambda connection: insert(
                        connection, submissions, epochs, again=again, patient=patient
                    )
                )
            except AnswerLost:
                return await self.run(
                    lambda connection: insert(
                        connection, submissions, epochs, again=True, patient=patient
                    )
                )

    async def within(self, connection: Any, change: Change) -> Any:
        """Make a change on an asynchronous connection of asyncpg, psycopg or SQLAlchemy."""
        return await within(connection, change, self.schema, self._manual)

    def within_now(self, connection: Any, change: Change) -> Any:
        """Make a change on a blocking connection of psycopg, psycopg2, SQLAlchemy or Django."""
        return within_now(connection, change, self.schema, self._manual)

    async def due(
        self, windows: Sequence[Window], shards: Sequence[int], now_ms: int, until_ms: int
    ) -> list[Due]:
        """Return unclaimed tasks: overdue, and due up to `until_ms`."""
        self._require_pool()
        if not windows or not shards:
            return []
        values = list(zip(*(part for one in windows for part in (
            (one.service, one.since_ms, now_ms, one.overdue),
            (one.service, now_ms, until_ms, one.later),
        )), strict=True))  # fmt: skip
        rows = await self.run(
            lambda connection: self._fetch_timed(connection, sql.DUE, *values, [*shards])
        )
        return [Due._make(row[1:]) for row in rows if row[1] is not None]

    async def claim(
        self,
        wanted: Sequence[Due],
        node: str,
        epochs: Mapping[int, int],
        lease_ms: int = LEASE_MS,
        most_bytes: int = STATEMENT_BYTES,
    ) -> Claims:
        """Claim tasks that are unclaimed, due, and in a shard of that epoch; wait for no lock."""
        self._require_pool()
        given = [due for due in wanted if due.shard in epochs and ID.fullmatch(due.id)]
        if not given:
            return Claims([], [])
        rows = [(due.id, due.due_at_ms, due.shard, epochs[due.shard]) for due in given]
        checked = {row[2]: row[3] for row in rows}
        columns = zip(*rows, strict=True)
        values = [*checked], [*checked.values()], *columns, node, lease_ms, most_bytes
        claimed = await self.run(lambda one: self._fetch_timed(one, sql.CLAIM, *values))
        tasks = [task_of(row[2:]) for row in claimed if row[2] is not None]
        if len(tasks) == len(rows):
            return Claims(tasks, [])
        now_ms, first_left = claimed[0][:2]
        asked = len(rows) if first_left is None else first_left - 1
        missing = {row[0]: row for row in rows[:asked]}
        for task in tasks:
            missing.pop(task.id, None)
        claims = Claims(tasks, [])
        if missing:
            claims = await self._explain_missing(tasks, missing, now_ms)
        return claims._replace(left=tuple(given[asked:]))

    async def _explain_missing(
        self, tasks: list[Task], missing: Mapping[str, WantedRow], now_ms: float
    ) -> Claims:
        """Return the claimed tasks, and why the others were not claimed."""
        numbers = [row[3] for row in missing.values()]
        try:
            found = await self.fetch(sql.UNCLAIMED, [*missing], numbers, seconds=WHY_SECONDS)
        except StoreUnavailable:  # the claims stand; the loader finds the others
            return Claims(tasks, [])
        unclaimed = [Due._make(row) for row in found]
        later = [
            due
            for due in unclaimed
            if due.due_at_ms > now_ms or due.due_at_ms != missing[due.id][1]
        ]
        moved = {due.id for due in later}
        return Claims(tasks, later, tuple(due for due in unclaimed if due.id not in moved))

    async def record(self, endings: Sequence[Ending]) -> list[bool | None]:
        """End attempts, and return who won; wait for no lock."""
        self._require_pool()
        rows = [
            (one.id, one.attempt, one.epoch, str(one.event), str(one.state), one.at_ms,
             one.due_at_ms, one.failures, one.result_body, clean_text(one.error),
             one.lease_until_ms, one.delivered_to, number)
            for number, one in enumerate(endings)
        ]  # fmt: skip
        won, unknown = await self._write_endings(rows, rounds(one.id for one in endings))
        answers = [None if number in unknown else number in won for number in range(len(rows))]
        left = [
            (one.id, one.attempt, one.epoch, one.lease_until_ms, number)
            for number, one in enumerate(endings)
            if answers[number] is False
        ]
        return await self._unless_locked(answers, left) if left else answers

    async def _write_endings(
        self, rows: Sequence[tuple[Any, ...]], turns: list[list[int]]
    ) -> tuple[set[int], set[int]]:
        """Write endings, as many per statement as fit; return the winners and the unknown ones.

        A second ending of the same task goes into a later statement. After a failure, a statement
        copies half as many bytes of payloads.
        """
        won: set[int] = set()
        loop = asyncio.get_running_loop()
        while turns:
            numbers = turns.pop(0)
            columns = zip(*(rows[number] for number in numbers), strict=True)
            began = loop.time()
            try:
                found = await self.fetch(sql.RECORD, *columns, self._record_bytes.size)
            except StoreUnavailable:
                self._record_bytes.record_failure()
                if not won:
                    raise
                return won, {*numbers, *itertools.chain(*turns)}  # the earlier statements stand
            won |= {number for number, _ in found}
            first_left = found[0][1] if found else None
            if first_left is not None:
                self._record_bytes.record_success(self._record_bytes.size, loop.time() - began)
                turns.insert(0, numbers[numbers.index(first_left) :])
        return won, set()

    async def renew(
        self, attempts: Sequence[AttemptKey], lease_ms: int = LEASE_MS
    ) -> list[bool | None]:
        """Extend leases; return for each whether it is still the running attempt."""
        self._require_pool()
        if not attempts:
            return []
        given = zip(*sorted(set(attempts)), strict=True)
        rows = await self.fetch(sql.RENEW, *given, lease_ms, seconds=RENEW_SECONDS, reserved=True)
        return await self._still(attempts, rows)

    async def accept(self, leases: Sequence[Lease]) -> list[bool | None]:
        """Let attempts continue without the node; return for each whether it still runs."""
        self._require_pool()
        if not leases:
            return []
        rows = await self.fetch(sql.ACCEPT, *zip(*sorted(last_leases(leases)), strict=True))
        answers = await self._still([AttemptKey(*one[:3]) for one in leases], rows)
        if late := late_deliveries(leases, answers):
            await self.fetch(sql.DELIVERED, *zip(*sorted(late), strict=True))
        return answers

    async def _still(
        self, attempts: Sequence[AttemptKey], changed: Sequence[Sequence[Any]]
    ) -> list[bool | None]:
        """Return for each attempt whether it was changed; None if it is locked."""
        still = {tuple(row) for row in changed}
        answers: list[bool | None] = [attempt in still for attempt in attempts]
        left = [(*one, None, number) for number, one in enumerate(attempts) if not answers[number]]
        return await self._unless_locked(answers, left) if left else answers

    async def _unless_locked(
        self, answers: list[bool | None], left: Sequence[tuple[str, int, int, int | None, int]]
    ) -> list[bool | None]:
        """Return the answers, with None for those of `left` that are locked."""
        try:
            rows = await self.fetch(sql.LOCKED, *zip(*left, strict=True), seconds=WHY_SECONDS)
            locked = [number for (number,) in rows]
        except StoreUnavailable:  # the changes stand; the others are repeated
            locked = [number for *_, number in left]
        for number in locked:
            answers[number] = None
        return answers

    async def services(self, until_ms: int | None = None, since_ms: int = -1) -> list[str]:
        """Return the services with live tasks, or with tasks due in that time.

        The statement reads tasks by due time, and costs as much as is due. If that is very much, it
        returns with `since_ms` the services of the latest tasks, and without it may add services
        whose few tasks are all due later.
        """
        if until_ms is None:
            return [name for (name,) in await self.fetch(sql.SERVICES)]
        rows = await self.fetch(sql.SERVICES_OF_LATEST, since_ms, until_ms)
        if since_ms < 0 and sum(count for _, count in rows) >= sql.LATEST_ROWS:
            rows = await self.fetch(sql.SERVICES_DUE, until_ms)
        return [row[0] for row in rows]

    async def running(
        self, shards: Sequence[int], behind: int | None = None, until_ms: int | None = None
    ) -> list[Task]:
        """Return the running tasks of these shards, without their bodies.

        - Without `behind` it reads every overdue task. With it, it stops in each service and shard
          after `behind` tasks that do not run, which is cheap; later calls find the rest, once the
          tasks before have run.
        - It always finds the first `SWEPT` tasks accepted until `until_ms`. Without `until_ms`, it
          leaves out tasks accepted for more than two hours.
        """
        bound = () if behind is None else (behind,)
        statement = sql.running(bounded=behind is not None)
        rows = await self.fetch(statement, [*shards], until_ms, *bound, seconds=SWEEP_SECONDS)
        if until_ms is not None:
            rows += await self.fetch(sql.ACCEPTED, [*shards], until_ms)
        found = {row[0]: task_of(row) for row in rows}
        if until_ms is not None and behind is None:
            found |= await self._running_ahead(shards)
        return [*found.values()]

    async def _running_ahead(self, shards: Sequence[int]) -> dict[str, Task]:
        """Return running tasks that are due later: the clock was set back while they ran.

        They come before tasks with a later due time, so a short walk along the index finds them.
        """
        statement = sql.running(bounded=True)
        rows = await self.fetch(statement, [*shards], None, AHEAD, seconds=SWEEP_SECONDS)
        tasks = [task_of(row) for row in rows]
        return {one.id: one for one in tasks if one.lease_until_ms != one.due_at_ms}

    async def running_by_id(self, ids: Sequence[str]) -> list[Task]:
        """Return the tasks of these ids that are running, without their bodies."""
        return [task_of(row) for row in await self.fetch(sql.RUNNING_BY_ID, valid_ids(ids))]

    async def cancel(self, ids: Sequence[str]) -> list[Verdict | None]:
        """Cancel tasks that are unclaimed."""
        return await verdicts(self, ids, State.CANCELLED, sql.cancel())

    def cancel_where(self, filter: Filter, limit: int) -> AsyncIterator[list[Due]]:
        """Cancel all unclaimed tasks that match the filter."""
        return changed_where(self, filter, limit, sql.cancel)

    async def reschedule(self, ids: Sequence[str], due_at_ms: int) -> list[Verdict | None]:
        """Give unclaimed tasks another due time."""
        return await verdicts(self, ids, State.DELAY, sql.reschedule(), due_at_ms)

    def reschedule_where(
        self, filter: Filter, due_at_ms: int, limit: int
    ) -> AsyncIterator[list[Due]]:
        """Reschedule all unclaimed tasks that match and are due at another time."""
        return changed_where(self, filter, limit, sql.reschedule, due_at_ms)

    async def expire(self, shards: Sequence[int], limit: int) -> list[Due]:
        """Fail up to `limit` unclaimed tasks of these shards whose deadline has passed."""
        rows = await self.fetch(sql.EXPIRE, [*shards], limit, STATEMENT_BYTES)
        return [Due._make(row) for row in rows]

    async def get(self, ids: Sequence[str]) -> list[Task | None]:
        """Return tasks, live or final."""
        rows = await self.fetch(sql.BY_ID, valid_ids(ids))
        found = {row[0]: task_of(row) for row in rows}
        return [found.get(task_id) for task_id in ids]

    async def find(
        self, filter: Filter, *, final: bool | None, cursor: str | None, limit: int
    ) -> Page:
        """Return tasks newest first."""
        return await find(self, filter, final=final, cursor=cursor, limit=limit)

    async def attempts(self, task_id: str, *, after: int = 0, limit: int = BATCH) -> list[Attempt]:
        """Return the execution log of a task in the order of attempts, from after `after`."""
        if not ID.fullmatch(task_id):
            return []
        rows = await self.fetch(sql.ATTEMPTS, task_id, after, limit, PAGE_BYTES)
        return list(map(attempt_of, rows))

    async def replay(
        self, replays: Sequence[Replay], *, force: bool
    ) -> list[Task | KeyConflict | None]:
        """Submit final tasks again, as new tasks; each once, unless `force`."""
        return await self._transaction(lambda connection: replay(connection, replays, force=force))

    async def prune(self, before_ms: int, limit: int) -> int:
        """Delete up to `limit` final tasks that ended before `before_ms`, with their attempts."""

        async def work(connection: Connection) -> int | None:
            rows: Any = await connection.fetch(sql.OLD, before_ms, limit)
            ids, in_parts = prune_batch(rows, PRUNE_ROWS)
            if in_parts:
                part = await connection.fetch(sql.PRUNE_SOME, ids[0], PRUNE_ROWS)
                if len(part) == PRUNE_ROWS:
                    return None  # it has more
            return len(await connection.fetch(sql.PRUNE, ids)) if ids else 0

        while (count := await self._transaction(work)) is None:
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
        """Make this node the owner of these shards; return their new epochs.

        Running tasks have no index, so that claims are cheap: leases of a dead owner run out by
        themselves.
        """
        del owner_is_dead
        epochs = [None if if_epochs is None else if_epochs[shard] for shard in shards]
        rows: Any = await self.take_over(sql.TAKE, node, [*shards], above, epochs)
        return dict(rows)

    async def take_over(
        self, statement: str, *values: Any, seconds: float | None = None
    ) -> list[Sequence[Any]]:
        """Execute a statement that takes shards over, and end the sessions that block it."""
        fetch = functools.partial(self.fetch, seconds=seconds, reserved=True)
        return await take_over(fetch, statement, *values)

    async def give_up(self, epochs: Mapping[int, int]) -> None:
        """Give up these shards, if they still have these epochs."""
        await self.fetch(sql.GIVE_UP, [*epochs], [*epochs.values()])

    async def owners(self) -> list[ShardRow]:
        """Return all shards by number."""
        return list(map(ShardRow._make, await self.fetch(sql.OWNERS)))

    async def due_counts(self, spans: DueSpans, namespace: str | None) -> list[DueCount]:
        """Return how many live tasks are due in each of some equal times."""
        return await due_counts(self, spans, namespace)

    async def counts(self) -> dict[str, int]:
        """Return the number of live and final tasks; an estimate from 100,000 on."""
        live, final, live_estimate, final_estimate = (await self.fetch(sql.COUNTS))[0]
        return {
            "live": live if live < sql.MANY else max(live, live_estimate),
            "final": final if final < sql.MANY else max(final, final_estimate),
        }

    @property
    def session(self) -> Listener:
        """The connection that lives as long as this process."""
        self._require_pool()
        assert self._listener is not None
        return self._listener

    def subscribe(self, channel: str, on_message: Callable[[str], None]) -> None:
        """Call `on_message(message)` on the running loop for each notification on a channel.

        An empty message means that notifications may have been lost.
        """
        self.session.subscribe(self.channel(channel), on_message)

    def audit_line(self, audit: Audit) -> list[Any]:
        """Return the columns of a line of the audit log, for a statement that writes one."""
        return line(audit)

    def channel(self, name: str) -> str:
        """Return the database's name of a channel: each set of tables has its own."""
        return f"tickwheel_{name}_{self._tables}"
