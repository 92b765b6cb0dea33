"""The HTTP channel: a due task becomes a POST to its service's endpoint.

The status says how it went, and a body of JSON is the result. What goes wrong there becomes a
short text that names the host, and holds no secret, no header and no query.
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
    from contextlib import AbstractContextManager

    from tickwheel.durable.channel import Traced
    from tickwheel.durable.channels.http.target import Targets
    from tickwheel.http import Response
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

    Trace = Callable[[Task, Service], AbstractContextManager[Traced]]

RESULT = 65_536  # bytes that a result may have; no more of a body is read
EXCERPT = 500  # characters of a body that an error shows
LONGEST_MS = 24 * 3600 * 1000  # that a callee may ask to be left alone
MAX_CALLS = 10_000  # under way at once, of all services
PLANS = 10_000
PAUSE_MS = 1000  # before a call that could not be made for want of something here

HEADERS, HEADER_NAME, HEADER_VALUE = 50, 100, 4096  # how many, and how long they may be
OURS = frozenset({"content-type", "content-encoding", "user-agent", "traceparent", "tracestate"})
OUR_PREFIXES = ("webhook-", "tickwheel-")
OF_THE_CONNECTION = frozenset(
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
    """What is the same for every call of a service."""

    service: Service
    host: str
    headers: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]  # texts that no error may show, longer ones first
    latency: Histogram


class HttpChannel:
    """Calls services over HTTP.

    - A call is at least once: the same `webhook-id` on every attempt tells the callee which are the
      same. A connection that the callee had closed meanwhile is replaced, within the attempt.
    - Redirects are not followed, and the address that `targets` has checked is the one that is
      connected to.
    - `now_ms` gives the store's time, for signatures and the dates of `Retry-After`: the clock of
      this host may be wrong.
    - `max_calls` are under way at once, of all services, and as many connections are open, idle
      ones included; no service has more than are left for others.
    - `latencies` has, for each service, how long its calls took, those that failed included.
    - `trace(task, service)`, when it is set, is entered around each call.
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
        self.trace: Trace | None = None
        self._targets = targets
        self._now_ms = now_ms
        self._stopwatch = stopwatch or SystemClock()
        self._pool = pool
        self._own = pool is None
        self._plans: dict[str, Plan] = {}

    def semaphore(self, service: Service) -> Semaphore | None:
        """Return the calls that all services may have under way."""
        return self.calls

    def interruptible(self, service: Service) -> bool:
        """Say yes: a call that is cancelled drops its connection."""
        return True

    def check(self, service: Service) -> None:
        """Raise when the service cannot be called: its endpoint, a header or a secret is wrong."""
        self._targets.check_endpoint(service.endpoint)
        check_headers(service.headers)
        for secret in service.secrets:
            check_secret(secret)

    async def send(
        self, task: Task, service: Service, may_send: Callable[[], bool] = lambda: True
    ) -> Answer:
        """POST the task's payload, byte for byte, and return what the answer means.

        The attempt's timeout is the caller's, who cancels this.
        """
        try:
            plan = self._plan(service)
        except (TypeError, ValueError) as error:
            return failed(f"it cannot be called: {error}")
        if self.trace is None:
            return await self._send(task, plan, [], may_send)
        with self.trace(task, service) as traced:
            answer = await self._send(task, plan, traced.headers, may_send)
            traced.ended(answer)
            return answer

    async def _send(
        self, task: Task, plan: Plan, more: list[tuple[str, str]], may_send: Callable[[], bool]
    ) -> Answer:
        service = plan.service
        began = self._stopwatch.time()
        timestamp = int(self._now_ms() // 1000)
        try:
            response = await self._requests().request(
                "POST",
                service.endpoint,
                headers=headers_of(task, plan, timestamp) + more,
                body=task.body,
                may_send=may_send,
            )
        except NotSent:
            return UNSENT
        except TargetRefused as error:
            return failed(str(error))
        except NoRoom as error:
            return self._put_off(task, error)
        except HttpError as error:
            return failed(told(error, plan))
        finally:
            plan.latency.observe(self._stopwatch.time() - began)
        return answer_to(response, plan, self._now_ms())

    def _put_off(self, task: Task, error: NoRoom) -> Answer:
        """Try again soon: it is not the service that has failed."""
        logger.error(
            "task %s is put off by %g s: %s; does this process have enough file descriptors?",
            task.id, PAUSE_MS / 1000, error, extra={"service": task.service},
        )  # fmt: skip
        return Answer(Event.SNOOZE, error=str(error), after_ms=PAUSE_MS)

    def forget(self, name: str) -> None:
        """Let go of what is kept of a service that was deleted."""
        self._plans.pop(name, None)
        self.latencies.pop(name, None)

    async def close(self) -> None:
        """Close the connections, unless the pool was given."""
        self._plans.clear()
        if self._own and self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()

    def _requests(self) -> Pool:
        """Return the pool; it is made in the loop that it is used in."""
        if self._pool is None:
            self._pool = Pool(
                resolve=self._targets.resolve, connections=self.calls.permits,
                total=self.calls.permits, max_body=RESULT,
            )  # fmt: skip
        return self._pool

    def _plan(self, service: Service) -> Plan:
        plan = self._plans.get(service.name)
        # By more than its version: a service that was deleted and made anew begins again at 1.
        if plan is not None and (plan.service is service or plan.service == service):
            return plan
        self.check(service)
        if len(self._plans) >= PLANS:
            self.forget(next(iter(self._plans)))
        plan = planned(service, self.latencies[service.name])
        self._plans[service.name] = plan
        return plan


def check_headers(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
    """Raise ValueError unless a service may add these to its calls; no value is ever shown."""
    pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
    if len(pairs) > HEADERS:
        raise ValueError(f"a service may have {HEADERS} headers, this one has {len(pairs)}")
    seen: set[str] = set()
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError("the names and values of headers must be str")
        lower = name.lower()
        if len(name) > HEADER_NAME or not _TOKEN.fullmatch(name):
            raise ValueError(
                f"a header's name must be 1 to {HEADER_NAME} letters, digits or -_.!#$%&'*+^`|~, "
                f"got {name!r:.120}"
            )
        if lower in OURS or lower in OF_THE_CONNECTION or lower.startswith(OUR_PREFIXES):
            raise ValueError(f"the header {lower} is set for every call, and cannot be chosen")
        if lower in seen:
            raise ValueError(f"the header {lower} is given twice: join the values with commas")
        if len(value) > HEADER_VALUE or not _VISIBLE.fullmatch(value):
            raise ValueError(
                f"the value of the header {lower} must be up to {HEADER_VALUE} printable ASCII "
                "characters, without spaces at its ends"
            )
        seen.add(lower)


def planned(service: Service, latency: Histogram) -> Plan:
    """Return what is the same for every call of a service."""
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
    """Return what a status means."""
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


def failed(error: str) -> Answer:
    """Return the answer for a call that got none."""
    return Answer(Event.RETRY, error=error, healthy=False)


def told(error: HttpError, plan: Plan) -> str:
    """Return an error of the client as a text, which names the host."""
    text = redacted(str(error), plan.hidden) or type(error).__name__
    return text if plan.host in text else f"{plan.host}: {text}"


def result_of(response: Response) -> str | None:
    """Return the body when it is JSON, and small enough to be kept."""
    if not response.whole or not 0 < len(response.body) <= RESULT:
        return None
    try:
        text = response.body.decode()
        value = _JSON.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a character is none
    except (ValueError, RecursionError):
        return None
    return None if exceeds_depth(response.body) else text.strip()


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number beyond all that a float can be")
    return number


_JSON = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def retry_after_ms(text: str | None, now_ms: float) -> int | None:
    """Return how long a Retry-After asks to wait, seconds or a date; None for one that is neither.

    At most a day; a date that has passed is 0.
    """
    text = (text or "").strip()
    if text.isascii() and text.isdigit():
        return LONGEST_MS if len(text) > 9 else min(int(text) * 1000, LONGEST_MS)
    try:
        date = parsedate_to_datetime(text[:100])
        if date.tzinfo is None:  # "-0000", and the form of C, which has no zone
            date = date.replace(tzinfo=UTC)
        wait_ms = date.timestamp() * 1000 - now_ms
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(max(0, math.ceil(wait_ms)), LONGEST_MS)


def excerpt_of(body: bytes, hidden: tuple[str, ...]) -> str:
    """Return the beginning of a body that is text, on one line, and "" of any other."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        if error.start < min(len(body) - 3, 4 * EXCERPT):  # not merely cut within a character
            return ""
        text = body[: error.start].decode()
    if "\0" in text:
        return ""
    text = detail_of(text)
    text = redacted(text, hidden)[: 4 * EXCERPT]
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:EXCERPT]


def detail_of(text: str) -> str:
    """Return what a problem document says (RFC 9457), or the text as it is."""
    if text.startswith("{") and '"detail"' in text:
        try:
            detail = json.loads(text).get("detail")
        except (ValueError, RecursionError):
            return text
        if isinstance(detail, str) and detail:
            return detail
    return text


def redacted(text: str, hidden: tuple[str, ...]) -> str:
    """Return a text without what is hidden: a callee may send back what it was sent."""
    for one in hidden:
        text = text.replace(one, PLACEHOLDER)
    return _SIGNATURE.sub(PLACEHOLDER, text)


def hidden_in(service: Service) -> tuple[str, ...]:
    """Return the texts of a service that nobody is shown, in the ways in which a page has them."""
    query = urlsplit(service.endpoint).query
    found = {query, *(value for _, value in parse_qsl(query))}
    for secret in service.secrets:
        found |= {secret, secret.removeprefix("whsec_")}
    for _, value in service.headers:
        found |= {value, *(part for part in value.split() if len(part) >= 8)}  # "Bearer …"
    found |= {quote(one) for one in found} | {html.escape(one) for one in found}
    found |= {json.dumps(one)[1:-1] for one in found}
    found |= {one.replace("/", r"\/") for one in found}  # so do some writers of JSON
    # Shorter ones are no secrets, and would make holes in every word.
    return tuple(sorted((one for one in found if len(one) >= 4), key=len, reverse=True))
