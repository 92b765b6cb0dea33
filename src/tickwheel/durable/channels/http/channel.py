"""The HTTP channel: it sends a due task as a POST to its service's endpoint.

The status of the response is the outcome, and a JSON body is the result. An error becomes a short
text that names the host, without any secret, header or query.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from tickwheel import __version__
from tickwheel.clock import Clock, SystemClock
from tickwheel.durable.channel import UNSENT, Answer
from tickwheel.durable.channels.http.target import host_of
from tickwheel.durable.log import logger
from tickwheel.durable.metrics import Histogram
from tickwheel.durable.permits.semaphore import Semaphore
from tickwheel.errors import TargetRefused
from tickwheel.http import HttpError, NoRoom, NotSent, Pool
from tickwheel.values.json.encode import exceeds_depth
from tickwheel.values.service import PLACEHOLDER
from tickwheel.values.signature import check_secret, sign
from tickwheel.values.task import Event, datetime_of, namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tickwheel.durable.channel import Tracer
    from tickwheel.durable.channels.http.target import Targets
    from tickwheel.http import Response
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

MAX_RESULT_BYTES = 65_536  # the channel reads no more of a body
EXCERPT_CHARACTERS = 500  # of a body, in an error
MAX_HOLD_MS = 24 * 3600 * 1000  # that a callee may ask for
MAX_CALLS = 10_000  # under way at once, of all services
MAX_PLANS = 10_000
NO_ROOM_DELAY_MS = 1000  # before the next try when this process has no file descriptor left

MAX_HEADERS, MAX_NAME_CHARACTERS, MAX_VALUE_CHARACTERS = 50, 100, 4096
RESERVED_HEADERS = frozenset(
    {"content-type", "content-encoding", "user-agent", "traceparent", "tracestate"}
)
RESERVED_PREFIXES = ("webhook-", "tickwheel-")
CONNECTION_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SIGNATURE = re.compile(r"v1,[A-Za-z0-9+/\\]{43,}=")
_VISIBLE = re.compile(r"[!-~](?:[ -~]*[!-~])?|")


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
      service holds more than it leaves for the others.
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
    ) -> None:
        self.calls = Semaphore(max_calls, fair=True)
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
        check_headers(service.headers)
        for secret in service.secrets:
            check_secret(secret)

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
                headers=headers_of(task, plan, timestamp) + extra,
                body=task.body,
                may_send=may_send,
            )
        except NotSent:
            return UNSENT
        except TargetRefused as error:
            return answer_to_error(str(error))
        except NoRoom as error:
            return self._snooze(task, error)
        except HttpError as error:
            return answer_to_error(message_of(error, plan))
        finally:
            plan.latency.observe(self._stopwatch.time() - started)
        return answer_to(response, plan, self._now_ms())

    def _snooze(self, task: Task, error: NoRoom) -> Answer:
        """Try again soon: this process has failed, not the service."""
        logger.error(
            "task %s is delayed by %g s: %s; does this process have enough file descriptors?",
            task.id, NO_ROOM_DELAY_MS / 1000, error, extra={"service": task.service},
        )  # fmt: skip
        return Answer(Event.SNOOZE, error=str(error), after_ms=NO_ROOM_DELAY_MS)

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
                total=self.calls.permits, max_body=MAX_RESULT_BYTES,
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


def check_headers(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
    """Raise ValueError unless a service may add these headers; no message shows a value."""
    pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
    if len(pairs) > MAX_HEADERS:
        raise ValueError(f"a service may have {MAX_HEADERS} headers, this one has {len(pairs)}")
    seen: set[str] = set()
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError("the names and values of headers must be str")
        lower = name.lower()
        if len(name) > MAX_NAME_CHARACTERS or not _TOKEN.fullmatch(name):
            raise ValueError(
                f"a header's name must be 1 to {MAX_NAME_CHARACTERS} letters, digits or"
                f" -_.!#$%&'*+^`|~, got {name!r:.120}"
            )
        if lower in RESERVED_HEADERS | CONNECTION_HEADERS or lower.startswith(RESERVED_PREFIXES):
            raise ValueError(f"the header {lower} is reserved: tickwheel sets it for every call")
        if lower in seen:
            raise ValueError(f"the header {lower} is given twice: join the values with commas")
        if len(value) > MAX_VALUE_CHARACTERS or not _VISIBLE.fullmatch(value):
            raise ValueError(
                f"the value of the header {lower} must be up to {MAX_VALUE_CHARACTERS} printable"
                " ASCII characters, without spaces at its ends"
            )
        seen.add(lower)


def plan_for(service: Service, latency: Histogram) -> Plan:
    """Return the parts of a call that are the same for every call of a service."""
    name = service.name.removeprefix(f"{namespace_of(service.name)}/")
    headers = (
        ("content-type", "application/json"),
        ("user-agent", f"tickwheel/{__version__}"),
        ("tickwheel-service", quote(name, safe="!#$&'()*+,/:;=?@[]^`{|}~\"<>\\ ")),
        *((name.lower(), value) for name, value in service.headers),
    )
    return Plan(service, host_of(service.endpoint), headers, hidden_in(service), latency)


def headers_of(task: Task, plan: Plan, timestamp: int) -> list[tuple[str, str]]:
    """Return the headers of one call."""
    due_at = datetime_of(task.due_at_ms).isoformat(timespec="milliseconds")
    headers = [
        ("webhook-id", task.id),
        ("webhook-timestamp", str(timestamp)),
        ("tickwheel-attempt", str(task.attempt)),
        ("tickwheel-due-at", due_at.replace("+00:00", "Z")),
        ("tickwheel-epoch", str(task.epoch)),
        *plan.headers,
    ]
    secrets = plan.service.secrets
    if secrets:
        headers.append(("webhook-signature", sign(secrets, task.id, timestamp, task.body)))
    return headers


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
    """Return the body if it is JSON and small enough to store."""
    if not response.whole or not 0 < len(response.body) <= MAX_RESULT_BYTES:
        return None
    try:
        text = response.body.decode()
        value = _JSON.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises for a lone surrogate
    except (ValueError, RecursionError):
        return None
    return None if exceeds_depth(response.body) else text.strip()


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
        return MAX_HOLD_MS if len(text) > 9 else min(int(text) * 1000, MAX_HOLD_MS)
    try:
        date = parsedate_to_datetime(text[:100])
        if date.tzinfo is None:  # "-0000", and C's asctime format, which has no zone
            date = date.replace(tzinfo=UTC)
        wait_ms = date.timestamp() * 1000 - now_ms
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(max(0, math.ceil(wait_ms)), MAX_HOLD_MS)


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


def redact(text: str, hidden: tuple[str, ...]) -> str:
    """Replace hidden texts: a callee may echo its request."""
    for one in hidden:
        text = text.replace(one, PLACEHOLDER)
    return _SIGNATURE.sub(PLACEHOLDER, text)


def hidden_in(service: Service) -> tuple[str, ...]:
    """Return the secret texts of a service, in every escaping that a response may use."""
    query = urlsplit(service.endpoint).query
    found = {query, *(value for _, value in parse_qsl(query))}
    for secret in service.secrets:
        found |= {secret, secret.removeprefix("whsec_")}
    for _, value in service.headers:
        found |= {value, *(part for part in value.split() if len(part) >= 8)}  # "Bearer …"
    found |= {quote(one) for one in found} | {html.escape(one) for one in found}
    found |= {json.dumps(one)[1:-1] for one in found}
    found |= {one.replace("/", r"\/") for one in found}  # some JSON encoders escape slashes
    # Shorter texts are not secret, and would blank out parts of ordinary words.
    return tuple(sorted((one for one in found if len(one) >= 4), key=len, reverse=True))
