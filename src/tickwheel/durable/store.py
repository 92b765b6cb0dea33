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
        Ending,
        Filter,
        Lease,
        Page,
        Repeated,
        Submission,
        Taken,
        Task,
        Verdict,
    )

LEASE_MS = 30_000  # how long a claim or a renewal lasts
BATCH = 1_000  # rows of one statement, at most
STATEMENT_BYTES = 4 << 20  # of payloads that one statement gives or moves, besides the first
SWEPT = 10_000  # accepted tasks that one look for what runs need give
SCAN = 10_000  # rows that a list looks at before it answers with a cursor
PRUNE_ROWS = 2_000  # in one turn; 2 KiB of a payload or result count as a row
FIRE_BYTES = 4 << 20  # of payloads that firings copy in one turn
PAGE_BYTES = 4 << 20  # of payloads, results and errors: a page that has reached it ends
ERROR_WEIGHT = 16  # what a byte of an error counts as there: JSON escapes it, up to sixfold


def error_bytes(error: str | None) -> int:
    """Return how much of a page an error fills."""
    return ERROR_WEIGHT * len((error or "").encode())


class InsertLimit(NamedTuple):
    """How much one `insert` should hold: a larger batch is cut into several inserts."""

    rows: int = BATCH
    bytes: int = STATEMENT_BYTES
    keyed: int = BATCH  # rows that have keys


class Window(NamedTuple):
    """How much of one service to read: tasks that are overdue, and tasks that come later.

    `since_ms`: no overdue tasks that were due by then.
    """

    service: str
    overdue: int
    later: int
    since_ms: int = -1


class Claims(NamedTuple):
    """What a claim gave: tasks now running here, and those that are due at another time.

    - `locked`: unclaimed and due, but a transaction under way has them; ask again.
    - `left`: with them the payloads would have been too large for one claim; ask again.
    """

    tasks: list[Task]
    later: list[Due]
    locked: tuple[Due, ...] = ()
    left: tuple[Due, ...] = ()


class Replay(NamedTuple):
    """A final task to run again, as a new one."""

    id: str
    new_id: str
    shard: int
    due_at_ms: int


class Tasks(Protocol):
    """Tasks, live and final; `tests/contracts/test_tasks*.py` are the other half."""

    @property
    def insert_limit(self) -> InsertLimit:
        """How much one `insert` should hold, so that a claim does not wait for long behind it."""

    @property
    def joins_transactions(self) -> bool:
        """Whether changes can be made by connections of the user's own, by `within`."""

    async def insert(
        self,
        submissions: Sequence[Submission],
        epochs: Mapping[int, int],
        *,
        again: bool = False,
        patient: bool = True,
    ) -> list[Task | Taken | Repeated | None]:
        """Store tasks, all in one commit; the answers are in their order.

        - A task as it is stored; after `replace` under the id of the one that had the key.
        - `Taken` when a live task has the key, and on_conflict does not settle it.
        - None when the task's shard is in `epochs` and that is not the shard's epoch any more.
        - `again`: these may have been stored already, by a call whose answer was lost; a task that
          was, live or final by now, is answered as it is stored.
        - `Repeated` when its idempotency key was used before, in another batch or in this one; then
          nothing is stored. A submission that is refused, with `Taken` or None, has not used it.
          One that `keep` or `replace` settles has, for the task that has the key.
        - What another transaction holds, a key or the name of a request, is `Locked`: for a single
          submission that is `patient` after some seconds, otherwise after a moment.
        """

    async def within(self, connection: Any, change: Change) -> Any:
        """Make a change by a connection of the user's own, in the user's transaction.

        A submission is answered as by `insert`, the others by verdicts. Connections that block are
        for `within_now`, in the user's own thread.
        """

    def within_now(self, connection: Any, change: Change) -> Any:
        """Make a change by a connection of the user's own that blocks."""

    async def due(
        self, windows: Sequence[Window], shards: Sequence[int], now_ms: int, until_ms: int
    ) -> list[Due]:
        """Return unclaimed tasks of these shards: overdue by `now_ms`, and later up to `until_ms`.

        Each service's by due time, then id. One statement, by index, however many tasks there are.
        """

    async def claim(
        self,
        wanted: Sequence[Due],
        node: str,
        epochs: Mapping[int, int],
        lease_ms: int = LEASE_MS,
        most_bytes: int = STATEMENT_BYTES,
    ) -> Claims:
        """Claim what is unclaimed, due by the store's clock, and in a shard of that epoch.

        In the order given: one task of any size, and more as long as their payloads are no more
        than `most_bytes` together.

        A claimed task is `running`, its attempt one higher, with node, epoch and a lease that ends
        `lease_ms` from now by the store's clock. One that is unclaimed but due at another time
        than it was loaded with, or not yet due, is `later`.
        What a transaction of somebody else's has locked is not waited for: nobody else has to.
        """

    async def record(self, endings: Sequence[Ending]) -> Sequence[bool | None]:
        """End attempts; for each whether it won, that is, was the running attempt of its task.

        Of several endings of one attempt the first wins. None: a transaction of somebody else's has
        the task locked; nothing was changed, and it is to be asked again. Large payloads are moved
        in several transactions: where a later one fails, the rest are to be asked again, too.
        """

    async def renew(
        self, attempts: Sequence[AttemptKey], lease_ms: int = LEASE_MS
    ) -> Sequence[bool | None]:
        """Have leases end `lease_ms` from now by the store's clock; not those of accepted ones.

        For each whether it is still the running attempt; None as above.
        """

    async def accept(self, leases: Sequence[Lease]) -> Sequence[bool | None]:
        """Let attempts go on without the node, until the lease's end.

        For each whether the attempt is still the running one; None as above. It may be accepted
        again: that moves the end. The due time is shown as it was, also when the task has ended.
        """

    async def services(self, until_ms: int | None = None, since_ms: int = -1) -> list[str]:
        """Return the services that live tasks have.

        - `until_ms`: all that have one that is due by then; others only where telling costs too
          much.
        - `since_ms`: and later than this. Where very many are, those of the latest will do.
        """

    async def running(
        self, shards: Sequence[int], behind: int | None = None, until_ms: int | None = None
    ) -> list[Task]:
        """Return the running tasks of these shards, their bodies left out.

        - `behind`: a store that would have to look at every overdue task may stop, service by
          service, when it has passed so many that are unclaimed.
        - `until_ms`: those whose lease ends by then; others that were accepted for longer cost
          nothing. Without it such ones may be left out. What runs for longer and was not accepted
          must be there as well, without `behind`, if a later look with it may not see it.
        - Of those that were accepted at least the first `SWEPT`, by when their leases end.
        - One that was accepted is due here when its lease ends: that tells it from the others.
        """

    async def running_by_id(self, ids: Sequence[str]) -> list[Task]:
        """Return those of these tasks that run, as `running` does; by their ids, at any number."""

    async def cancel(self, ids: Sequence[str]) -> list[Verdict | None]:
        """Cancel what is unclaimed; None for ids that are unknown."""

    def cancel_where(self, filter: Filter, limit: int) -> AsyncIterator[list[Due]]:
        """Cancel all unclaimed tasks that match, up to `limit` at a time, and give them.

        - The filter has a service or a key: an index serves it, and it is walked along once.
        - Those that another transaction has locked come last, and are waited for a little: what it
          does not let go by then is `Locked`, and all the others are cancelled.
        """

    async def reschedule(self, ids: Sequence[str], due_at_ms: int) -> list[Verdict | None]:
        """Make what is unclaimed due at another time; None for ids that are unknown."""

    def reschedule_where(
        self, filter: Filter, due_at_ms: int, limit: int
    ) -> AsyncIterator[list[Due]]:
        """Reschedule all unclaimed tasks that match and are due at another time, in the same way.

        They are given as they are due now.
        """

    async def expire(self, shards: Sequence[int], limit: int) -> list[Due]:
        """Fail up to `limit` unclaimed tasks of these shards whose deadline has passed.

        They were not called: their attempts are what they were. Returns them; none: that was all.
        """

    async def get(self, ids: Sequence[str]) -> list[Task | None]:
        """Return tasks, live or final; None for ids that are unknown."""

    async def find(
        self, filter: Filter, *, final: bool | None, cursor: str | None, limit: int
    ) -> Page:
        """Return tasks newest first: live ones, final ones, or both (`final` None).

        It looks at a bounded number of rows, and reads no more than a page: `limit` tasks, or those
        that reach `PAGE_BYTES`. A page may be short, even empty, and still have a next one.
        """

    async def attempts(self, task_id: str, *, after: int = 0, limit: int = BATCH) -> list[Attempt]:
        """Return the execution log of a task by attempt, from the first behind `after` on.

        Up to `limit` of them, or those that reach `PAGE_BYTES`, as `error_bytes` counts.
        """

    async def replay(self, replays: Sequence[Replay], *, force: bool) -> list[Task | Taken | None]:
        """Make new tasks of final ones, each once unless `force`.

        None: it is not in the backlog, or has been replayed. `Taken`: a live task has its key.
        """

    async def prune(self, before_ms: int, limit: int) -> int:
        """Delete up to `limit` final tasks that ended before `before_ms`, with their attempts.

        The oldest first, in turns of a bounded size: of those with many attempts or large payloads
        fewer go at once. Returns how many went; 0: there are no more.
        """

    async def counts(self) -> dict[str, int]:
        """Return how many "live" and "final" tasks there are; an estimate from 100,000 on."""


class Shards(Protocol):
    """Owners of shards; `tests/contracts/test_shards.py` is the other half."""

    @property
    def shards(self) -> int:
        """How many shards there are: set when the store was made."""

    async def take(
        self, shards: Sequence[int], node: str, *, owner_is_dead: bool = False, above: int = 0
    ) -> dict[int, int]:
        """Become the owner of these shards, whoever was; return their new epochs.

        - `owner_is_dead`: whoever has them is known to have ended, so its leases may end now; not
          those of an owner that gave its shards up, for it may still be ending its calls, and not
          those of accepted tasks. A store that cannot find them quickly leaves them to their time.
        - The epochs are higher than those before, and than `above`: what the node had before a
          backup was restored.
        """

    async def give_up(self, epochs: Mapping[int, int]) -> None:
        """Own these shards of these epochs no longer; calls of that owner may still go on."""

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
        """What the same database remembers besides tasks."""

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
        """Let go of every connection; what was under way ends first."""

    async def require_writable(self) -> None:
        """Raise `StoreUnavailable` when the database does not answer, or cannot be written."""

    def fault(self) -> str | None:
        """Return why nothing may be dispatched from this store, or None; no names or paths in it.

        It is about the store as a whole, and lasts until that is mended: a damaged file, say.
        """

    def warning(self) -> str | None:
        """Return what will become a fault unless somebody acts, in words for the log, or None."""

    def now_ms(self) -> float:
        """Return the store's time: the host's on SQLite, the database's own on PostgreSQL.

        It is never ahead of the store, so nothing fires early.
        """

    def latest_ms(self) -> float:
        """Return the latest that the store's time can be: what a delay is reckoned from."""
