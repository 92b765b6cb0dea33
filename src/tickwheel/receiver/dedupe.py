"""Remember which tasks are done, to handle each once: the contract `Seen`, and `MemorySeen`."""

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

MAX_ANSWER_BYTES = 16 << 20  # of all answers in memory


class Seen(Protocol):
    """The memory of done tasks that a receiver uses before and after each handler.

    To share it between processes and keep it across restarts, use the database that the work
    itself is written to: `begin` checks whether the id is stored, and the handler inserts it in the
    transaction of its work. Then either both are stored or neither, and `done` and `forget` are
    no-ops. Under Starlette and FastAPI the methods may be coroutine functions.
    """

    def begin(self, task_id: str) -> Any:
        """Begin a task: return None if it is new, True if in progress, its answer if done.

        If two calls begin at once, only one may get None, unless the handler's transaction decides
        between them. The answer is the bytes that `done` got; b"" if there was no answer, or it was
        not kept.

        Any other value, such as False, raises TypeError, and the task is retried: to count it as
        done would lose the task.
        """

    def done(self, task_id: str, answer: bytes) -> Any:
        """Mark a task as done, with its answer."""

    def forget(self, task_id: str) -> Any:
        """Undo `begin` of a task that was not done: the next call is new."""


class MemorySeen:
    """Remembers the last `size` tasks done by this process, and those in progress.

    - The least recently seen task is forgotten first.
    - Answers take at most 16 MiB: beyond that the least recently seen lose theirs, and stay done.
    - Nothing is shared with other processes, or kept across a restart.
    """

    def __init__(self, size: int = 10_000) -> None:
        self._size = bounded("size", size, 0, 100_000_000)
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._done: OrderedDict[str, None] = OrderedDict()
        self._answers: OrderedDict[str, bytes] = OrderedDict()  # of done tasks, in the same order
        self._bytes = 0
        forkable.add(self)

    def begin(self, task_id: str) -> bytes | bool | None:
        """Return None for a new task, True for one in progress, or the answer of a done one."""
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
        """Remember that a task is done."""
        with self._lock:
            self._running.discard(task_id)
            self._drop(task_id)
            self._done[task_id] = None
            if 0 < len(answer) <= MAX_ANSWER_BYTES:  # a longer one would evict all others
                self._answers[task_id] = answer
                self._bytes += len(answer)
            while self._bytes > MAX_ANSWER_BYTES:
                self._bytes -= len(self._answers.popitem(last=False)[1])
            while len(self._done) > self._size:
                self._drop(next(iter(self._done)))

    def _drop(self, task_id: str) -> None:
        self._done.pop(task_id, None)
        self._bytes -= len(self._answers.pop(task_id, b""))

    def forget(self, task_id: str) -> None:
        """Let the next call of a task be new."""
        with self._lock:
            self._running.discard(task_id)

    def __len__(self) -> int:
        return len(self._done)

    def _after_fork_in_child(self) -> None:
        """In the child of a fork, forget tasks in progress: the parent runs them."""
        self._lock = threading.Lock()
        self._running = set()


class FunctionSeen:
    """A user's function that returns whether a task is done; nothing is remembered here."""

    def __init__(self, is_done: Callable[[str], Any]) -> None:
        self._is_done = is_done

    def begin(self, task_id: str) -> Any:
        """Call the function; if its answer is awaitable, so is the result."""
        answer = self._is_done(task_id)
        # Check the answer, not the function: a lambda or an object may also return a coroutine.
        return PendingAnswer(answer) if inspect.isawaitable(answer) else known_answer(answer)

    def done(self, task_id: str, answer: bytes) -> None:
        """Do nothing: the handler records it."""

    def forget(self, task_id: str) -> None:
        """Do nothing: nothing was recorded."""


class PendingAnswer(Awaitable[bytes | None]):
    """The result of `begin` while the user's function has not answered yet."""

    def __init__(self, answer: Awaitable[Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, Any, bytes | None]:
        return known_answer((yield from self._answer.__await__()))

    def close(self) -> None:
        """Close a coroutine that will not be awaited."""
        if inspect.iscoroutine(self._answer):
            self._answer.close()


def known_answer(is_done: object) -> bytes | None:
    """Return the result of `begin` for a task that is done, or new."""
    return b"" if is_done else None


def make_seen(dedupe: int | Seen | Callable[[str], Any]) -> Seen:
    """Return the `Seen` for a receiver's option `dedupe`."""
    if isinstance(dedupe, int):
        return MemorySeen(dedupe)
    if all(hasattr(dedupe, name) for name in ("begin", "done", "forget")):
        return dedupe  # type: ignore[return-value]
    if callable(dedupe):
        return FunctionSeen(dedupe)
    raise TypeError(
        "dedupe must be a number, a function of a task id, or have begin, done and forget, got"
        f" {dedupe!r:.100}"
    )
