"""`Receiver`: turns headers and body into a `Delivery`, and a result into a `Reply`.

It knows no framework; `starlette` and `flask` adapt their requests and responses to it.
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
from tickwheel.receiver.dedupe import PendingAnswer, Seen, make_seen
from tickwheel.receiver.messages import (
    Attempt,
    Settlement,
    failure_report,
    feedback_failed,
    settlement_of,
)
from tickwheel.values.json.encode import decode, encode
from tickwheel.values.outcome import Retry
from tickwheel.values.signature import InvalidSignature, check_secret, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

logger = logging.getLogger("tickwheel.receiver")

MAX_BODY_BYTES = 16 << 20
MAX_RESULT_BYTES = 64 << 10  # the server stores no longer result
JSON = ("content-type", "application/json")

CLOUD_EVENT = "application/cloudevents+json"

Text = str | bytes  # some brokers' clients do not decode headers
Headers = Mapping[Any, Any] | Iterable[tuple[Text, Text]]
Handler = Callable[["Delivery"], Any]

_background_tasks: set[asyncio.Task[Any]] = set()  # a loop holds only weak references to its tasks


class BadDelivery(TickwheelError, ValueError):
    """An invalid call: a header is missing or wrong, or the body is not JSON."""

    code = "bad_delivery"


class InProgress(TickwheelError, RuntimeError):
    """An earlier call's handler still runs for this task; the server should retry later."""

    code = "in_progress"


class Delivery(NamedTuple):
    """A verified call.

    - `task_id` is the same on every attempt, and signed like the payload; the other headers are
      not signed.
    - `attempt` and `epoch` must be named in feedback.
    - `duplicate`: the task is already done, by an earlier call whose answer was lost.
    """

    task_id: str
    service: str
    attempt: int
    epoch: int
    due_at: datetime
    payload: Any
    duplicate: bool = False


class Reply(NamedTuple):
    """An HTTP response for the server."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Accepted:
    """The task will be done later, and feedback will report its outcome.

    The task is not marked as done: if no feedback comes in time, the next attempt is handled as
    new.
    """


@dataclass(frozen=True, slots=True)
class Gone:
    """The service no longer exists here: the server disables it, and keeps its tasks."""


class Receiver:
    """Verifies calls, and handles each task once as far as possible.

    - `secrets`: the service's secret, or several during a rotation. `unsigned=True` accepts every
      call without a secret, for first experiments on one machine.
    - `tolerance`: the largest difference between both clocks, in seconds. None accepts a signature
      of any age, for messages that may wait in a queue.
    - `dedupe`: how many done tasks to remember in this process; or a function that takes a task id
      and returns whether the task is done; or your own `Seen`.

    A handler takes a `Delivery`. It returns the task's result, or None; or `Accepted()`,
    `Retry(after)`, `Gone()`. If it raises, the framework answers 500, and the task is retried.

    A framework may cancel a request whose caller has disconnected. A coroutine function is
    cancelled with it, and its task is retried. A plain function cannot be stopped on its thread:
    its task stays in progress until it returns or raises, which then decides whether it is done.

    Delivery is at least once: a task is marked as done after its handler, so that a process that
    dies in between handles it again. To prevent that, write the task id in the transaction of the
    work itself: see `Seen`.
    """

    def __init__(
        self,
        secrets: str | Sequence[str] = (),
        *,
        tolerance: float | None = 300.0,
        dedupe: int | Seen | Callable[[str], Any] = 10_000,
        unsigned: bool = False,
        max_body: int = MAX_BODY_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self._secrets = [secrets] if isinstance(secrets, str) and secrets else [*(secrets or ())]
        for secret in self._secrets:
            check_secret(secret)
        if bool(self._secrets) == unsigned:
            raise ValueError(
                "give the service's secret, or unsigned=True without a secret to accept any call"
            )
        if tolerance is not None:
            nanoseconds("tolerance", tolerance)
        self._tolerance = math.inf if tolerance is None else tolerance
        self._seen = make_seen(dedupe)
        self._clock = clock or WallClock()
        self.max_body = bounded("max_body", max_body, 1, 1 << 40)

    def __repr__(self) -> str:
        return f"<Receiver with {len(self._secrets)} secrets>"

    def read(self, headers: Headers, body: bytes) -> Delivery:
        """Verify a call and return it, without using `dedupe`."""
        pairs = header_pairs(headers)
        if self._secrets:
            now = self._clock.time()
            verify(self._secrets, pairs, body, now=now, tolerance=self._tolerance)
        found = dict(pairs)
        try:
            payload = decode(body) if body else None
        except ValueError as error:
            raise BadDelivery(str(error)) from None
        if found.get("content-type", "").startswith(CLOUD_EVENT) and isinstance(payload, dict):
            payload = payload.get("data")
        return Delivery(
            require_header(found, "webhook-id"),
            require_header(found, "tickwheel-service"),
            number_header(found, "tickwheel-attempt"),
            number_header(found, "tickwheel-epoch"),
            time_header(found, "tickwheel-due-at"),
            payload,
        )

    def receive(self, headers: Headers, body: bytes) -> Delivery:
        """Verify a call, and begin its task; afterwards call `done` or `forget`.

        - `InvalidSignature`: answer 401. `BadDelivery`: 400. `InProgress`: 409 with Retry-After.
        - A `duplicate` is already done: answer 200, and call neither.
        """
        delivery = self.read(headers, body)
        known = check_known(require_result(self._seen.begin(delivery.task_id)))
        if known is True:
            raise InProgress(f"task {delivery.task_id} is in progress")
        return delivery if known is None else delivery._replace(duplicate=True)

    def done(self, delivery: Delivery, answer: bytes = b"") -> None:
        """Mark a task as done; its duplicates get `answer`."""
        require_result(self._seen.done(delivery.task_id, answer))

    def forget(self, delivery: Delivery) -> None:
        """Undo the begin of a task: its next attempt is handled as new."""
        require_result(self._seen.forget(delivery.task_id))

    def answer(self, headers: Headers, body: bytes, handler: Handler) -> Reply:
        """Verify a call, handle its task unless it is a duplicate, and return the reply.

        An exception of the handler is raised.
        """
        try:
            delivery = self.read(headers, body)
        except (InvalidSignature, BadDelivery) as error:
            return reply_to_refused(error)
        task_id = delivery.task_id
        known = check_known(require_result(self._seen.begin(task_id)))
        if known is not None:
            return reply_to_duplicate(known, task_id)
        try:
            reply, is_done = reply_to_result(require_result(handler(delivery)))
        except BaseException:
            require_result(self._seen.forget(task_id))
            raise
        require_result(
            self._seen.done(task_id, reply.body) if is_done else self._seen.forget(task_id)
        )
        return reply

    async def answer_async(
        self, headers: Headers, body: bytes, handler: Callable[[Delivery], Awaitable[Any]]
    ) -> Reply:
        """Do the same on an event loop; handler and `dedupe` may be coroutine functions.

        Cancelling this cancels the handler. A handler that waits for a thread must not be
        cancelled: run this as a separate task, and `asyncio.shield` it.
        """
        try:
            delivery = self.read(headers, body)
        except (InvalidSignature, BadDelivery) as error:
            return reply_to_refused(error)
        task_id = delivery.task_id
        known = check_known(await await_result(self._seen.begin(task_id)))
        if known is not None:
            return reply_to_duplicate(known, task_id)
        try:
            reply, is_done = reply_to_result(await await_result(handler(delivery)))
        except BaseException:
            await finish_mark(self._seen.forget(task_id))
            raise
        seen = self._seen
        await finish_mark(seen.done(task_id, reply.body) if is_done else seen.forget(task_id))
        return reply

    def consume(
        self,
        headers: Headers,
        body: bytes,
        handler: Handler,
        *,
        feedback: Callable[..., Any] | None = None,
    ) -> Settlement:
        """Verify and handle the message of a queue; return what to do with the message.

        `feedback`: `client.feedback`, if the service has `confirmed: running`; then the outcome is
        reported before the message is acknowledged, an exception of the handler as well. Without
        it, the exception is raised.
        """
        try:
            settlement, report = settlement_of(self.answer(headers, body, handler))
        except Exception as error:
            if feedback is None:
                raise
            report = failure_report(error)
        if feedback is None or report is None:
            return settlement
        attempt = attempt_of(headers)
        try:
            require_result(report.send(feedback, attempt))
        except Exception as error:  # noqa: BLE001
            return feedback_failed(error, attempt)
        return Settlement.ACKNOWLEDGE

    async def consume_async(
        self,
        headers: Headers,
        body: bytes,
        handler: Callable[[Delivery], Awaitable[Any]],
        *,
        feedback: Callable[..., Any] | None = None,
    ) -> Settlement:
        """Do the same on an event loop; the functions may be coroutine functions."""
        try:
            settlement, report = settlement_of(await self.answer_async(headers, body, handler))
        except Exception as error:
            if feedback is None:
                raise
            report = failure_report(error)
        if feedback is None or report is None:
            return settlement
        attempt = attempt_of(headers)
        try:
            await await_result(report.send(feedback, attempt))
        except Exception as error:  # noqa: BLE001
            return feedback_failed(error, attempt)
        return Settlement.ACKNOWLEDGE

    def starlette(self, handler: Handler) -> Any:
        """Return an endpoint for Starlette and FastAPI; a plain function runs on a thread."""
        from tickwheel.receiver.starlette import endpoint  # noqa: PLC0415

        return endpoint(self, handler)

    def flask(self, handler: Handler) -> Any:
        """Return a view for Flask."""
        from tickwheel.receiver.flask import view  # noqa: PLC0415

        return view(self, handler)


def reply_to_result(result: object) -> tuple[Reply, bool]:
    """Return the reply for a handler's result, and whether the task is done."""
    if isinstance(result, Accepted):
        return Reply(202, [], b""), False
    if isinstance(result, Gone):
        return problem(410, "gone", "this service no longer exists"), False
    if isinstance(result, Retry):
        return problem(409, "retry", str(result.reason) or "try again", result.after), False
    body = b"" if result is None else encode(result)
    if len(body) > MAX_RESULT_BYTES:
        text = "a result of %d bytes is not stored: the limit is %d"
        logger.warning(text, len(body), MAX_RESULT_BYTES)
    return reply_done(body), True


def reply_done(body: bytes) -> Reply:
    """Return the reply for a task that is done."""
    return Reply(200, [JSON], body) if body else Reply(204, [], b"")


def check_known(known: object) -> bytes | Literal[True] | None:
    """Return the answer of `Seen.begin`; TypeError for an invalid one.

    If False, or a coroutine that was never awaited, counted as "done", the task would be lost.
    """
    if known is None or known is True:
        return known
    if isinstance(known, bytes | bytearray | memoryview):
        return bytes(known)
    raise TypeError(
        "dedupe: begin() must return None for a new task, True for one in progress, or bytes, the"
        f" answer of one that is done, got {known!r:.100} ({type(known).__name__})"
    )


def reply_to_duplicate(known: bytes | Literal[True], task_id: str) -> Reply:
    """Return the reply to a call whose task is in progress, or done."""
    if known is True:
        return problem(409, InProgress.code, f"task {task_id} is in progress", 1)
    reply = reply_done(known)
    return reply._replace(headers=[*reply.headers, ("tickwheel-duplicate", "true")])


def reply_to_refused(error: TickwheelError) -> Reply:
    """Return the reply to a call with an invalid signature, or an invalid call."""
    return problem(401 if isinstance(error, InvalidSignature) else 400, error.code, str(error))


def problem(status: int, code: str, detail: str, after: float | timedelta | None = None) -> Reply:
    """Return a problem document, with Retry-After if `after` is given.

    Never use status 429 or 503 here: the server would pause the whole service.
    """
    headers = [("content-type", "application/problem+json")]
    if after is not None:
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        headers.append(("retry-after", str(math.ceil(seconds))))
    document = {"type": f"urn:tickwheel:problem:{code}", "status": status, "code": code}
    return Reply(status, headers, json.dumps(document | {"detail": detail}).encode())


def require_result(answer: Any) -> Any:
    """Return a result that is available without awaiting; TypeError for an awaitable."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer) or isinstance(answer, PendingAnswer):
            answer.close()
        raise TypeError("a coroutine function needs an event loop: use receiver.starlette(...)")
    return answer


async def await_result(answer: Any) -> Any:
    """Return a result, awaiting it if necessary."""
    return await answer if inspect.isawaitable(answer) else answer


async def finish_mark(mark: Any) -> None:
    """Wait for `done` or `forget` of `dedupe`; it completes even if the waiter is cancelled."""
    if inspect.isawaitable(mark):
        await run_to_end(await_result(mark))


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which continues even if the waiter is cancelled."""
    task = asyncio.get_running_loop().create_task(work)
    _background_tasks.add(task)
    task.add_done_callback(_background_tasks.discard)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(log_late_failure)
        raise
    return task.result()


def log_late_failure(task: asyncio.Task[Any]) -> None:
    """Log an exception that came after the waiter was cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a call failed after its request had been cancelled", exc_info=error)


def is_coroutine_function(handler: Handler) -> bool:
    """Return whether a handler, a function or a callable object, must be awaited."""
    call = getattr(handler, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def header_pairs(headers: Headers) -> list[tuple[str, str]]:
    """Return headers as text, with lower-case names."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [(header_text(name).lower(), header_text(value)) for name, value in pairs]


def header_text(value: object) -> str:
    """Return the name or value of a header as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def attempt_of(headers: Headers) -> Attempt:
    """Return which attempt a message is; its headers are verified already."""
    found = dict(header_pairs(headers))
    number, epoch = (number_header(found, f"tickwheel-{name}") for name in ("attempt", "epoch"))
    return Attempt(require_header(found, "webhook-id"), number, epoch)


def require_header(headers: Mapping[str, str], name: str) -> str:
    """Return a required header."""
    if text := headers.get(name):
        return text
    raise BadDelivery(f"the header {name} is {'missing' if name not in headers else 'empty'}")


def number_header(headers: Mapping[str, str], name: str) -> int:
    """Return a required header that is a whole number."""
    text = require_header(headers, name)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadDelivery(f"{name} must be a whole number, got {text!r:.50}")
    return int(text)


def time_header(headers: Mapping[str, str], name: str) -> datetime:
    """Return a required header that is an RFC 3339 time."""
    text = require_header(headers, name)
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # the offset may lead beyond year 1 or 9999
        raise BadDelivery(f"{name} must be an RFC 3339 time, got {text!r:.50}") from None
