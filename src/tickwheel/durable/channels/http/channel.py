"""The HTTP channel: it sends a due task as a POST to its service's endpoint.

The status of the response is the outcome, and a JSON body is the result. An error becomes a short
text that names the host, without any secret, header or query.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from tickwheel.clock import Clock, SystemClock
from tickwheel.durable.channel import UNSENT, Answer
from tickwheel.durable.channels.headers import (
    check_secrets,
    headers_of,
    hidden_in,
    redact,
    service_headers,
)
from tickwheel.durable.channels.http.target import host_of
from tickwheel.durable.histogram import Histogram
from tickwheel.durable.log import logger
from tickwheel.durable.permits.semaphore import Semaphore
from tickwheel.errors import TargetRefused
from tickwheel.http import HttpError, NoRoom, NotSent, OpenConnections, Pool
from tickwheel.values.json.encode import exceeds_depth
from tickwheel.values.service import refuse_message_options
from tickwheel.values.task import Event
from tickwheel.values.times import http_date

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.durable.channel import Tracer
    from tickwheel.durable.channels.http.target import Targets
    from tickwheel.http import Response
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

MAX_RESULT_BYTES = 65_536  # the channel reads no more of a body
EXCERPT_CHARACTERS = 500  # of a body, in an error
MAX_RETRY_AFTER_MS = 24 * 3600 * 1000  # that a callee may ask for, over gRPC as well
MAX_CALLS = 10_000  # under way at once, of all services
MAX_PLANS = 10_000
NO_ROOM_DELAY_MS = 1000  # before the next try when this process has no file descriptor left


class Plan(NamedTuple):
    """The parts of a call that are the same for every call of a service."""

    service: Service
    host: str
    headers: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]  # texts that no error may show, the longest first
    latency: Histogram


class HttpChannel:
    """Calls services over HTTP.

    - Delivery is at least once: a callee recognises repeated attempts by their `webhook-id`. If the
      callee has closed an idle connection, the channel reconnects within the attempt.
    - The channel follows no redirects, and connects only to addresses that `targets` has checked.
    - `now_ms` returns the store's time, for signatures and the dates of `Retry-After`: the clock of
      this host may be wrong.
    - At most `max_calls` calls are under way and as many connections open, idle ones included; no
      service holds more than it leaves for the others. The channel for gRPC shares both limits.
    - `on_check()` is called for each service that may be called.
    """

    remote = True

    def __init__(
        self,
        targets: Targets,
        now_ms: Callable[[], float],
        *,
        max_calls: int = MAX_CALLS,
        stopwatch: Clock | None = None,
        pool: Pool | None = None,
        on_check: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_check = on_check
        self.calls = Semaphore(max_calls, fair=True)
        self.connections = OpenConnections(max_calls)
        self.latencies: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.trace: Tracer | None = None
        self._targets = targets
        self._now_ms = now_ms
        self._stopwatch = stopwatch or SystemClock()
        self._pool = pool
        self._owns_pool = pool is None
        self._plans: dict[str, Plan] = {}

    def semaphore(self, service: Service) -> Semaphore | None:
        """Return the permits for calls, which all services share."""
        return self.calls

    def interruptible(self, service: Service) -> bool:
        """Return True: a cancelled call closes its connection."""
        return True

    def check(self, service: Service) -> None:
        """Raise when the endpoint, a header or a secret of the service is not valid."""
        self._targets.check_endpoint(service.endpoint)
        check_secrets(service)
        refuse_message_options(service)
        self._on_check()

    async def send(
        self, task: Task, service: Service, may_send: Callable[[], bool] = lambda: True
    ) -> Answer:
        """POST the task's payload, byte for byte, and return the meaning of the response.

        The caller cancels this when the attempt times out.
        """
        try:
            plan = self._plan(service)
        except (TypeError, ValueError) as error:
            return answer_to_error(f"{service.name} cannot be called: {error}")
        if self.trace is None:
            return await self._send(task, plan, [], may_send)
        with self.trace(task, service) as trace:
            answer = await self._send(task, plan, trace.headers, may_send)
            trace.end(answer)
            return answer

    async def _send(
        self, task: Task, plan: Plan, extra: list[tuple[str, str]], may_send: Callable[[], bool]
    ) -> Answer:
        service = plan.service
        started = self._stopwatch.time()
        timestamp = int(self._now_ms() // 1000)
        try:
            response = await self._open_pool().request(
                "POST",
                service.endpoint,
                headers=headers_of(task, service, plan.headers, timestamp) + extra,
                body=task.body,
                may_send=may_send,
            )
        except NotSent:
            return UNSENT
        except TargetRefused as error:
            return answer_to_error(str(error))
        except NoRoom as error:
            return no_room_answer(task, error)
        except HttpError as error:
            return answer_to_error(message_of(error, plan))
        finally:
            plan.latency.observe(self._stopwatch.time() - started)
        return answer_to(response, plan, self._now_ms())

    def forget(self, name: str) -> None:
        """Drop the plan and the latencies of a service that was deleted."""
        self._plans.pop(name, None)
        self.latencies.pop(name, None)

    async def close(self) -> None:
        """Close the connections, unless the pool was an argument."""
        self._plans.clear()
        if self._owns_pool and self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()

    def _open_pool(self) -> Pool:
        """Return the pool; make it at the first call, in the loop that uses it."""
        if self._pool is None:
            self._pool = Pool(
                resolve=self._targets.resolve, connections=self.calls.permits,
                total=self.connections, max_body=MAX_RESULT_BYTES,
            )  # fmt: skip
        return self._pool

    def _plan(self, service: Service) -> Plan:
        plan = self._plans.get(service.name)
        # Compare more than the version: a service that was deleted and put again starts at 1.
        if plan is not None and (plan.service is service or plan.service == service):
            return plan
        self.check(service)
        if len(self._plans) >= MAX_PLANS:
            self.forget(next(iter(self._plans)))
        plan = plan_for(service, self.latencies[service.name])
        self._plans[service.name] = plan
        return plan


def plan_for(service: Service, latency: Histogram) -> Plan:
    """Return the parts of a call that are the same for every call of a service."""
    hidden = hidden_in(service, query=urlsplit(service.endpoint).query)
    return Plan(service, host_of(service.endpoint), service_headers(service), hidden, latency)


def no_room_answer(task: Task, error: NoRoom) -> Answer:
    """Try again soon: this process has failed, not the service."""
    logger.error(
        "task %s is delayed by %g s: %s; does this process have enough file descriptors?",
        task.id, NO_ROOM_DELAY_MS / 1000, error, extra={"service": task.service},
    )  # fmt: skip
    return Answer(Event.SNOOZE, error=str(error), after_ms=NO_ROOM_DELAY_MS)


def answer_to(response: Response, plan: Plan, now_ms: float) -> Answer:
    """Return the answer for a response, by its status."""
    status = response.status
    if status == 202:
        feedback_ms = max(1, round(plan.service.feedback_timeout * 1000))
        return Answer(Event.ACCEPT, after_ms=feedback_ms, healthy=True)
    if 200 <= status < 300:
        return Answer(Event.FINISH, result_of(response), healthy=True)
    error = f"{plan.host} answered {status}"
    if status == 410:
        return Answer(Event.RELEASE, error=f"{error}: it is gone for good", gone=True)
    if 300 <= status < 400:
        error += ": redirect not followed"
    elif excerpt := excerpt_of(response.body, plan.hidden):
        error += f": {excerpt}"
    after_ms = retry_after_ms(response.header("retry-after"), now_ms)
    return Answer(
        Event.RETRY,
        error=error,
        least_ms=after_ms,
        healthy=300 <= status < 500,
        hold_ms=after_ms if status in (429, 503) else None,
    )


def answer_to_error(error: str) -> Answer:
    """Return the answer for a call without a response."""
    return Answer(Event.RETRY, error=error, healthy=False)


def message_of(error: HttpError, plan: Plan) -> str:
    """Return the text of an HTTP client's error; it names the host."""
    text = redact(str(error), plan.hidden) or type(error).__name__
    return text if plan.host in text else f"{plan.host}: {text}"


def result_of(response: Response) -> str | None:
    """Return the body if it is whole, JSON and small enough to store."""
    return result_in(response.body) if response.whole else None


def result_in(body: bytes) -> str | None:
    """Return a text if it is JSON and small enough to store."""
    if not 0 < len(body) <= MAX_RESULT_BYTES:
        return None
    try:
        text = body.decode()
        value = _JSON.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises for a lone surrogate
    except (ValueError, RecursionError):
        return None
    return None if exceeds_depth(body) else text.strip()


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("the number is out of the range of a float")
    return number


_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_parse_float)


def retry_after_ms(text: str | None, now_ms: float) -> int | None:
    """Return the wait of a Retry-After header, in seconds or as a date; None if it is invalid.

    The result is at most a day; a date in the past gives 0.
    """
    text = (text or "").strip()
    if text.isascii() and text.isdigit():
        digits = text.lstrip("0") or "0"
        return min(int(digits[:10]) * 1000, MAX_RETRY_AFTER_MS)  # int of many digits is slow
    date = http_date(text)
    if date is None:
        return None
    return min(max(0, math.ceil(date.timestamp() * 1000 - now_ms)), MAX_RETRY_AFTER_MS)


def excerpt_of(body: bytes, hidden: tuple[str, ...]) -> str:
    """Return the beginning of a text body on one line, or "" for a binary one."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        if error.start < min(len(body) - 3, 4 * EXCERPT_CHARACTERS):
            return ""  # the body is binary, not merely cut within a character
        text = body[: error.start].decode()
    if "\0" in text:
        return ""
    text = detail_of(text)
    text = redact(text, hidden)[: 4 * EXCERPT_CHARACTERS]
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:EXCERPT_CHARACTERS]


def detail_of(text: str) -> str:
    """Return the detail of a problem document (RFC 9457), or the text itself."""
    if text.startswith("{") and '"detail"' in text:
        try:
            detail = json.loads(text).get("detail")
        except (ValueError, RecursionError):
            return text
        if isinstance(detail, str) and detail:
            return detail
    return text
