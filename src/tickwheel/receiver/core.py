"""`Receiver`: from a request's headers and body to a `Delivery`, and from a result to a `Reply`.

Knows no framework; `starlette` and `flask` bring requests here and replies back.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from tickwheel.arguments import bounded, nanoseconds
from tickwheel.clock import Clock, WallClock
from tickwheel.errors import TickwheelError
from tickwheel.receiver.seen import Asked, Seen, seen_of
from tickwheel.values.json import call as serial
from tickwheel.values.outcome import Retry
from tickwheel.values.signature import InvalidSignature, check_secret, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

logger = logging.getLogger("tickwheel.receiver")

MAX_BODY = 16 << 20
MAX_RESULT = 64 << 10  # bytes that the server keeps of a result
JSON = ("content-type", "application/json")

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
Handler = Callable[["Delivery"], Any]

_going_on: set[asyncio.Task[Any]] = set()  # a loop by itself holds its tasks weakly


class BadDelivery(TickwheelError, ValueError):
    """A call that no tickwheel server makes: a header is missing or wrong, or the body not JSON."""

    code = "bad_delivery"


class InProgress(TickwheelError, RuntimeError):
    """The task is being done already, for an earlier call: this one should come again later."""

    code = "in_progress"


class Delivery(NamedTuple):
    """A call that was verified.

    - `task_id` is the same on every attempt, and signed like the payload; the other headers are
      not signed.
    - `attempt` and `epoch` are what feedback has to name.
    - `duplicate`: the task was done already, for an earlier call whose answer got lost.
    """

    task_id: str
    service: str
    attempt: int
    epoch: int
    due_at: datetime
    payload: Any
    duplicate: bool = False


class Reply(NamedTuple):
    """What to answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Accepted:
    """It will be done later, and feedback will say how it ended.

    The task is not marked as done: when no feedback comes in time, the next attempt is handled
    anew.
    """


@dataclass(frozen=True, slots=True)
class Gone:
    """Nobody is here for this any more: the server disables the service, and keeps its tasks."""


class Receiver:
    """Verifies calls, and has each task done once, as far as that can be promised.

    - `secrets`: the service's secret, or several while it is being replaced. `unsigned=True` takes
      every call, without a secret: for a first try on one machine.
    - `tolerance`: how many seconds the clocks of both sides may differ.
    - `dedupe`: how many done tasks to remember in this process; or a function that says of a task
      id whether it was done; or a `Seen` of your own.

    A handler is given a `Delivery`. What it returns is the task's result, None for none; or
    `Accepted()`, `Retry(after)`, `Gone()`. When it raises, the framework answers 500, and the task
    is tried again.

    A framework may cancel a request whose caller has gone. A coroutine function is cancelled with
    it, and its task is tried again; a plain one cannot be stopped on its thread: its task stays
    under way until it returns, and is done or not by how that ends.

    At least once stays at least once: a task is marked as done after its handler, so that a process
    that dies in between has it done again. Who cannot bear that writes the id in the transaction of
    the work itself: see `Seen`.
    """

    def __init__(
        self,
        secrets: str | Sequence[str] = (),
        *,
        tolerance: float = 300.0,
        dedupe: int | Seen | Callable[[str], Any] = 10_000,
        unsigned: bool = False,
        max_body: int = MAX_BODY,
        clock: Clock | None = None,
    ) -> None:
        self._secrets = [secrets] if isinstance(secrets, str) and secrets else [*(secrets or ())]
        for secret in self._secrets:
            check_secret(secret)
        if bool(self._secrets) == unsigned:
            raise ValueError(
                "give the service's secret; or unsigned=True, and none, to take calls of anybody"
            )
        nanoseconds("tolerance", tolerance)
        self._tolerance = tolerance
        self._seen = seen_of(dedupe)
        self._clock = clock or WallClock()
        self.max_body = bounded("max_body", max_body, 1, 1 << 40)

    def __repr__(self) -> str:
        return f"<Receiver with {len(self._secrets)} secrets>"

    def read(self, headers: Headers, body: bytes) -> Delivery:
        """Verify a call, and return it; nothing is asked of or marked in `dedupe`."""
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        pairs = [(name.lower(), value) for name, value in pairs]
        if self._secrets:
            now = self._clock.time()
            verify(self._secrets, pairs, body, now=now, tolerance=self._tolerance)
        found = dict(pairs)
        try:
            payload = serial.decode(body) if body else None
        except ValueError as error:
            raise BadDelivery(str(error)) from None
        return Delivery(
            header(found, "webhook-id"),
            header(found, "tickwheel-service"),
            number(found, "tickwheel-attempt"),
            number(found, "tickwheel-epoch"),
            moment(found, "tickwheel-due-at"),
            payload,
        )

    def receive(self, headers: Headers, body: bytes) -> Delivery:
        """Verify a call, and begin its task: then call `done` or `forget`.

        - `InvalidSignature`: answer 401. `BadDelivery`: 400. `InProgress`: 409 with Retry-After.
        - A `duplicate` was done before: answer 200, and call neither.
        """
        delivery = self.read(headers, body)
        known = checked(here(self._seen.begin(delivery.task_id)))
        if known is True:
            raise InProgress(f"task {delivery.task_id} is being done")
        return delivery if known is None else delivery._replace(duplicate=True)

    def done(self, delivery: Delivery, answer: bytes = b"") -> None:
        """Mark a task as done; `answer` is what its duplicates get."""
        here(self._seen.done(delivery.task_id, answer))

    def forget(self, delivery: Delivery) -> None:
        """Take back that a task was begun: its next attempt is new."""
        here(self._seen.forget(delivery.task_id))

    def answer(self, headers: Headers, body: bytes, handler: Handler) -> Reply:
        """Do all there is to do with a call; what the handler raises is raised."""
        try:
            delivery = self.read(headers, body)
        except (InvalidSignature, BadDelivery) as error:
            return refused(error)
        task_id = delivery.task_id
        known = checked(here(self._seen.begin(task_id)))
        if known is not None:
            return repeated(known, task_id)
        try:
            reply, is_done = replied(here(handler(delivery)))
        except BaseException:
            here(self._seen.forget(task_id))
            raise
        here(self._seen.done(task_id, reply.body) if is_done else self._seen.forget(task_id))
        return reply

    async def answer_async(
        self, headers: Headers, body: bytes, handler: Callable[[Delivery], Awaitable[Any]]
    ) -> Reply:
        """Do the same on an event loop; handler and `dedupe` may be coroutine functions.

        When it is cancelled, so is the handler. A handler that only waits for a thread must not be:
        run this as a task of its own then, and `asyncio.shield` that.
        """
        try:
            delivery = self.read(headers, body)
        except (InvalidSignature, BadDelivery) as error:
            return refused(error)
        task_id = delivery.task_id
        known = checked(await there(self._seen.begin(task_id)))
        if known is not None:
            return repeated(known, task_id)
        try:
            reply, is_done = replied(await there(handler(delivery)))
        except BaseException:
            await marked(self._seen.forget(task_id))
            raise
        seen = self._seen
        await marked(seen.done(task_id, reply.body) if is_done else seen.forget(task_id))
        return reply

    def starlette(self, handler: Handler) -> Any:
        """Return an endpoint for Starlette and FastAPI; a plain function runs on a thread."""
        from tickwheel.receiver.starlette import endpoint  # noqa: PLC0415

        return endpoint(self, handler)

    def flask(self, handler: Handler) -> Any:
        """Return a view for Flask."""
        from tickwheel.receiver.flask import view  # noqa: PLC0415

        return view(self, handler)


def replied(result: object) -> tuple[Reply, bool]:
    """Return the reply that a handler's result is, and whether the task is done with it."""
    if isinstance(result, Accepted):
        return Reply(202, [], b""), False
    if isinstance(result, Gone):
        return problem(410, "gone", "nobody receives this any more"), False
    if isinstance(result, Retry):
        return problem(409, "retry", str(result.reason) or "try again", result.after), False
    body = b"" if result is None else serial.encode(result)
    if len(body) > MAX_RESULT:
        logger.warning("a result of %d bytes is not kept: %d are", len(body), MAX_RESULT)
    return finished(body), True


def finished(body: bytes) -> Reply:
    """Return the reply of a task that is done."""
    return Reply(200, [JSON], body) if body else Reply(204, [], b"")


def checked(known: object) -> bytes | Literal[True] | None:
    """Return what `begin` of a `Seen` said; TypeError for what it may not say.

    Taken for "done", a False, or a coroutine that nobody awaited, would lose the task.
    """
    if known is None or known is True:
        return known
    if isinstance(known, bytes | bytearray | memoryview):
        return bytes(known)
    raise TypeError(
        "dedupe: begin() must return None for a new task, True for one under way, or the answer of"
        f" one done as bytes, got {known!r:.100} ({type(known).__name__})"
    )


def repeated(known: bytes | Literal[True], task_id: str) -> Reply:
    """Return the reply to a call whose task is under way, or done."""
    if known is True:
        return problem(409, InProgress.code, f"task {task_id} is being done", 1)
    reply = finished(known)
    return reply._replace(headers=[*reply.headers, ("tickwheel-duplicate", "true")])


def refused(error: TickwheelError) -> Reply:
    """Return the reply to a call that is not believed, or not understood."""
    return problem(401 if isinstance(error, InvalidSignature) else 400, error.code, str(error))


def problem(status: int, code: str, detail: str, after: float | timedelta | None = None) -> Reply:
    """Return a problem document, with Retry-After when that is given.

    Not with 429 or 503: with those the server would hold the whole service.
    """
    headers = [("content-type", "application/problem+json")]
    if after is not None:
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        headers.append(("retry-after", str(math.ceil(seconds))))
    document = {"type": f"urn:tickwheel:problem:{code}", "status": status, "code": code}
    return Reply(status, headers, json.dumps(document | {"detail": detail}).encode())


def here(answer: Any) -> Any:
    """Return an answer that is there already."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer) or isinstance(answer, Asked):
            answer.close()
        raise TypeError("a coroutine function needs an event loop: use receiver.starlette(...)")
    return answer


async def there(answer: Any) -> Any:
    """Return an answer, once it is there."""
    return await answer if inspect.isawaitable(answer) else answer


async def marked(mark: Any) -> None:
    """Wait for a mark in `dedupe`; it is made even when whoever waits is cancelled meanwhile."""
    if inspect.isawaitable(mark):
        await to_its_end(there(mark))


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; it goes on when whoever waits for it is cancelled."""
    task = asyncio.get_running_loop().create_task(work)
    _going_on.add(task)
    task.add_done_callback(_going_on.discard)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(ended_alone)
        raise
    return task.result()


def ended_alone(task: asyncio.Task[Any]) -> None:
    """Log what went wrong after whoever should have heard of it was cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a call failed after its request had been cancelled", exc_info=error)


def is_coroutine_function(handler: Handler) -> bool:
    """Say whether a handler is awaited; an object may be called, too."""
    call = getattr(handler, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def header(headers: Mapping[str, str], name: str) -> str:
    """Return a header that must be there."""
    if text := headers.get(name):
        return text
    raise BadDelivery(f"the header {name} is {'missing' if name not in headers else 'empty'}")


def number(headers: Mapping[str, str], name: str) -> int:
    """Return a header that must be a number."""
    text = header(headers, name)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadDelivery(f"{name} must be a whole number, got {text!r:.50}")
    return int(text)


def moment(headers: Mapping[str, str], name: str) -> datetime:
    """Return a header that must be an RFC 3339 time."""
    text = header(headers, name)
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # the zone may lead out of the years that there are
        raise BadDelivery(f"{name} must be an RFC 3339 time, got {text!r:.50}") from None
