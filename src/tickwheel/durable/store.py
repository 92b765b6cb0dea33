"""The contract of a store: everything that the service asks of a database.

The store is the source of truth; everything else is a cache of it. The contract is split by user:

- `Tasks`: the steps and the verbs submit, claim, end and list tasks.
- `Shards`: coordinators record which node owns which shard.
- `Notifications`: processes wake each other.
- `Schedules` and `Registry`, in modules of their own: administration.
- `Store` has all of them, and the life cycle of the database itself.

Every method that changes something is one transaction. It has committed when the method returns,
and the answer says who won; when it raises, nothing is acknowledged. `StoreUnavailable` means that
the database is unreachable or refuses to write; other errors mean that an argument is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence

    from tickwheel.durable.coordinator import ShardRow
    from tickwheel.durable.registry import Registry
    from tickwheel.durable.schedules import Schedules
    from tickwheel.values.task import (
        Attempt,
        AttemptKey,
        Change,
        Due,
        DueCount,
        DueSpans,
        Ending,
        Filter,
        KeyConflict,
        Lease,
        Page,
        RepeatedRequest,
        Submission,
        Task,
        Verdict,
    )

LEASE_MS = 30_000  # how long a claim or a renewal lasts
BATCH = 1_000  # the most rows of one statement
STATEMENT_BYTES = 4 << 20  # of payloads that one statement returns or moves, besides the first
SWEPT = 10_000  # the accepted tasks that `running` returns at least
SCAN = 10_000  # rows that a list reads before it answers with a cursor
DUE_EXACT = 20_000  # tasks that a count of due times counts one by one
DUE_READ = 10_000  # entries of an index that it reads beyond them
PRUNE_ROWS = 2_000  # in one transaction; 2 KiB of a payload or result count as a row
FIRE_BYTES = 4 << 20  # of payloads that firings copy in one transaction
PAGE_BYTES = 4 << 20  # of payloads, results and errors: a page that reaches it ends
ERROR_WEIGHT = 16  # bytes of a page per byte of an error: JSON escapes it, up to sixfold
# Why a store refuses a pooler; `doctor` finds this text in an error.
SHARED_SESSION = (
    "a connection pooler such as PgBouncer is in between, and it shares server connections between"
    " transactions (pool_mode = transaction or statement): LISTEN, locks and prepared statements"
    " are lost there. Set pool_mode = session for this database, or connect to PostgreSQL directly"
)


def error_bytes(error: str | None) -> int:
    """Return how many bytes of a page an error fills."""
    return ERROR_WEIGHT * len((error or "").encode())


class InsertLimit(NamedTuple):
    """The most that one `insert` should hold: larger batches are cut into several inserts."""

    rows: int = BATCH
    bytes: int = STATEMENT_BYTES
    keyed: int = BATCH  # rows that have keys


class Window(NamedTuple):
    """How many tasks of one service to read: `overdue` ones, and `later` ones.

    `since_ms`: leave out tasks that were due at that time or before.
    """

    service: str
    overdue: int
    later: int
    since_ms: int = -1


class Claims(NamedTuple):
    """The answer to a claim: the tasks that now run here, and the tasks due at another time.

    - `locked`: unclaimed and due, but locked by another transaction; claim them again.
    - `left`: beyond the bytes of one claim; claim them again.
    """

    tasks: list[Task]
    later: list[Due]
    locked: tuple[Due, ...] = ()
    left: tuple[Due, ...] = ()


class Replay(NamedTuple):
    """A final task to run again, under a new id."""

    id: str
    new_id: str
    shard: int
    due_at_ms: int


class Tasks(Protocol):
    """Tasks, live and final; `tests/contracts/test_tasks*.py` are the other half."""

    @property
    def insert_limit(self) -> InsertLimit:
        """The most that one `insert` should hold: a claim may have to wait behind it."""

    @property
    def joins_transactions(self) -> bool:
        """Whether `within` works: changes in the user's own transaction."""

    async def insert(
        self,
        submissions: Sequence[Submission],
        epochs: Mapping[int, int],
        *,
        again: bool = False,
        patient: bool = True,
    ) -> list[Task | KeyConflict | RepeatedRequest | None]:
        """Store tasks, all in one commit; return one answer per submission, in order.

        - A task: as it is stored. After `replace` it has the id of the task that had the key.
        - `KeyConflict`: a live task has the key, and `on_conflict` is "reject".
        - None: `epochs` has the task's shard, with another epoch than the store.
        - `RepeatedRequest`: the idempotency key was used before, in this batch or another; nothing
          is stored. `KeyConflict` and None do not use up the key; `keep` and `replace` do, for the
          task that has the key.
        - `again`: an earlier call with these submissions lost its answer. A task that it stored is
          returned as it is now, live or final, but without its result.
        - A task that another submission stored, in `KeyConflict` and `RepeatedRequest`, comes
          without its payload and result: a small batch must not read a thousand large ones.
        - `Locked` is raised when another transaction holds a key or an idempotency key: after some
          seconds for a single submission that is `patient`, otherwise after a moment.
        """

    async def within(self, connection: Any, change: Change) -> Any:
        """Make a change on the user's connection, in the user's transaction.

        The answer to a submission is that of `insert`; other changes return verdicts. Blocking
        connections are for `within_now`, in the user's own thread.
        """

    def within_now(self, connection: Any, change: Change) -> Any:
        """Make a change on the user's blocking connection."""

    async def due(
        self, windows: Sequence[Window], shards: Sequence[int], now_ms: int, until_ms: int
    ) -> list[Due]:
        """Return unclaimed tasks of these shards: overdue at `now_ms`, and due up to `until_ms`.

        The tasks of each service are in the order of due time and id. This is one statement on an
        index, whatever the number of tasks in the store.
        """

    async def claim(
        self,
        wanted: Sequence[Due],
        node: str,
        epochs: Mapping[int, int],
        lease_ms: int = LEASE_MS,
        most_bytes: int = STATEMENT_BYTES,
    ) -> Claims:
        """Claim tasks that are unclaimed, due by the store's clock, and in a shard of that epoch.

        - In the order given: the first task whatever its size, and more while their payloads are
          no more than `most_bytes` together.
        - A claimed task is `running`, with the next attempt number, node, epoch and a lease that
          ends `lease_ms` from now by the store's clock.
        - An unclaimed task that is not due yet, or due at another time than given, is `later`.
        - Tasks locked by another transaction are skipped, so that the others need not wait.
        """

    async def record(self, endings: Sequence[Ending]) -> Sequence[bool | None]:
        """End attempts; return for each whether it won: it was the running attempt of its task.

        - Of several endings of one attempt the first wins.
        - None: another transaction has the task locked, and nothing was changed; repeat it.
        - Large payloads are moved in several transactions. If a later one fails, the answers for
          the rest are None, too.
        """

    async def renew(
        self, attempts: Sequence[AttemptKey], lease_ms: int = LEASE_MS
    ) -> Sequence[bool | None]:
        """Extend leases to `lease_ms` from now by the store's clock, except of accepted attempts.

        Return for each whether it is still the running attempt; None as in `record`.
        """

    async def accept(self, leases: Sequence[Lease]) -> Sequence[bool | None]:
        """Let attempts continue without the node, until the end of the given lease.

        Return for each whether it is still the running attempt; None as in `record`. A second
        accept moves the end. The due time that is shown does not change. `delivered_to` of a lease
        goes into the execution log with the end of the attempt, also if it has ended before.
        """

    async def services(self, until_ms: int | None = None, since_ms: int = -1) -> list[str]:
        """Return the services that have live tasks.

        - `until_ms`: all services with a task due up to this; a store may add others if leaving
          them out is expensive.
        - `since_ms`: and due after this. If very many tasks are, the services of the latest ones
          suffice.
        """

    async def running(
        self, shards: Sequence[int], behind: int | None = None, until_ms: int | None = None
    ) -> list[Task]:
        """Return the running tasks of these shards, without their bodies.

        - `behind`: a store that has to read every overdue task may stop, in each service, after
          `behind` unclaimed ones.
        - `until_ms`: tasks whose lease ends at that time or before. Tasks accepted for longer cost
          nothing; without `until_ms` they may be left out. Without `behind`, tasks that run longer
          and were not accepted must be there as well, if a later call with `behind` may not find
          them.
        - Of the accepted tasks at least the first `SWEPT`, by the end of their leases.
        - An accepted task has the end of its lease as due time, which distinguishes it.
        """

    async def running_by_id(self, ids: Sequence[str]) -> list[Task]:
        """Return the tasks of these ids that are running, without their bodies."""

    async def cancel(self, ids: Sequence[str]) -> list[Verdict | None]:
        """Cancel tasks that are unclaimed; None for unknown ids."""

    def cancel_where(self, filter: Filter, limit: int) -> AsyncIterator[list[Due]]:
        """Cancel all unclaimed tasks that match, and yield them in batches of up to `limit`.

        - The filter has a service or a key, so that one pass along an index finds the tasks.
        - Tasks locked by another transaction come last, after a short wait. If some are still
          locked then, `Locked` is raised; all others are cancelled.
        """

    async def reschedule(self, ids: Sequence[str], due_at_ms: int) -> list[Verdict | None]:
        """Give unclaimed tasks another due time; None for unknown ids."""

    def reschedule_where(
        self, filter: Filter, due_at_ms: int, limit: int
    ) -> AsyncIterator[list[Due]]:
        """Reschedule all unclaimed tasks that match and are due at another time.

        Batches and locks are those of `cancel_where`; the tasks are yielded with the new due time.
        """

    async def expire(self, shards: Sequence[int], limit: int) -> list[Due]:
        """Fail up to `limit` unclaimed tasks of these shards whose deadline has passed.

        Return them; an empty list means that no more are left. The number of attempts stays.
        """

    async def get(self, ids: Sequence[str]) -> list[Task | None]:
        """Return tasks, live or final; None for unknown ids."""

    async def find(
        self, filter: Filter, *, final: bool | None, cursor: str | None, limit: int
    ) -> Page:
        """Return tasks newest first: live ones, final ones, or both (`final` None).

        A call reads a bounded number of rows. A page ends at `limit` tasks or `PAGE_BYTES`; it may
        be short, even empty, and still have a next one.
        """

    async def attempts(self, task_id: str, *, after: int = 0, limit: int = BATCH) -> list[Attempt]:
        """Return the execution log of a task in the order of attempts, from after `after`.

        A page ends at `limit` attempts, or at `PAGE_BYTES` as `error_bytes` counts.
        """

    async def replay(
        self, replays: Sequence[Replay], *, force: bool
    ) -> list[Task | KeyConflict | None]:
        """Submit final tasks again, as new tasks; each once, unless `force`.

        None: no final task has this id, or it was replayed. `KeyConflict`: a live task has its
        key; it comes without its payload.
        """

    async def prune(self, before_ms: int, limit: int) -> int:
        """Delete up to `limit` final tasks that ended before `before_ms`, with their attempts.

        The oldest go first, in transactions of a bounded size: fewer tasks if they have many
        attempts or large payloads. Return how many were deleted; 0 means that none are left.
        """

    async def due_counts(self, spans: DueSpans, namespace: str | None) -> list[DueCount]:
        """Return how many live tasks are due in each of some equal times.

        - It walks along an index: the nearest `DUE_EXACT` tasks are counted. Beyond them it reads
          about `DUE_READ` entries, spread over the rest, and estimates from how dense they are.
        - An accepted task counts at its time limit.
        - `namespace`: only the tasks of this namespace; None: of all.
        """

    async def counts(self) -> dict[str, int]:
        """Return the number of "live" and "final" tasks; an estimate from 100,000 on."""


class Shards(Protocol):
    """Owners of shards; `tests/contracts/test_shards.py` is the other half."""

    @property
    def shards(self) -> int:
        """The number of shards, which is set when the store is created."""

    async def take(
        self,
        shards: Sequence[int],
        node: str,
        *,
        owner_is_dead: bool = False,
        above: int = 0,
        if_epochs: Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Make this node the owner of these shards, whoever was; return their new epochs.

        - `if_epochs`: take only those shards that still have these epochs. Any other shard has got
          an owner since, and is not among the returned ones.
        - Sessions of a process that hangs, and keeps the shards locked, are ended.
        - `owner_is_dead`: the last owner's process has ended, so its leases may end now. Not those
          of an owner that gave its shards up, which may still finish its calls, and not those of
          accepted tasks. A store that cannot find the leases quickly lets them run out.
        - The new epochs are higher than the old ones, and than `above`: the highest epoch that the
          node had before a backup was restored.
        """

    async def give_up(self, epochs: Mapping[int, int]) -> None:
        """Give up these shards, if they still have these epochs; calls under way may go on."""

    async def owners(self) -> list[ShardRow]:
        """Return all shards by number, each with its owner and epoch."""


class Notifications(Protocol):
    """Wake-ups between processes; `tests/contracts/test_notifications.py` is the other half.

    A notification may get lost, and a callback may be called without reason: subscribers poll as
    well. All callbacks run on the loop that subscribed.
    """

    def subscribe_due(
        self, on_due: Callable[[], None], shards: Callable[[], Container[int]] | None = None
    ) -> None:
        """Call `on_due()` when another process has stored a task that is due soon.

        - `shards()` returns the shards of interest; without it, all shards count.
        - A second call replaces the first subscription.
        """

    async def notify_due(self, shards: Sequence[int]) -> None:
        """Notify the owners of these shards, in other processes, of a task that is due soon."""

    def subscribe_holds(self, on_hold: Callable[[str, int], None]) -> None:
        """Call `on_hold(service, until_ms)` for each hold of a service."""

    async def notify_hold(self, service: str, until_ms: int) -> None:
        """Notify all nodes that dispatch: send nothing to this service until then."""

    def subscribe_changes(self, on_change: Callable[[], None]) -> None:
        """Call `on_change()` soon after another process has changed the registry or a schedule.

        A subscriber that must not miss a change reads `Registry.version` each second as well.
        """


class Store(Tasks, Shards, Protocol):
    """A database with all of the above; `tests/contracts/test_store.py` is the other half."""

    @property
    def schedules(self) -> Schedules:
        """The schedules in the same database."""

    @property
    def registry(self) -> Registry:
        """Services, tokens and the audit log in the same database."""

    @property
    def notifications(self) -> Notifications:
        """The wake-ups between the processes that use the same database."""

    @property
    def where(self) -> str:
        """The database as messages name it; no user, no password."""

    @property
    def schema_needed(self) -> int:
        """The schema version that this program works with: how many migrations it knows."""

    async def schema_version(self) -> int | None:
        """Return how many migrations the database has had; None: there is no store yet.

        It changes nothing, and works on a store that is not open; so does `migrate`.
        """

    async def migrate(self, notify: Callable[[str], None]) -> None:
        """Bring the schema to the version that is needed, or make the store.

        `open` does the same, but gives up after a while. This waits for other sessions as long as
        they take; `notify(line)` gets a line that names them.
        """

    async def open(self) -> None:
        """Connect, and bring the schema to the version that is needed."""

    async def close(self) -> None:
        """Finish the calls under way, and close every connection."""

    async def require_writable(self) -> None:
        """Raise `StoreUnavailable` if the database does not answer or is read-only."""

    def fault(self) -> str | None:
        """Return why nothing may be dispatched from this store, such as a damaged file, or None.

        A fault lasts until it is repaired. The text has no names and no paths.
        """

    def warning(self) -> str | None:
        """Return a line for the log about a problem that becomes a fault if ignored, or None."""

    def now_ms(self) -> float:
        """Return the store's time: the host's clock on SQLite, the database's on PostgreSQL.

        It is never ahead of the store, so nothing fires early.
        """

    def latest_ms(self) -> float:
        """Return the latest that the store's time can be; delays start from it."""
