"""Requests and responses as values; nothing here reads or writes a socket.

A request is checked when it is made: what could be read as a second header, or a second request,
never reaches a connection.
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
"""Headers that are the client's own: a caller's would contradict what is sent."""

TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
WITH_BODY = frozenset(("PATCH", "POST", "PUT"))  # these say so when their body is empty
REMEMBERED = 1_000  # words of each kind
LONGEST_REMEMBERED = 40  # bytes of a name that a server chose

_methods: set[str] = set()  # that were checked before
_names: set[str] = set()  # of headers that were checked before
_received: dict[bytes, str] = {}  # names as they came: in lower case


class Response(NamedTuple):
    """An answer, with its whole body, or the body's beginning."""

    status: int
    headers: list[tuple[str, str]]
    """Names in lower case, in the order in which they came."""
    body: bytes
    whole: bool
    """False: the body was longer than the pool's `max_body`, and was cut there."""

    def header(self, name: str) -> str | None:
        """Return the first value of a header, by its name in any case, or None."""
        name = name.lower()
        for each, value in self.headers:
            if each == name:
                return value
        return None


class Request:
    """A request that may be sent as it is: ValueError where it may not.

    - `chunks` is what a streamed body comes from, or None; `body` is empty then.
    - `ends_at` is when its time runs out, in the loop's time, or None.
    - `may_send()` is asked each time just before it is sent.
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
        self.fields = lines_of(headers)
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
        """The content-length to send, or None: a streamed body, or a GET without one."""
        if self.chunks is None and (self.body or self.method in WITH_BODY):
            return len(self.body)
        return None

    def timed_out(self) -> TimedOut:
        """Return the error for an answer that did not come in time."""
        return TimedOut(f"{self.target.where} has not answered in {self.timeout:g} s")


def lines_of(headers: Sequence[tuple[str, str]]) -> str:
    """Return the headers as HTTP/1.1 has them, after a check of each."""
    lines = []
    values = []
    for name, value in headers:
        if name not in _names:
            check_name(name)
        lines.append(f"{name}: {value}\r\n")
        values.append(value)
    text = "".join(values)
    if not (text.isascii() and text.isprintable()):  # most are; a tab is not, and may be sent
        check_values(headers)
    return "".join(lines)


def check_method(method: str) -> None:
    """Raise ValueError where a method could not be sent; remember it where it can."""
    if TOKEN.fullmatch(method) is None or method.upper() == "CONNECT":
        raise ValueError("method must be a word such as POST, and not CONNECT")
    if len(_methods) < REMEMBERED:
        _methods.add(method)


def check_name(name: str) -> None:
    """Raise ValueError where a header's name could not be sent; remember it where it can."""
    if TOKEN.fullmatch(name) is None:
        raise ValueError("a header's name must be letters, digits and - only")
    if name.lower() in RESERVED:
        raise ValueError(f"the header {name.lower()} is set by the client itself")
    if len(_names) < REMEMBERED:
        _names.add(name)


def check_values(headers: Iterable[tuple[str, str]]) -> None:
    """Raise ValueError for a value that could not be sent; it names the header, not the value."""
    for name, value in headers:
        if FORBIDDEN.search(value):
            raise ValueError(f"the header {name} must not hold line ends or control characters")
        try:
            value.encode("latin-1")
        except UnicodeError:
            raise ValueError(f"the header {name} must be of latin-1 characters") from None


def received(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return headers as they are handed out."""
    names = _received
    return [
        (names.get(name) or remembered(name), value.decode("latin-1")) for name, value in fields
    ]


def remembered(name: bytes) -> str:
    """Return a header's name in lower case; servers say the same few again and again."""
    text = name.decode("latin-1").lower()
    if len(name) <= LONGEST_REMEMBERED:
        if len(_received) >= REMEMBERED:
            _received.clear()  # so that no server can use it up for the others
        _received[name] = text
    return text
