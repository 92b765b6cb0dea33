"""The endpoint of a message broker: a URL with hosts, credentials, a path and options. Pure.

    amqp://user:password@host:5672/vhost?exchange=orders

A password is a secret, and so is a user without one: it may be a token. A service keeps the secret
apart from its endpoint, which shows a placeholder in its place. No message of this module has it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote

from tickwheel.values.service import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_CHARACTERS = 2048
MAX_HOSTS = 20
TLS_SCHEMES = frozenset({"amqps", "kafkas", "rediss", "tls"})

_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://"
    r"(?:(?P<user>[^/?#@:]*)(?::(?P<password>[^/?#@]*))?@)?"
    r"(?P<hosts>[^/?#@]*)(?:/(?P<path>[^?#]*))?(?:\?(?P<query>[^#]*))?",
    re.IGNORECASE,
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:,\s]+)(?::(?P<port>[0-9]{1,5}))?")
_CREDENTIALS = re.compile(
    r"(?P<head>[a-z][a-z0-9+.-]*://(?:[^/?#@:]*:)?)(?P<password>[^/?#@]*)@", re.IGNORECASE
)


class Endpoint(NamedTuple):
    """A broker's address; credentials and path are decoded, and the path has no first slash."""

    scheme: str
    user: str
    password: str
    hosts: tuple[tuple[str, int], ...]
    path: str
    options: tuple[tuple[str, str], ...]

    @property
    def tls(self) -> bool:
        """Whether the connection must have TLS."""
        return self.scheme in TLS_SCHEMES

    def option(self, name: str, default: str = "") -> str:
        """Return the value of an option of the query."""
        return dict(self.options).get(name, default)

    def allow_options(self, known: Collection[str]) -> None:
        """Raise ValueError for an option that is not known."""
        for name, _ in self.options:
            if name not in known:
                raise ValueError(
                    f"the endpoint has no option {name!r:.100}; it has {', '.join(sorted(known))}"
                )

    def number(self, name: str, least: int, most: int) -> int | None:
        """Return an option that is a number, or None without it."""
        text = self.option(name)
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
            raise ValueError(
                f"the endpoint's option {name!r} must be from {least} to {most}, got {text!r:.50}"
            )
        return int(text)

    @property
    def server(self) -> str:
        """The hosts and ports, for messages and logs."""
        return ",".join(f"{host}:{port}" for host, port in self.hosts)


def split_password(url: str) -> tuple[str, str]:
    """Return a URL with a placeholder for its password, and the password, still encoded.

    A URL without a password, or one that is no URL, stays as it is.
    """
    found = _CREDENTIALS.match(url)
    if found is None or not found["password"]:
        return url, ""
    return f"{found['head']}{PLACEHOLDER}{url[found.end('password') :]}", found["password"]


def parse_endpoint(url: str, password: str, schemes: Mapping[str, int]) -> Endpoint:
    """Parse a URL; `schemes` has the default port of each valid one, `password` what is hidden."""
    example = next(iter(schemes))
    if len(url) > MAX_CHARACTERS:
        raise ValueError(f"an endpoint may have {MAX_CHARACTERS} characters, got {len(url)}")
    parts = _URL.fullmatch(url) if url.isprintable() and " " not in url else None
    if parts is None:
        raise ValueError(
            f"an endpoint must be a URL such as {example}://user:password@host/path, with @, / and"
            " ? in user and password percent-encoded"
        )
    scheme = parts["scheme"].lower()
    if scheme not in schemes:
        raise ValueError(
            f"the endpoint must start with {' or '.join(f'{one}://' for one in schemes)},"
            f" got {scheme!r:.50}"
        )
    user, given = parts["user"] or "", parts["password"] or ""
    return Endpoint(
        scheme,
        unquote(password if user == PLACEHOLDER and not given else user),
        unquote(password if given == PLACEHOLDER else given),
        _hosts(parts["hosts"], schemes[scheme]),
        unquote(parts["path"] or ""),
        tuple(parse_qsl(parts["query"] or "", keep_blank_values=True)),
    )


def _hosts(text: str, port: int) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for one in text.split(","):
        parts = _HOST.fullmatch(one)
        if parts is None:
            raise ValueError(f"an endpoint must have a host, and after it at most a port: {one!r}")
        number = port if parts["port"] is None else int(parts["port"])
        if not 1 <= number <= 65535:
            raise ValueError(f"the port of {parts['host']} must be from 1 to 65535, got {number}")
        found.append((parts["host"].removeprefix("[").removesuffix("]").lower(), number))
    if len(found) > MAX_HOSTS:
        raise ValueError(f"an endpoint may have {MAX_HOSTS} hosts, got {len(found)}")
    return tuple(found)
