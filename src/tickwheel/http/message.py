"""Requests and responses as values; nothing here reads or writes a socket.

A request is checked when it is created: a value that would inject a second header, or a second
request, never reaches a connection.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.http.errors import TimedOut

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from tickwheel.http.url import Target

RESERVED = frozenset(
    (
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "transfer-encoding",
        "upgrade",
    )
)
"""Headers that only the client may set: a caller's could contradict what is sent."""

TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
WITH_BODY = frozenset(("PATCH", "POST", "PUT"))  # these send a content-length of 0
MAX_CACHED_NAMES = 1_000  # in each cache
MAX_CACHED_NAME_BYTES = 40  # of a name received from a server

_methods: set[str] = set()  # valid methods
_names: set[str] = set()  # valid header names
_received_names: dict[bytes, str] = {}  # names as received -> in lower case


class Response(NamedTuple):
    """An answer with its body, or the beginning of its body."""

    status: int
    headers: list[tuple[str, str]]
    """Names in lower case, in the order received."""
    body: bytes
    whole: bool
    """False if the body was longer than the pool's `max_body`, and truncated there."""

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None; names are case-insensitive."""
        name = name.lower()
        for each, value in self.headers:
            if each == name:
                return value
        return None


class Request:
    """A valid request; an invalid one raises ValueError.

    - `chunks` is the iterator of a streamed body, or None; with it, `body` is empty.
    - `ends_at` is the deadline in the loop's time, or None.
    - `may_send()` is called each time just before the request is sent.
    """

    __slots__ = ("body", "chunks", "ends_at", "fields", "headers", "may_send", "method", "target",
                 "timeout")  # fmt: skip

    def __init__(
        self,
        method: str,
        target: Target,
        headers: Sequence[tuple[str, str]],
        body: bytes | AsyncIterator[bytes],
        timeout: float | None = None,
        ends_at: float | None = None,
        may_send: Callable[[], bool] | None = None,
    ) -> None:
        if method not in _methods:
            check_method(method)
        self.method = method
        self.target = target
        self.timeout = timeout
        self.ends_at = ends_at
        self.may_send = may_send
        self.headers = headers
        self.fields = format_headers(headers)
        self.chunks: AsyncIterator[bytes] | None = None
        if isinstance(body, (bytes, bytearray, memoryview)):
            self.body = bytes(body)
        elif hasattr(body, "__aiter__"):
            self.body = b""
            self.chunks = body.__aiter__()
        else:
            raise TypeError(f"body must be bytes or an async iterator, got {type(body).__name__}")

    @property
    def length(self) -> int | None:
        """The content-length to send; None for a streamed body, or a GET without a body."""
        if self.chunks is None and (self.body or self.method in WITH_BODY):
            return len(self.body)
        return None

    def timed_out(self) -> TimedOut:
        """Return the error for an answer that did not come in time."""
        return TimedOut(f"{self.target.where} did not answer within {self.timeout:g} s")


def format_headers(headers: Sequence[tuple[str, str]]) -> str:
    """Check headers, and return them as lines of HTTP/1.1."""
    lines = []
    values = []
    for name, value in headers:
        if name not in _names:
            check_name(name)
        lines.append(f"{name}: {value}\r\n")
        values.append(value)
    text = "".join(values)
    if not (
        text.isascii() and text.isprintable()
    ):  # the fast path; a tab is valid, but not printable
        check_values(headers)
    return "".join(lines)


def check_method(method: str) -> None:
    """Raise ValueError for an invalid method; cache a valid one."""
    if TOKEN.fullmatch(method) is None or method.upper() == "CONNECT":
        raise ValueError("method must be a token such as POST, and not CONNECT")
    if len(_methods) < MAX_CACHED_NAMES:
        _methods.add(method)


def check_name(name: str) -> None:
    """Raise ValueError for an invalid header name; cache a valid one."""
    if TOKEN.fullmatch(name) is None:
        raise ValueError("a header's name must be letters, digits and - only")
    if name.lower() in RESERVED:
        raise ValueError(f"the header {name.lower()} is set by the client itself")
    if len(_names) < MAX_CACHED_NAMES:
        _names.add(name)


def check_values(headers: Iterable[tuple[str, str]]) -> None:
    """Raise ValueError for an invalid value; the message names the header, not the value."""
    for name, value in headers:
        if FORBIDDEN.search(value):
            raise ValueError(f"the header {name} must not contain line ends or control characters")
        try:
            value.encode("latin-1")
        except UnicodeError:
            raise ValueError(f"the header {name} must contain only latin-1 characters") from None


def decode_headers(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return received headers as text, their names in lower case."""
    names = _received_names
    return [
        (names.get(name) or cached_name(name), value.decode("latin-1")) for name, value in fields
    ]


def cached_name(name: bytes) -> str:
    """Return a header's name in lower case, and cache it: servers repeat the same few."""
    text = name.decode("latin-1").lower()
    if len(name) <= MAX_CACHED_NAME_BYTES:
        if len(_received_names) >= MAX_CACHED_NAMES:
            _received_names.clear()  # so that one server cannot fill the cache for good
        _received_names[name] = text
    return text
