"""Access control: tokens, their scopes, namespaces and rates. Secrets are not kept."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.clock import SystemClock
from tickwheel.durable.directory.tokens import (
    ANY,
    NAMESPACE,
    SCOPES,
    TOKEN,
    digest_of,
    namespace_named,
)
from tickwheel.values.task import qualified_name
from tickwheel.web.problems import HttpError

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping

    from tickwheel.durable.directory.directory import Directory
    from tickwheel.durable.registry import Token

ALL_SCOPES = frozenset(SCOPES)
CHALLENGE = [(b"www-authenticate", b'Bearer realm="tickwheel"')]
BURST_SECONDS = 1.0


class Access(NamedTuple):
    """The permissions of one request.

    - `namespace` is where its names are looked up. If `confined`, the request sees nothing else:
      its token is for that namespace only, or a header names it.
    """

    namespace: str
    confined: bool
    scopes: frozenset[str]
    actor: str

    @property
    def within(self) -> str | None:
        """The namespace in which ids are looked up, or None for all."""
        return self.namespace if self.confined else None

    def within_namespace(self, name: str) -> Access:
        """Return the permissions in one namespace; raise if the token is for another."""
        namespace = namespace_named(name)
        if self.confined and namespace != self.namespace:
            raise HttpError("forbidden", "the token is for another namespace")
        return self._replace(namespace=namespace, confined=True)

    def name(self, name: str) -> str:
        """Return the full name for a name in the caller's namespace."""
        return qualified_name(self.namespace, name)

    def may(self, scope: str) -> bool:
        """Return whether the caller has this scope."""
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: str) -> None:
        """Raise unless the caller has this scope; everybody has the empty one."""
        if scope and not self.may(scope):
            raise HttpError("forbidden", f"the token lacks the scope {scope!r}")


class Guard:
    """Admits requests: with a token, or without one where that is allowed.

    - Without a token everything is allowed if only this machine can connect (`local`) and the store
      has never had a token, or with the setting `--insecure-without-tokens` (`open_access`).
    - Each process counts rates for itself.
    """

    def __init__(
        self, directory: Directory, *, local: bool, open_access: bool, rate: float | None
    ) -> None:
        self._directory = directory
        self._local = local
        self.open_access = open_access
        self._rate = rate
        self._clock = SystemClock()
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens left, and at what time

    @property
    def tokens(self) -> Mapping[str, Token]:
        """The tokens, by id."""
        return self._directory.tokens

    @property
    def had_tokens(self) -> bool:
        """Whether the store has ever had a token."""
        return self._directory.had_tokens

    @property
    def open(self) -> bool:
        """Whether no token is needed."""
        return self.open_access or (self._local and not self.had_tokens)

    def admit(self, headers: Mapping[bytes, bytes], now_ms: float) -> Access:
        """Return the permissions of a request with these headers; raise if it has none."""
        given = headers.get(b"authorization")
        wanted = headers.get(b"tickwheel-namespace")
        if given is None:
            if not self.open:
                raise HttpError("unauthorized", "a token is needed: Bearer tw_…", CHALLENGE)
            return Access(parse_namespace(wanted), wanted is not None, ALL_SCOPES, "anybody")
        token = self._verify(given, now_ms)
        self._check_rate(token)
        namespace, confined = parse_namespace(wanted), wanted is not None
        if token.namespace != ANY:
            own = namespace_named(token.namespace)
            if confined and namespace != own:
                raise HttpError("forbidden", "the token is for another namespace")
            namespace, confined = own, True
        return Access(namespace, confined, frozenset(token.scopes), f"{token.id} {token.name}")

    def still_admits(self, headers: Mapping[bytes, bytes], now_ms: float) -> bool:
        """Return whether a request that was admitted with these headers still would be."""
        given = headers.get(b"authorization")
        if given is None:
            return self.open
        try:
            self._verify(given, now_ms)
        except HttpError:
            return False
        return True

    def _verify(self, given: bytes, now_ms: float) -> Token:
        match = parse_authorization(given)
        token = self.tokens.get(match[1]) if match else None
        digest = digest_of(match[2]) if match else ""
        if token is None or not hmac.compare_digest(digest, token.digest):
            why = "the token is unknown, or has been revoked"
            if match is None:
                why = "the authorization header must be: Bearer tw_…, as the token was shown"
            raise HttpError("unauthorized", why, CHALLENGE)
        if token.expires_at_ms is not None and token.expires_at_ms <= now_ms:
            raise HttpError("unauthorized", "the token has expired", CHALLENGE)
        return token

    def _check_rate(self, token: Token) -> None:
        """Raise if a token is used more often than its rate allows."""
        rate = token.rate or self._rate
        if rate is None:
            return
        now = self._clock.time()
        burst = max(1.0, rate * BURST_SECONDS)
        left, at = self._buckets.get(token.id, (burst, now))
        left = min(burst, left + (now - at) * rate)
        self._buckets[token.id] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > len(self.tokens):  # some were revoked
            self._buckets = {one: self._buckets[one] for one in self.tokens & self._buckets.keys()}
        if left < 1:
            after = max(1, round((1 - left) / rate))
            raise HttpError(
                "rate_limited",
                f"the token may be used {rate:g} times a second",
                [(b"retry-after", str(after).encode())],
            )


def parse_authorization(given: bytes) -> re.Match[str] | None:
    """Return the match of an authorization header with a token: its id and its secret."""
    scheme, _, text = given.decode("latin-1").strip().partition(" ")
    return TOKEN.fullmatch(text.strip()) if scheme.lower() == "bearer" else None


def token_id_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the id in a request's token, or None if it has no well-formed token."""
    match = parse_authorization(headers.get(b"authorization", b""))
    return match[1] if match else None


def parse_namespace(wanted: bytes | None) -> str:
    """Return the namespace that a header names; without a header, the default one."""
    if wanted is None:
        return ""
    name = wanted.decode("latin-1")
    if not NAMESPACE.fullmatch(name):
        raise HttpError(
            "bad_request",
            "tickwheel-namespace must be 1 to 50 of A-Z a-z 0-9 . _ -, or be left out",
        )
    return namespace_named(name)
