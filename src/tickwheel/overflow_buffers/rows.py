"""What the overflow buffers on servers have in common: entries here, a row for each there.

The wheel's entries cannot leave their process, so they stay in memory, by number; the row keeps
what a later process needs, the expiry and the item as JSON. Knows nothing of any server: a buffer
adds the statements and turns the driver's errors into `StoreUnavailable`.

The hard part is an answer that never came: the statement may have been done, or not. The rows
that it was about are then *in doubt*. Before the next statement each of them is set right, all in
one transaction: a row is there when an entry stands for it, and gone when none does. And it may be
done later still, by a server that stood still: so once a server has failed, the entries in memory
say what there is to take, and the rows follow them.
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
from tickwheel.values.json.call import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tickwheel import Entry, Wheel

T = TypeVar("T")

CHUNK = 500  # rows that `restore` replaces in one transaction


class Key(NamedTuple):
    """Which row: the buffer that wrote it, the entry's number there, and its expiry."""

    owner: str
    number: int
    expiry: int


class Row(NamedTuple):
    """One entry as it is stored."""

    key: Key
    item: bytes


class RowBuffer(ABC):
    """An overflow buffer whose items survive the process; a subclass adds the server.

    - Items must be JSON, as `tickwheel.values.json.call` has it: otherwise `put` raises TypeError
      or ValueError, and nothing has changed.
    - `StoreUnavailable` when the server does not do its part: nothing has changed, nothing is
      lost, and the next call tries again.
    - What is in the buffer survives kill -9 and comes back by `restore`. What was handed over is
      on the wheel, in memory. A reschedule is a discard and a put: a kill between the two loses
      that entry. A put that failed may have left a row, which `restore` then brings back.
    - Buffers of different names do not meet. Those of one name see their own entries only, but
      `restore` takes over the others': it is for when those are gone.
    - One buffer is for one wheel, and like it for one thread at a time.

    Cost: `put`, `discard` and `take` are one statement, `next_expiry` at most one, `len` none.
    Once the server has failed, a `take` also looks at every entry in memory.
    """

    _tries = 2  # a connection that broke while it was idle is no reason to fail

    def __init__(self, name: str) -> None:
        if not 0 < len(name) <= 200 or "\0" in name:
            raise ValueError(f"name must be a text of 1 to 200 characters, got {name!r:.100}")
        self.name = name
        self._owner = secrets.token_hex(8)
        self._count = itertools.count(1)
        self._entries: dict[int, Entry[Any]] = {}
        self._numbers: dict[Entry[Any], int] = {}
        self._smallest: int | None = None  # the smallest expiry, where it is known
        self._doubtful: dict[int, Key] = {}
        self._stale: list[Key] = []  # rows of others whose items are entries of ours by now
        self._shaken = False  # the server failed, and nobody has looked whether it lost rows
        self._failed = False  # the server has failed at least once
        self._restoring = False
        self._discarded: tuple[weakref.ref[Entry[Any]], int] | None = None
        self._ended = ""
        forkable.add(self)

    def put(self, entry: Entry[Any], /) -> None:
        """Keep `entry` by its `entry.expiry`, and its item in a row."""
        if entry in self._numbers:
            return
        row = Row(Key(self._owner, next(self._count), entry.expiry), encode(entry.item))
        if self._restoring:
            self._doubt([row.key])  # `restore` will store it, many at once
        else:
            self._put(entry, row)
        known = self._smallest is not None or not self._entries
        if known and (self._smallest is None or entry.expiry < self._smallest):
            self._smallest = entry.expiry
        self._entries[row.key.number] = entry
        self._numbers[entry] = row.key.number
        self._discarded = None

    def _put(self, entry: Entry[Any], row: Row) -> None:
        try:
            self._try(self._insert, row, about=lambda: [row.key])
        except StoreUnavailable:
            # A reschedule that failed halfway puts its entry back, and has no other place for it.
            # It is taken: the row is in doubt, so it is stored as soon as the server is back.
            if not self._was_just_discarded(entry):
                raise

    def take(self, before: int, /) -> list[Entry[Any]]:
        """Remove and return every entry whose expiry is less than `before`.

        By expiry, then in the order they were put.
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
        """Forget `entry` and its row; unknown ones are ignored."""
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
        """Return the smallest expiry kept, or None."""
        if not self._entries:
            return None
        if self._smallest is None and not self._failed:
            self._smallest = self._try(self._least)
            if self._smallest is None:  # it has lost what it had acknowledged
                self._failed = self._shaken = True
        if self._smallest is None:
            self._smallest = min(entry.expiry for entry in self._entries.values())
        return self._smallest

    def restore(self, wheel: Wheel[Any]) -> int:
        """Schedule on `wheel` what other buffers of this name left behind; return how many.

        - What lies beyond the wheel's levels comes into this buffer, the rest is on the wheel.
        - A row left behind is replaced in one transaction: killed in the middle, none is lost or
          doubled. After an error it may be called again, and goes on.
        """
        rows = self._try(self._others)
        on_levels: list[Key] = []  # their rows go last: until then a kill loses none of them
        try:
            for start in range(0, len(rows), CHUNK):
                self._adopt(wheel, rows[start : start + CHUNK], on_levels)
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
        """Let go of the server. The rows stay there, for a `restore` by the next process."""
        if not self._ended:
            self._ended = "closed"
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
        state = f" {self._ended}" if self._ended else ""
        return f"<{type(self).__name__} {self.name!r} entries={len(self)}{state}>"

    def _try(
        self,
        statement: Callable[..., T],
        *arguments: object,
        about: Callable[[], Iterable[Key]] = list,
    ) -> T:
        """Settle what is in doubt, then run `statement`; if that fails, these rows are in doubt."""
        if self._ended:
            raise RuntimeError(f"this overflow buffer is {self._ended}")
        for left in reversed(range(self._tries)):
            try:
                self._settle()
                return statement(*arguments)
            except BaseException as error:  # an interrupt leaves as much in doubt as a lost answer
                self._failed = self._shaken = True
                self._doubt(about())
                if not left or not isinstance(error, StoreUnavailable):
                    raise
        raise AssertionError("the last try returns or raises")

    def _doubt(self, keys: Iterable[Key]) -> None:
        self._doubtful.update((key.number, key) for key in keys)

    def _settle(self) -> None:
        """Make the rows those of the entries again, as far as they are in doubt."""
        if self._doubtful or self._stale:
            self._mend()
        if self._shaken:
            if self._rows() != len(self._entries):
                self._doubt(map(self._key, self._entries))
                self._mend()
            self._shaken = False

    def _mend(self) -> None:
        kept = []
        for number, key in self._doubtful.items():
            entry = self._entries.get(number)
            if entry is not None and entry.pending:
                kept.append(Row(key, encode(entry.item)))
            elif entry is not None:
                self._forget(number)  # its batch was undone while the server was gone
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

    def _forked(self) -> None:
        """In the child: entries, rows and connection are the parent's."""
        self._ended = "the parent's: it was made before a fork, make one in this process"

    # The server's part. Each is one transaction, and raises StoreUnavailable when it cannot.

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
        """Remove rows that may be there, anyone's, then store `rows`."""

    @abstractmethod
    def _least(self) -> int | None:
        """Return the smallest expiry of own rows, or None."""

    @abstractmethod
    def _rows(self) -> int:
        """Return how many own rows there are."""

    @abstractmethod
    def _others(self) -> Sequence[Row]:
        """Return the rows of this name that other buffers wrote, by owner and number."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of the connection."""
