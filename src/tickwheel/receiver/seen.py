"""Which tasks have been done: the contract, and the one that remembers in memory."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Generator
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.arguments import bounded
from tickwheel.clock import forkable

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BYTES = 16 << 20  # of answers in memory


class Seen(Protocol):
    """What a receiver asks before and after it has a task done.

    For one that outlives the process and counts for all of them, use the database that the work
    itself is written to: `begin` looks whether the id is there, and the handler inserts it in the
    transaction of its work. Then either both are there or neither, and `done` and `forget` have
    nothing to do. The methods may be coroutine functions, under Starlette and FastAPI.
    """

    def begin(self, task_id: str) -> Any:
        """Return None: it is new, and begins now; True: it is under way; or its answer, as bytes.

        Of two that begin at once, only one may hear None, unless the handler's transaction settles
        it. The answer is what `done` was given; b"" when there was none, or it was not kept.

        Anything else, False say, is a TypeError, and the task is tried again: to take it for one
        that was done would lose it.
        """

    def done(self, task_id: str, answer: bytes) -> Any:
        """It was done, and answered so."""

    def forget(self, task_id: str) -> Any:
        """It was begun and not done: the next one is new."""


class MemorySeen:
    """Remembers the last `size` tasks that this process has done, and those under way.

    - The longest unseen are forgotten first.
    - Answers take 16 MiB at most: beyond that the longest unseen lose theirs, and stay done.
    - Another process, or this one after a restart, knows nothing of them.
    """

    def __init__(self, size: int = 10_000) -> None:
        self._size = bounded("size", size, 0, 100_000_000)
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._done: OrderedDict[str, None] = OrderedDict()
        self._answers: OrderedDict[str, bytes] = OrderedDict()  # of done ones, in their order
        self._bytes = 0
        forkable.add(self)

    def begin(self, task_id: str) -> bytes | bool | None:
        """Return None for a new one, True for one that is under way, or the answer of one done."""
        with self._lock:
            if task_id in self._done:
                self._done.move_to_end(task_id)
                if task_id not in self._answers:
                    return b""
                self._answers.move_to_end(task_id)
                return self._answers[task_id]
            if task_id in self._running:
                return True
            self._running.add(task_id)
            return None

    def done(self, task_id: str, answer: bytes) -> None:
        """Remember that it was done."""
        with self._lock:
            self._running.discard(task_id)
            self._drop(task_id)
            self._done[task_id] = None
            if 0 < len(answer) <= MOST_BYTES:  # a longer one would cost all others theirs
                self._answers[task_id] = answer
                self._bytes += len(answer)
            while self._bytes > MOST_BYTES:
                self._bytes -= len(self._answers.popitem(last=False)[1])
            while len(self._done) > self._size:
                self._drop(next(iter(self._done)))

    def _drop(self, task_id: str) -> None:
        self._done.pop(task_id, None)
        self._bytes -= len(self._answers.pop(task_id, b""))

    def forget(self, task_id: str) -> None:
        """Let the next one be new."""
        with self._lock:
            self._running.discard(task_id)

    def __len__(self) -> int:
        return len(self._done)

    def _forked(self) -> None:
        """In the child of a fork: what is under way is under way in the parent."""
        self._lock = threading.Lock()
        self._running = set()


class AskedSeen:
    """A function of the user's that says whether a task has been done; it keeps no marks."""

    def __init__(self, is_done: Callable[[str], Any]) -> None:
        self._is_done = is_done

    def begin(self, task_id: str) -> Any:
        """Ask; an answer that is yet to come is there when this is awaited."""
        answer = self._is_done(task_id)
        # Only the answer tells: a lambda or an object may return a coroutine, too.
        return Asked(answer) if inspect.isawaitable(answer) else known_if(answer)

    def done(self, task_id: str, answer: bytes) -> None:
        """It is the handler's to note."""

    def forget(self, task_id: str) -> None:
        """Nothing was noted."""


class Asked(Awaitable[bytes | None]):
    """What `begin` returns while the user's function has not answered."""

    def __init__(self, answer: Awaitable[Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, Any, bytes | None]:
        return known_if((yield from self._answer.__await__()))

    def close(self) -> None:
        """Nobody will wait for it."""
        if inspect.iscoroutine(self._answer):
            self._answer.close()


def known_if(is_done: object) -> bytes | None:
    """Return what `begin` says of a task that is done, or is new."""
    return b"" if is_done else None


def seen_of(dedupe: int | Seen | Callable[[str], Any]) -> Seen:
    """Return what `dedupe` asks for."""
    if isinstance(dedupe, int):
        return MemorySeen(dedupe)
    if all(hasattr(dedupe, name) for name in ("begin", "done", "forget")):
        return dedupe  # type: ignore[return-value]
    if callable(dedupe):
        return AskedSeen(dedupe)
    raise TypeError(
        "dedupe must be a number, a function of a task id, or have begin, done and forget, got"
        f" {dedupe!r:.100}"
    )
