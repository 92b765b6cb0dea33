"""`Consumer`: receive messages, store their tasks in batches, then acknowledge the messages.

It knows no broker: `sources` has those. The target is a `Scheduler` or an `AsyncClient`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.arguments import bounded, nanoseconds
from tickwheel.consumer.request import message_key, payload_request, task_request
from tickwheel.consumer.source import SourceUnavailable
from tickwheel.errors import Overloaded, TaskGone
from tickwheel.values.service import check_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tickwheel.consumer.source import Message, Source

logger = logging.getLogger("tickwheel.consumer")

FIRST_WAIT_SECONDS = 0.25
MAX_WAIT_SECONDS = 8.0
CANCEL_SECONDS = 0.1  # until a cancellation is repeated
DEFAULT_BATCH = 1_000
MAX_BATCH = 10_000
PROBLEM_TYPE = "urn:tickwheel:problem:"  # of each refusal by a tickwheel server
TOO_LARGE = 413
# The refusals of a whole request that can be due to one of its messages.
MESSAGE_CODES = {
    "idempotency_key_reused", "invalid", "key_taken", "out_of_range", "target_refused", "task_gone",
    "too_large", "unknown_service",
}  # fmt: skip


class Target(Protocol):
    """What stores tasks: a `Scheduler` or an `AsyncClient`."""

    async def submit_many(self, requests: list[Mapping[str, Any]]) -> Sequence[object]:
        """Store tasks; return for each the task, or the error that refused it."""


class Stopped(Exception):
    """`stop` was called while the consumer waited for the broker or the target."""


class Consumer:
    """Turns the messages of a source into tasks: one task for each source and message id.

    - A message is the JSON of a task, as `POST /v1/tasks` takes it. With `service`, a message is
      the payload of a task of that service, due after `delay` seconds.
    - Messages are acknowledged after the commit of their tasks. While the target is unavailable or
      overloaded, nothing more is received.
    - A message that tickwheel refuses goes to the source's dead-letter destination, and its error
      to the log `tickwheel.consumer`. The others are not held up. A refusal by something else, such
      as a proxy, refuses no message: the consumer tries again.
    - `stored` counts messages whose task is stored, redelivered ones again; `refused` the others.
    """

    def __init__(
        self,
        source: Source,
        target: Target,
        *,
        service: str | None = None,
        delay: float | None = None,
        batch: int = DEFAULT_BATCH,
    ) -> None:
        if service is not None:
            check_name("service", service)
        if delay is not None:
            nanoseconds("delay", delay)
            if service is None:
                raise ValueError("delay needs a service: otherwise each message has its own delay")
        self._source = source
        self._target = target
        self._service = service
        self._delay = delay
        self._batch = bounded("batch", batch, 1, MAX_BATCH)
        self._stop = asyncio.Event()
        self._waits = 0  # in a row
        self._warned = False
        self.stored = 0
        self.refused = 0

    def stop(self) -> None:
        """Let `run` return after the batch in progress."""
        self._stop.set()

    async def run(self) -> None:
        """Consume until `stop`.

        Reconnect when the broker is unavailable. Raise if the broker's or the target's
        configuration is wrong, for example the token.
        """
        try:
            while not self._stop.is_set():
                try:
                    await self._consume()
                except SourceUnavailable as error:
                    await self._back_off("cannot consume", error)
                finally:
                    await self._source.close()
        except Stopped:
            pass

    async def _consume(self) -> None:
        await self._until_stopped(self._source.open())
        while not self._stop.is_set():
            messages = await self._until_stopped(self._source.receive(self._batch))
            self._waits = 0
            refusals = await self._store(messages)
            for message, refusal in zip(messages, refusals, strict=True):
                if refusal is not None:
                    await self._refuse(message, refusal)
            await self._source.acknowledge(messages)

    async def _until_stopped(self, work: Any) -> Any:
        """Return the result of `work`; when `stop` is called, cancel it and raise `Stopped`."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Stopped
        finally:
            await end(working)
            await end(stopping)

    async def _store(self, messages: Sequence[Message]) -> list[Exception | None]:
        """Store the tasks of messages; return for each None, or why it was refused."""
        refusals: list[Exception | None] = [None] * len(messages)
        requests: dict[int, Mapping[str, Any]] = {}
        for number, message in enumerate(messages):
            try:
                requests[number] = self._request(message)
            except (TypeError, ValueError) as error:
                refusals[number] = error
        while requests:
            numbers = [*requests]
            answers = await self._submit([*requests.values()])
            unavailable: Exception | None = None
            for number, answer in zip(numbers, answers, strict=True):
                if isinstance(answer, Exception) and is_temporary(answer):
                    unavailable = answer
                    continue
                del requests[number]
                if isinstance(answer, Exception) and not isinstance(answer, TaskGone):
                    refusals[number] = answer
                else:
                    self.stored += 1
            if unavailable is not None:
                await self._back_off("cannot store tasks", unavailable)
        return refusals

    def _request(self, message: Message) -> dict[str, Any]:
        """Return the request for a message; raise if its body is invalid."""
        if self._service is None:
            request = task_request(message.body)
        else:
            request = payload_request(message.body, self._service, self._delay)
        if "idempotency_key" not in request:
            key = message_key(self._source.name, message)
            if key is not None:
                request["idempotency_key"] = key
            elif not self._warned:
                self._warned = True
                logger.warning(
                    "%s has messages without an id: if one is redelivered, it is stored twice",
                    self._source.name,
                )
        return request

    async def _submit(self, requests: list[Mapping[str, Any]]) -> Sequence[object]:
        """Store requests; return for each the task, or the error that refused it.

        An invalid request may refuse its whole batch: then each is stored by itself.
        """
        try:
            return await self._target.submit_many(requests)
        except Exception as error:
            is_alone = len(requests) == 1
            if is_temporary(error) and (is_alone or getattr(error, "status", 0) != TOO_LARGE):
                return [error] * len(requests)
            if not is_temporary(error) and not is_refusal(error):
                raise
            if is_alone:
                return [error]
        answers = await asyncio.gather(*(self._submit([request]) for request in requests))
        return [answer for (answer,) in answers]

    async def _refuse(self, message: Message, refusal: Exception) -> None:
        reason = f"{type(refusal).__name__}: {refusal}"[:1_000]
        await self._source.refuse(message, reason)
        self.refused += 1
        logger.error("refused message %s of %s: %s", message.id, self._source.name, reason)

    async def _back_off(self, what: str, error: Exception) -> None:
        """Wait before the next try: longer each time, up to 8 s."""
        wait = min(FIRST_WAIT_SECONDS * 2.0**self._waits, MAX_WAIT_SECONDS)
        wait *= 1 - random.random() / 2  # noqa: S311
        wait = max(wait, getattr(error, "retry_after", None) or 0.0)
        self._waits = min(self._waits + 1, 10)
        logger.warning("%s: %s; retrying in %.2f s", what, error, wait)
        await self._until_stopped(asyncio.sleep(wait))


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended.

    Cancel it again if necessary: `asyncio.wait_for`, which drivers use, may swallow a cancellation
    before Python 3.12.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_SECONDS)
    if not task.cancelled():
        task.exception()  # it is nobody's any more


def is_temporary(error: Exception) -> bool:
    """Return whether the same request may succeed later.

    That holds for each answer that is not tickwheel's own: a proxy gave it, or another program.
    """
    status = getattr(error, "status", 0)
    return (
        isinstance(error, ConnectionError | TimeoutError | Overloaded)
        or status in (408, 429)
        or status >= 500
        or not is_own(error)
    )


def is_own(error: Exception) -> bool:
    """Return whether an error is from tickwheel: raised here, or a server's problem document."""
    problem = vars(error).get("problem")
    return problem is None or str(problem.get("type")).startswith(PROBLEM_TYPE)


def is_refusal(error: Exception) -> bool:
    """Return whether a request is wrong; otherwise the configuration or the code is."""
    if hasattr(error, "code"):
        return error.code in MESSAGE_CODES
    return isinstance(error, LookupError | TypeError | ValueError)
