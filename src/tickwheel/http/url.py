"""A strict URL parser: the target of a request, and its request line.

An error never repeats the URL: it may contain a password or a token.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import quote

PORTS = {"http": 80, "https": 443}
MAX_HOST_CHARACTERS = 253

PARTS = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE)
AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?", re.ASCII)
NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
LEGAL = "%/?:@!$&'()*+,;=-._~"
BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


class Target(NamedTuple):
    """A parsed URL."""

    scheme: str
    host: str
    """In lower case and ASCII; an IPv6 address without its brackets."""
    port: int
    authority: str
    """The Host header, without the scheme's default port."""
    path: str
    """With the query; never empty."""

    @property
    def origin(self) -> tuple[str, str, int]:
        """Requests with the same origin can share a connection."""
        return self[:3]

    @property
    def where(self) -> str:
        """Host and port, for messages."""
        return host_and_port(self.host, self.port)


def parse(url: str) -> Target:
    """Return the parts of an http or https URL.

    - Raises ValueError for a user name or password, a port out of range, a control character.
    - Path and query stay unchanged, except that characters illegal in a URL are percent-encoded.
    - The fragment is dropped, because it is never sent.
    """
    if CONTROL.search(url):
        raise ValueError("a URL must not contain control characters")
    if (parts := PARTS.fullmatch(url)) is None:
        raise ValueError("a URL must begin with http:// or https://")
    scheme, authority, path = parts[1].lower(), parts[2], parts[3]
    if "@" in authority:
        raise ValueError("a URL must not contain a user name or a password")
    if (pair := AUTHORITY.fullmatch(authority)) is None:
        raise ValueError("a URL's host must be a name or an address, with an optional port")
    host = normalize_host(pair[1])
    port = PORTS[scheme] if pair[2] is None else int(pair[2])
    if not 0 < port < 1 << 16:
        raise ValueError(f"a URL's port must be from 1 to 65535, got {port}")
    shown = host if ":" not in host else f"[{host}]"
    return Target(
        scheme,
        host,
        port,
        shown if port == PORTS[scheme] else f"{shown}:{port}",
        encode_path(path),
    )


def normalize_host(text: str) -> str:
    """Return a host in the form for a lookup: ASCII, lower case, without brackets."""
    if text.startswith("["):
        if "%" in text:
            raise ValueError("a URL's address must not have a zone")
        try:
            return str(ipaddress.IPv6Address(text[1:-1]))
        except ValueError:
            raise ValueError("the brackets in a URL must contain an IPv6 address") from None
    try:
        host = text.lower() if text.isascii() else text.encode("idna").decode("ascii").lower()
    except UnicodeError:
        raise ValueError("a URL's host must be a name that IDNA can encode") from None
    if len(host) > MAX_HOST_CHARACTERS or NAME.fullmatch(host) is None:
        raise ValueError(
            "a URL's host must be labels of letters, digits, - and _, each of at most 63"
            f" characters, {MAX_HOST_CHARACTERS} in all"
        )
    return host


def encode_path(text: str) -> str:
    """Return path and query, with illegal characters percent-encoded."""
    if not text.startswith("/"):
        text = "/" + text
    try:
        return BARE_PERCENT.sub("%25", quote(text, safe=LEGAL))
    except UnicodeError:
        raise ValueError("a URL must not contain a lone surrogate") from None


def host_and_port(host: str, port: int) -> str:
    """Return host and port as one string."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
