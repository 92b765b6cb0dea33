"""Requests, their answers, and where the server is: all of the client that needs no network.

A `Call` is a request and how its answer is read; `tries` says when it is sent again. The clients
send, receive and sleep, nothing more.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import tickwheel
from tickwheel.arguments import bounded, nanoseconds
from tickwheel.client.errors import ApiError, error_of
from tickwheel.errors import TickwheelError
from tickwheel.values.json import call as serial

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

DEFAULT_SERVER = "http://127.0.0.1:7380"
MAX_ANSWER = 256 << 20  # bytes: more than any sane page, less than what would end this process
CONNECT_TIMEOUT = 5.0


class InsecureToken(UserWarning):
    """A token goes over plain HTTP to another machine: whoever is between can read it."""


class Secret:
    """A text that shows itself to nobody who prints it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return "<a secret>"


class Request(NamedTuple):
    """What is sent, but for the token.

    `safe`: it may be sent again when an earlier one may have reached the server. `probe`: whatever
    is answered is the answer, at once.
    """

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    safe: bool = True
    probe: bool = False


class Answer(NamedTuple):
    """What came back; the names of headers are lower case.

    `again`: the request was sent before, over a connection that broke, and may have been done then.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    again: bool = False

    @property
    def ok(self) -> bool:
        """Whether it says that what was asked for is done."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and how to read the document that answers it; of a probe, the whole answer.

    - `settle`, for a refusal after an earlier try that may have been done: calls that show whether
      it was, and then what it answered; it raises the refusal otherwise. It is told the refusal,
      and the server's time when the call began, or None.
    - `counts`: the answer is a number, in which what an earlier try has done is missing.
    """

    request: Request
    read: Callable[[Any], T]
    settle: Settle[T] | None = None
    counts: bool = False

    def result(self, answer: Answer, now: float, server: str) -> T:
        """Return what the answer says, or raise the error that it is.

        `now` is the time of day, `server` who answered.
        """
        if not answer.ok and not self.request.probe:
            raise refusal(answer, now, server)
        try:
            return self.read(answer if self.request.probe else document_of(answer))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error!s:.200}"
            raise stranger(server, answer.status, why) from error


Settle = Callable[[TickwheelError, datetime | None], Generator[Call[Any], Any, T]]


def stranger(server: str, status: int, why: str, retry_after: float | None = None) -> ApiError:
    """Return the error for an answer of something else: a proxy, or another program."""
    return ApiError(
        f"what {server} sent is no answer of a tickwheel server: {why}",
        code="bad_answer",
        status=status,
        retry_after=retry_after,
    )


def too_long(status: int) -> ApiError:
    """Return the error for an answer that is not read to its end."""
    return ApiError(
        f"the answer has more than {MAX_ANSWER >> 20} MiB; ask for fewer with limit=...",
        code="bad_answer",
        status=status,
    )


def document_of(answer: Answer) -> Any:
    """Return the JSON of an answer, None for none; ValueError for what is not JSON."""
    return serial.decode(answer.body) if answer.body else None


def refusal(answer: Answer, now: float, server: str) -> TickwheelError:
    """Return the error that an answer is."""
    problem: Any = None
    with suppress(ValueError):  # a proxy's page, say: the status has to do
        problem = document_of(answer)
    after = retry_after(answer, now)
    if not isinstance(problem, dict) or not problem.get("code"):
        return stranger(server, answer.status, f"HTTP status {answer.status}", after)
    error = error_of(problem, answer.status, after)
    request_id = answer.headers.get("x-request-id")
    if request_id:
        error.add_note(f"request id {request_id:.100}")
    return error


def retry_after(answer: Answer, now: float) -> float | None:
    """Return how many seconds the server asks to wait, or None; `now` is the time of day."""
    text = answer.headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, moment.timestamp() - now)


class Server:
    """Where the server is, and the headers that every request has."""

    def __init__(self, url: str | None, token: str | None, namespace: str | None) -> None:
        environ = os.environ
        url = url or environ.get("TICKWHEEL_SERVER") or DEFAULT_SERVER
        token = token or environ.get("TICKWHEEL_TOKEN") or None
        if namespace is None:  # an empty one is an error, and never the default namespace
            namespace = environ.get("TICKWHEEL_NAMESPACE") or None
        self.scheme, self.host, self.port, self.prefix = parsed(url)
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
        """Return all headers to send: only here the token is among them."""
        headers = [*self._headers, *request.headers]
        if request.body and not any(name == "content-type" for name, _ in headers):
            headers.append(("content-type", "application/json"))
        if self._token is not None:
            headers.append(("authorization", f"Bearer {self._token.text}"))
        return headers

    def warn_if_insecure(self, stacklevel: int) -> None:
        """Warn of a token that others could read on its way."""
        if self._token is not None and self.scheme == "http" and not is_loopback(self.host):
            warnings.warn(
                f"the token goes to {self.url} in the clear: use https://",
                InsecureToken,
                stacklevel=stacklevel + 1,
            )


def parsed(url: str) -> tuple[str, str, int, str]:
    """Return scheme, host, port and path of a server's URL; no message shows a password."""
    if not isinstance(url, str):
        raise TypeError(f"server must be a URL, got a {type(url).__name__}")
    right = "a server is http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"{right}; this is no URL") from None
    if parts.scheme not in ("http", "https") or not host:
        shown = f", got {url!r:.100}" if not re.search("[@?#]", url) else ""
        raise ValueError(right + shown)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{right}, without a user, a query or a fragment; the token is token=...")
    if not re.fullmatch(r"[!-~]*", parts.path + host):
        raise ValueError(f"{right}, in printable ASCII")
    return parts.scheme, host, port or {"http": 80, "https": 443}[parts.scheme], path_of(parts.path)


def path_of(path: str) -> str:
    """Return a prefix for paths, without the slash at its end."""
    return path.rstrip("/")


def header_text(what: str, text: str) -> str:
    """Return a text that can be a header's value; a message never shows it."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, got a {type(text).__name__}")
    if not re.fullmatch(r"[!-~]{1,4096}", text):
        raise ValueError(f"{what} must be printable ASCII without spaces")
    return text


def is_loopback(host: str) -> bool:
    """Say whether a host is this machine for sure."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Options(NamedTuple):
    """What a client was told, checked."""

    retries: int
    timeout: float

    @classmethod
    def of(cls, retries: int, timeout: float) -> Options:
        """Check the options of a client."""
        if nanoseconds("timeout", timeout) == 0:
            raise ValueError("timeout must be more than 0 seconds")
        return cls(bounded("retries", retries, 0, 1_000), float(timeout))
