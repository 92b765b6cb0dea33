"""The base of the overflow buffers in databases: entries in memory, and a row for each.

The wheel's entries cannot leave their process, so they stay in memory, by number. A row has what a
later process needs: the expiry, and the item as JSON. This module does not depend on any database:
a subclass adds the statements and turns the driver's errors into `StoreUnavailable`.

The hard part is a lost answer: the server may have executed the statement or not. Its rows are then
*in doubt*. Before the next statement, one transaction corrects them all: a row exists if and only
if an entry does. A server that hung may even execute the statement later. So once a server has
failed, the entries in memory decide what `take` returns, and the rows follow them.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from tickwheel.arguments import MAX_TIME
from tickwheel.clock import forkable
from tickwheel.errors import StoreUnavailable
from tickwheel.values.json.encode import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tickwheel import Entry, Wheel

T = TypeVar("T")

RESTORE_ROWS = 500  # rows that `restore` replaces in one transaction


class Key(NamedTuple):
    """The key of a row: the buffer that wrote it, the entry's number there, and its expiry."""

    owner: str
    number: int
    expiry: int


class Row(NamedTuple):
    """One stored entry."""

    key: Key
    item: bytes


class RowBuffer(ABC):
    """An overflow buffer whose items survive the process; a subclass adds the database.

    - Items must be JSON, as in `tickwheel.values.json.encode`: otherwise `put` raises TypeError or
      ValueError, and nothing changes.
    - `StoreUnavailable` if the server fails: nothing changes, nothing is lost, and the next call
      tries again.
    - The entries in the buffer survive kill -9, and `restore` brings them back. An entry that
      `take` returned is on the wheel, in memory. A reschedule is a discard and a put: a kill
      between the two loses that entry. A failed put may leave a row, which `restore` brings back.
    - Buffers of different names are independent. Buffers of one name see their own entries only,
      but `restore` takes over the others' entries: call it when their processes are gone.
    - A buffer serves one wheel, and like it one thread at a time.

    Cost: `put`, `discard` and `take` are one statement, `next_expiry` at most one, `len` none.
    Once the server has failed, a `take` also scans every entry in memory.
    """

    _tries = 2  # a connection that broke while idle must not fail a call

    def __init__(self, name: str) -> None:
        if not 0 < len(name) <= 200 or "\0" in name:
            raise ValueError(f"name must be a text of 1 to 200 characters, got {name!r:.100}")
        self.name = name
        self._owner = secrets.token_hex(8)
        self._count = itertools.count(1)
        self._entries: dict[int, Entry[Any]] = {}
        self._numbers: dict[Entry[Any], int] = {}
        self._smallest: int | None = None  # the smallest expiry, if known
        self._doubtful: dict[int, Key] = {}
        self._stale: list[Key] = []  # rows of others whose items are entries of this buffer now
        self._rows_may_be_lost = False  # the server failed, and the rows were not counted since
        self._failed = False  # the server has failed at least once
        self._restoring = False
        self._discarded: tuple[weakref.ref[Entry[Any]], int] | None = None
        self._closed_as = ""
        forkable.add(self)

    def put(self, entry: Entry[Any], /) -> None:
        """Store `entry` by its `entry.expiry`, and its item in a row."""
        if entry in self._numbers:
            return
        row = Row(Key(self._owner, next(self._count), entry.expiry), encode(entry.item))
        if self._restoring:
            self._mark_doubtful([row.key])  # `restore` will store it, many at once
        else:
            self._put(entry, row)
        known = self._smallest is not None or not self._entries
        if known and (self._smallest is None or entry.expiry < self._smallest):
            self._smallest = entry.expiry
        self._entries[row.key.number] = entry
        self._numbers[entry] = row.key.number
        self._discarded = None

    def _put(self, entry: Entry[Any], row: Row) -> None:
        sent: list[Key] = []  # a row that was never sent is in no doubt: an outage may have many

        def insert() -> None:
            sent.append(row.key)
            self._insert(row)

        try:
            self._try(insert, about=lambda: sent)
        except StoreUnavailable:
            # A reschedule that failed halfway puts its entry back, and nothing else holds it.
            # Accept it: a row is missing then, so all are stored as soon as the server is back.
            if not self._was_just_discarded(entry):
                raise

    def take(self, before: int, /) -> list[Entry[Any]]:
        """Remove and return every entry whose expiry is less than `before`.

        They are sorted by expiry, then by the order of their puts.
        """
        known = self._smallest if self._entries else before
        if before <= 0 or (known is not None and known >= before):
            return []
        last = min(before - 1, MAX_TIME)
        removed = self._try(self._remove_until, last, about=lambda: self._keys_until(last))
        self._smallest = self._discarded = None
        taken = {number for number in removed if number in self._entries}
        if self._failed:
            taken.update(key.number for key in self._keys_until(last))
        ordered = sorted(taken, key=lambda number: (self._entries[number].expiry, number))
        return [self._forget(number) for number in ordered]

    def discard(self, entry: Entry[Any], /) -> None:
        """Remove `entry` and its row; ignore an unknown one."""
        number = self._numbers.get(entry)
        if number is None:
            return
        key = self._key(number)
        self._try(self._remove, key, about=lambda: [key])
        if number in self._entries:  # settling may have forgotten it
            self._forget(number)
        if self._smallest == key.expiry:
            self._smallest = None
        self._discarded = weakref.ref(entry), key.expiry

    def next_expiry(self) -> int | None:
        """Return the smallest expiry, or None."""
        if not self._entries:
            return None
        if self._smallest is None and not self._failed:
            self._smallest = self._try(self._smallest_expiry)
            if self._smallest is None:  # the server has lost acknowledged rows
                self._failed = self._rows_may_be_lost = True
        if self._smallest is None:
            self._smallest = min(entry.expiry for entry in self._entries.values())
        return self._smallest

    def restore(self, wheel: Wheel[Any]) -> int:
        """Schedule the entries that other buffers of this name left on `wheel`; return how many.

        - Entries beyond the wheel's levels go into this buffer, the others onto the wheel.
        - Each row is replaced in one transaction, so that a kill neither loses nor doubles one.
          After an error, call it again to continue.
        """
        rows = self._try(self._rows_of_others)
        on_levels: list[Key] = []  # remove their rows last: until then a kill loses none of them
        try:
            for start in range(0, len(rows), RESTORE_ROWS):
                self._adopt(wheel, rows[start : start + RESTORE_ROWS], on_levels)
        finally:
            self._stale += on_levels
        self._try(lambda: None)
        return len(rows)

    def _adopt(self, wheel: Wheel[Any], rows: Sequence[Row], on_levels: list[Key]) -> None:
        self._restoring = True
        try:
            for row in rows:
                entry = wheel.schedule(row.key.expiry, decode(row.item))
                (self._stale if entry in self._numbers else on_levels).append(row.key)
        finally:
            self._restoring = False
        self._try(lambda: None)

    def close(self) -> None:
        """Disconnect. The rows stay, for a `restore` by the next process."""
        if not self._closed_as:
            self._closed_as = "closed"
            self._disconnect()

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f" {self._closed_as}" if self._closed_as else ""
        return f"<{type(self).__name__} {self.name!r} entries={len(self)}{state}>"

    def _try(
        self,
        statement: Callable[..., T],
        *arguments: object,
        about: Callable[[], Iterable[Key]] = list,
    ) -> T:
        """Correct the rows in doubt, then run `statement`; if it fails, its rows are in doubt."""
        if self._closed_as:
            raise RuntimeError(f"this overflow buffer is {self._closed_as}")
        for left in reversed(range(self._tries)):
            try:
                self._settle()
                return statement(*arguments)
            except BaseException as error:  # an interrupt leaves rows in doubt like a lost answer
                self._failed = self._rows_may_be_lost = True
                self._mark_doubtful(about())
                if not left or not isinstance(error, StoreUnavailable):
                    raise
        raise AssertionError("the last try returns or raises")

    def _mark_doubtful(self, keys: Iterable[Key]) -> None:
        self._doubtful.update((key.number, key) for key in keys)

    def _settle(self) -> None:
        """Correct the rows in doubt, so that they match the entries."""
        if self._doubtful or self._stale:
            self._rewrite_doubtful()
        if self._rows_may_be_lost:
            if self._count_rows() != len(self._entries):
                self._mark_doubtful(map(self._key, self._entries))
                self._rewrite_doubtful()
            self._rows_may_be_lost = False

    def _rewrite_doubtful(self) -> None:
        kept = []
        for number, key in self._doubtful.items():
            entry = self._entries.get(number)
            if entry is not None and entry.pending:
                kept.append(Row(key, encode(entry.item)))
            elif entry is not None:
                self._forget(number)  # its batch was undone while the server was away
        self._replace([*self._stale, *self._doubtful.values()], kept)
        self._stale.clear()
        self._doubtful.clear()
        self._smallest = None

    def _keys_until(self, last: int) -> list[Key]:
        return [key for key in map(self._key, self._entries) if key.expiry <= last]

    def _key(self, number: int) -> Key:
        return Key(self._owner, number, self._entries[number].expiry)

    def _forget(self, number: int) -> Entry[Any]:
        entry = self._entries.pop(number)
        del self._numbers[entry]
        return entry

    def _was_just_discarded(self, entry: Entry[Any]) -> bool:
        if self._discarded is None:
            return False
        reference, expiry = self._discarded
        return reference() is entry and expiry == entry.expiry

    def _after_fork_in_child(self) -> None:
        """Close the buffer in the child: entries, rows and connection are the parent's."""
        self._closed_as = "the parent's: it was made before a fork, make one in this process"

    # Implemented for each database. Each is one transaction, and raises StoreUnavailable.

    @abstractmethod
    def _insert(self, row: Row) -> None:
        """Store one row."""

    @abstractmethod
    def _remove(self, key: Key) -> None:
        """Remove one row."""

    @abstractmethod
    def _remove_until(self, last: int) -> Iterable[int]:
        """Remove own rows whose expiry is at most `last`; return their numbers."""

    @abstractmethod
    def _replace(self, gone: Sequence[Key], rows: Sequence[Row]) -> None:
        """Remove rows of any buffer, if they exist, then store `rows`."""

    @abstractmethod
    def _smallest_expiry(self) -> int | None:
        """Return the smallest expiry of own rows, or None."""

    @abstractmethod
    def _count_rows(self) -> int:
        """Return the number of own rows."""

    @abstractmethod
    def _rows_of_others(self) -> Sequence[Row]:
        """Return the rows of this name that other buffers wrote, by owner and number."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the connection."""
