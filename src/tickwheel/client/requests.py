"""Requests, answers, and the server's address: the parts of the client that need no network.

A `Call` is a request with the reader of its answer; `retries` decides when to send it again. The
clients only send, receive and sleep.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import tickwheel
from tickwheel.arguments import bounded, nanoseconds
from tickwheel.client.errors import ApiError, error_of
from tickwheel.errors import TickwheelError
from tickwheel.values.json.encode import decode
from tickwheel.values.times import http_date

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

DEFAULT_SERVER = "http://127.0.0.1:7380"
MAX_ANSWER_BYTES = 256 << 20  # more than any sane page, less than would exhaust memory
CONNECT_TIMEOUT_SECONDS = 5.0


class InsecureToken(UserWarning):
    """A token is sent over plain HTTP to another machine: anyone on the path can read it."""


class Secret:
    """A text that printing does not reveal."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return "<a secret>"


class Request(NamedTuple):
    """A request, without the token.

    `safe`: it may be sent again after an earlier one may have reached the server. `probe`: any
    answer is final, whatever its status.
    """

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    safe: bool = True
    probe: bool = False


class Answer(NamedTuple):
    """An answer; the names of its headers are lower case.

    `resent`: the request was first sent over a connection that broke, and may have succeeded there.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    resent: bool = False

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and `read`, which turns the answer's document into a result.

    For a probe, `read` gets the whole answer.

    - `settle` handles a refusal after an earlier try that may have succeeded. It takes the refusal
      and the server's time at the start of the call, or None; it yields further calls to find out
      whether the try succeeded, and returns that try's result or raises the refusal.
    - `counts`: the answer is a number, which lacks what an earlier try has done.
    """

    request: Request
    read: Callable[[Any], T]
    settle: Settle[T] | None = None
    counts: bool = False

    def result(self, answer: Answer, now: float, server: str) -> T:
        """Return the answer's result, or raise its error.

        `now` is the wall-clock time, `server` the URL for messages.
        """
        if not answer.ok and not self.request.probe:
            raise refusal(answer, now, server)
        try:
            return self.read(answer if self.request.probe else decode_body(answer))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error!s:.200}"
            raise bad_answer(server, answer.status, why) from error


Settle = Callable[[TickwheelError, datetime | None], Generator[Call[Any], Any, T]]


def bad_answer(server: str, status: int, why: str, retry_after: float | None = None) -> ApiError:
    """Return the error for an answer of something else, such as a proxy or another program."""
    return ApiError(
        f"the answer of {server} is not from a tickwheel server: {why}",
        code="bad_answer",
        status=status,
        retry_after=retry_after,
    )


def answer_too_large(status: int) -> ApiError:
    """Return the error for an answer over the size limit."""
    return ApiError(
        f"the answer has more than {MAX_ANSWER_BYTES >> 20} MiB; ask for fewer with limit=...",
        code="bad_answer",
        status=status,
    )


def decode_body(answer: Answer) -> Any:
    """Return an answer's JSON, None for an empty body; ValueError if it is not JSON."""
    return decode(answer.body) if answer.body else None


def refusal(answer: Answer, now: float, server: str) -> TickwheelError:
    """Return the error for an answer that is not a success."""
    problem: Any = None
    with suppress(ValueError):  # for example a proxy's page: only its status counts
        problem = decode_body(answer)
    after = retry_after(answer, now)
    if not isinstance(problem, dict) or not problem.get("code"):
        return bad_answer(server, answer.status, f"HTTP status {answer.status}", after)
    error = error_of(problem, answer.status, after)
    request_id = answer.headers.get("x-request-id")
    if request_id:
        error.add_note(f"request id {request_id:.100}")
    return error


def retry_after(answer: Answer, now: float) -> float | None:
    """Return the seconds to wait by Retry-After, or None; `now` is the wall-clock time."""
    text = answer.headers.get("retry-after", "").strip()
    if seconds := re.fullmatch(r"0*([0-9]{1,9})", text):
        return float(seconds[1])
    moment = http_date(text)
    return None if moment is None else max(0.0, moment.timestamp() - now)


class Server:
    """The server's address, and the headers of every request."""

    def __init__(self, url: str, token: str | None, namespace: str | None) -> None:
        environ = os.environ
        token = token or environ.get("TICKWHEEL_TOKEN") or None
        if namespace is None:  # an empty string is an error, not the default namespace
            namespace = environ.get("TICKWHEEL_NAMESPACE") or None
        self.scheme, self.host, self.port, self.prefix = parse_url(url)
        bracketed = f"[{self.host}]" if ":" in self.host else self.host
        self.origin = f"{self.scheme}://{bracketed}:{self.port}"
        self.url = self.origin + self.prefix
        self._headers: tuple[tuple[str, str], ...] = (
            ("accept", "application/json"),
            ("user-agent", f"tickwheel/{tickwheel.__version__}"),
        )
        if namespace is not None:
            self._headers += (("tickwheel-namespace", header_text("namespace", namespace)),)
        self._token = None if token is None else Secret(header_text("token", token))

    def headers(self, request: Request) -> list[tuple[str, str]]:
        """Return all headers of a request; the token appears only here."""
        headers = [*self._headers, *request.headers]
        if request.body and not any(name == "content-type" for name, _ in headers):
            headers.append(("content-type", "application/json"))
        if self._token is not None:
            headers.append(("authorization", f"Bearer {self._token.text}"))
        return headers

    def warn_if_insecure(self, stacklevel: int) -> None:
        """Warn about a token that others could read on the network."""
        if self._token is not None and self.scheme == "http" and not is_loopback(self.host):
            warnings.warn(
                f"the token is sent to {self.url} without encryption: use https://",
                InsecureToken,
                stacklevel=stacklevel + 1,
            )

    def warn_of_version(self, stacklevel: int) -> None:
        """Warn about a URL that ends in /v1, which every request has already."""
        if self.prefix.endswith("/v1"):
            text = f"{self.url} ends in /v1, which the client adds itself: leave it out"
            warnings.warn(text, stacklevel=stacklevel + 1)


def parse_url(url: str) -> tuple[str, str, int, str]:
    """Return scheme, host, port and path of a server's URL; messages never show a password."""
    if not isinstance(url, str):
        raise TypeError(f"server must be a URL, got a {type(url).__name__}")
    right = "a server must be http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"{right}; this is not a URL") from None
    if parts.scheme not in ("http", "https") or not host:
        shown = f", got {url!r:.100}" if not re.search("[@?#]", url) else ""
        raise ValueError(right + shown)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"{right}, without a user, a query or a fragment; give a token as token=..."
        )
    if not re.fullmatch(r"[!-~]*", parts.path + host):
        raise ValueError(f"{right}, in printable ASCII")
    return (
        parts.scheme,
        host,
        port or {"http": 80, "https": 443}[parts.scheme],
        parts.path.rstrip("/"),
    )


def header_text(what: str, text: str) -> str:
    """Return a text if it is valid as a header's value; messages never show it."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, got a {type(text).__name__}")
    if not re.fullmatch(r"[!-~]{1,4096}", text):
        raise ValueError(f"{what} must be printable ASCII without spaces")
    return text


def is_loopback(host: str) -> bool:
    """Return whether a host is certainly this machine."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Options(NamedTuple):
    """The checked options of a client."""

    retries: int
    timeout: float

    @classmethod
    def of(cls, retries: int, timeout: float) -> Options:
        """Check the options of a client."""
        if nanoseconds("timeout", timeout) == 0:
            raise ValueError("timeout must be more than 0 seconds")
        return cls(bounded("retries", retries, 0, 1_000), float(timeout))
