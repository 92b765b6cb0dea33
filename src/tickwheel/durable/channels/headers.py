"""The headers of a call: they identify a task and sign it; its secrets stay hidden. Pure.

Every channel that leaves the process sends the same headers, as HTTP headers or as the properties
of a message, so that a callee reads them the same way.
"""

from __future__ import annotations

import base64
import contextvars
import html
import json
import re
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote

from tickwheel import __version__
from tickwheel.values.service import PLACEHOLDER
from tickwheel.values.signature import check_secret, sign
from tickwheel.values.task import datetime_of, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from tickwheel.durable.channel import Answer, CallTrace, Delivery, Tracer
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

EVENT_TYPE = "tickwheel.task.due"
EVENT_JSON = "application/cloudevents+json"
MAX_HEADERS, MAX_NAME_CHARACTERS, MAX_VALUE_CHARACTERS = 50, 100, 4096
RESERVED_HEADERS = frozenset(
    {"content-type", "content-encoding", "user-agent", "traceparent", "tracestate"}
)
RESERVED_PREFIXES = ("webhook-", "tickwheel-")
NAME_CHARACTERS = "!#$&'()*+,/:;=?@[]^`{|}~\"<>\\ "  # of a service, sent as they are
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


def check_secrets(service: Service) -> None:
    """Raise when a header or a secret of the service is not valid."""
    check_headers(service.headers)
    for secret in service.secrets:
        check_secret(secret)


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


def local_name(service: Service) -> str:
    """Return the name of a service without its namespace."""
    return service.name.removeprefix(f"{namespace_of(service.name)}/")


def service_headers(service: Service) -> tuple[tuple[str, str], ...]:
    """Return the headers that are the same for every call of a service."""
    return (
        ("content-type", "application/json"),
        ("user-agent", f"tickwheel/{__version__}"),
        ("tickwheel-service", quote(local_name(service), safe=NAME_CHARACTERS)),
        *((name.lower(), value) for name, value in service.headers),
    )


@lru_cache(maxsize=256)  # tasks of a burst are due together
def format_time(at_ms: int) -> str:
    """Return a time as in RFC 3339, in UTC with milliseconds."""
    return datetime_of(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def headers_of(
    task: Task, service: Service, always: Iterable[tuple[str, str]], timestamp: int
) -> list[tuple[str, str]]:
    """Return the headers of one call; `always` has those of `service_headers`."""
    headers = [
        ("webhook-id", task.id),
        ("webhook-timestamp", str(timestamp)),
        ("tickwheel-attempt", str(task.attempt)),
        ("tickwheel-due-at", format_time(task.due_at_ms)),
        ("tickwheel-epoch", str(task.epoch)),
        *always,
    ]
    if service.secrets:
        signature = sign(service.secrets, task.id, timestamp, task.body)
        headers.append(("webhook-signature", signature))
    return headers


def redact(text: str, hidden: tuple[str, ...]) -> str:
    """Replace hidden texts: a callee may echo its request."""
    for one in hidden:
        text = text.replace(one, PLACEHOLDER)
    return _SIGNATURE.sub(PLACEHOLDER, text)


def hidden_in(service: Service, *, query: str = "") -> tuple[str, ...]:
    """Return the secret texts of a service, in every escaping that a response may use.

    `query`: of an endpoint that may have a secret in it.
    """
    found = {query, *(value for _, value in parse_qsl(query))}
    found |= {service.password, unquote(service.password)}
    for secret in service.secrets:
        found |= {secret, secret.removeprefix("whsec_")}
    for _, value in service.headers:
        found |= {value, *(part for part in value.split() if len(part) >= 8)}  # "Bearer …"
    found |= {quote(one) for one in found} | {html.escape(one) for one in found}
    found |= {json.dumps(one)[1:-1] for one in found}
    found |= {one.replace("/", r"\/") for one in found}  # some JSON encoders escape slashes
    # Shorter texts are not secret, and would blank out parts of ordinary words.
    return tuple(sorted((one for one in found if len(one) >= 4), key=len, reverse=True))


def message_headers(service: Service) -> tuple[tuple[str, str], ...]:
    """Return the headers that are the same for every message of a service."""
    headers = service_headers(service)
    if service.cloudevents != "structured":
        return headers
    return (("content-type", EVENT_JSON), *headers[1:])


def event_of(task: Task, service: Service) -> list[tuple[str, str]]:
    """Return the attributes of a task as a CloudEvent; a repeated attempt is the same event."""
    return [
        ("specversion", "1.0"),
        ("id", task.id),
        ("source", f"/tickwheel/{quote(local_name(service))}"),
        ("type", EVENT_TYPE),
        ("time", format_time(task.due_at_ms)),
    ]


def event_document(task: Task, service: Service) -> bytes:
    """Return a task as a CloudEvent in JSON; its data is the payload, byte for byte."""
    attributes = dict(event_of(task, service))
    try:
        json.loads(task.body)
    except ValueError:
        data = b'"data_base64":"' + base64.b64encode(task.body) + b'"'
    else:
        attributes["datacontenttype"] = "application/json"
        data = b'"data":' + task.body
    return json.dumps(attributes).encode()[:-1] + b"," + data + b"}"


def message_id(task: Task, service: Service) -> str:
    """Return the id of a message, for brokers that drop a message which they have already.

    If a confirmed message finishes its task, only a lost confirm leads to another attempt: that has
    the same id. The checksum tells apart a payload that was replaced in between. If the task runs
    until feedback, each attempt is a message of its own.
    """
    part = task.attempt if service.confirmed == "running" else f"{zlib.crc32(task.body):08x}"
    return f"{task.id}-{part}"


class TracedMessage:
    """The trace of one message, in a context of its own: traces of a batch are not nested."""

    __slots__ = ("_context", "_span", "_trace", "headers")

    def __init__(self, tracer: Tracer, delivery: Delivery) -> None:
        self._context = contextvars.copy_context()
        self._span: AbstractContextManager[CallTrace] = self._context.run(
            tracer, delivery.task, delivery.service
        )
        self._trace = self._context.run(self._span.__enter__)
        self.headers = self._trace.headers

    def end(self, answer: Answer) -> None:
        """End the trace with the answer."""
        self._context.run(self._trace.end, answer)
        self._context.run(self._span.__exit__, None, None, None)
