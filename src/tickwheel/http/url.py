"""URLs, read strictly: what a request goes to, and what its first line says.

An error never repeats the URL: it may hold a password or a token.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import quote

PORTS = {"http": 80, "https": 443}
LONGEST_HOST = 253

PARTS = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE)
AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?", re.ASCII)
NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
LEGAL = "%/?:@!$&'()*+,;=-._~"
BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


class Target(NamedTuple):
    """A URL, taken apart."""

    scheme: str
    host: str
    """In lower case and ASCII; an IPv6 address without its brackets."""
    port: int
    authority: str
    """The Host header: the port is left out where it is the scheme's own."""
    path: str
    """With the query; never empty."""

    @property
    def origin(self) -> tuple[str, str, int]:
        """What a connection can be shared for."""
        return self[:3]

    @property
    def where(self) -> str:
        """Host and port, for messages."""
        return place(self.host, self.port)


def parse(url: str) -> Target:
    """Return the parts of an http or https URL.

    - A user name or password, a port out of range, a control character: ValueError.
    - Path and query stay as they are, except that what a URL may not hold is percent-encoded.
    - The fragment is left out, as it is never sent.
    """
    if CONTROL.search(url):
        raise ValueError("a URL must not hold control characters")
    if (parts := PARTS.fullmatch(url)) is None:
        raise ValueError("a URL must begin with http:// or https://")
    scheme, authority, path = parts[1].lower(), parts[2], parts[3]
    if "@" in authority:
        raise ValueError("a URL must not hold a user name or a password")
    if (pair := AUTHORITY.fullmatch(authority)) is None:
        raise ValueError("a URL's host must be a name or an address, with a port or none")
    host = host_of(pair[1])
    port = PORTS[scheme] if pair[2] is None else int(pair[2])
    if not 0 < port < 1 << 16:
        raise ValueError(f"a URL's port must be within 1 … 65535, got {port}")
    shown = host if ":" not in host else f"[{host}]"
    return Target(
        scheme,
        host,
        port,
        shown if port == PORTS[scheme] else f"{shown}:{port}",
        path_of(path),
    )


def host_of(text: str) -> str:
    """Return a host as it is looked up: ASCII, lower case, without brackets."""
    if text.startswith("["):
        if "%" in text:
            raise ValueError("a URL's address must not have a zone")
        try:
            return str(ipaddress.IPv6Address(text[1:-1]))
        except ValueError:
            raise ValueError("what is in a URL's brackets must be an IPv6 address") from None
    try:
        host = text.lower() if text.isascii() else text.encode("idna").decode("ascii").lower()
    except UnicodeError:
        raise ValueError("a URL's host must be a name that IDNA can encode") from None
    if len(host) > LONGEST_HOST or NAME.fullmatch(host) is None:
        raise ValueError(
            "a URL's host must be labels of letters, digits, - and _,"
            f" 63 at most in each, {LONGEST_HOST} in all"
        )
    return host


def path_of(text: str) -> str:
    """Return path and query, with what they may not hold percent-encoded."""
    if not text.startswith("/"):
        text = "/" + text
    try:
        return BARE_PERCENT.sub("%25", quote(text, safe=LEGAL))
    except UnicodeError:
        raise ValueError("a URL must not hold half a character (a lone surrogate)") from None


def place(host: str, port: int) -> str:
    """Return host and port as one text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
