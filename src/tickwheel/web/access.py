"""Who may do what: tokens, their scopes, namespaces and rates. It never sees a secret twice."""

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
from tickwheel.values.task import qualified
from tickwheel.web.problems import Refused

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping

    from tickwheel.durable.directory.directory import Directory
    from tickwheel.durable.registry import Token

ALL = frozenset(SCOPES)
CHALLENGE = [(b"www-authenticate", b'Bearer realm="tickwheel"')]
BURST_SECONDS = 1.0


class Access(NamedTuple):
    """What one request may do.

    - `namespace` is where its names are looked up; with `confined` it sees nothing else: the
      token is for that namespace only, or the request names it.
    """

    namespace: str
    confined: bool
    scopes: frozenset[str]
    actor: str

    @property
    def within(self) -> str | None:
        """The namespace that ids are looked up in, or None for all."""
        return self.namespace if self.confined else None

    def name(self, name: str) -> str:
        """Return the full name of what the caller calls so."""
        return qualified(self.namespace, name)

    def may(self, scope: str) -> bool:
        """Say whether the caller has this scope."""
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: str) -> None:
        """Raise unless the caller has this scope."""
        if not self.may(scope):
            raise Refused("forbidden", f"the token lacks the scope {scope!r}")


class Guard:
    """Lets requests in: by a token, or without one where that was allowed.

    - Without a token anything may be done while only this machine can ask (`local`) and the store
      has never had a token, or with the setting `--insecure-without-tokens` (`open_access`).
    - Rates are counted by each process for itself.
    """

    def __init__(
        self, directory: Directory, *, local: bool, open_access: bool, rate: float | None
    ) -> None:
        self._directory = directory
        self._local = local
        self.open_access = open_access
        self._rate = rate
        self._clock = SystemClock()
        self._buckets: dict[str, tuple[float, float]] = {}  # what is left, and when that was

    @property
    def tokens(self) -> Mapping[str, Token]:
        """The tokens that there are."""
        return self._directory.tokens

    @property
    def had_tokens(self) -> bool:
        """Whether there ever was one."""
        return self._directory.had_tokens

    @property
    def open(self) -> bool:
        """Whether no token is needed."""
        return self.open_access or (self._local and not self.had_tokens)

    def admit(self, headers: Mapping[bytes, bytes], now_ms: float) -> Access:
        """Return what a request with these headers may do; raise when it is nothing."""
        given = headers.get(b"authorization")
        wanted = headers.get(b"tickwheel-namespace")
        if given is None:
            if not self.open:
                raise Refused("unauthorized", "a token is needed: Bearer tw_…", CHALLENGE)
            return Access(chosen(wanted), wanted is not None, ALL, "anybody")
        token = self._known(given, now_ms)
        self._count(token)
        namespace, confined = chosen(wanted), wanted is not None
        if token.namespace != ANY:
            own = namespace_named(token.namespace)
            if confined and namespace != own:
                raise Refused("forbidden", "the token is for another namespace")
            namespace, confined = own, True
        return Access(namespace, confined, frozenset(token.scopes), f"{token.id} {token.name}")

    def _known(self, given: bytes, now_ms: float) -> Token:
        match = match_of(given)
        token = self.tokens.get(match[1]) if match else None
        digest = digest_of(match[2]) if match else ""
        if token is None or not hmac.compare_digest(digest, token.digest):
            why = "the token is unknown, or has been revoked"
            if match is None:
                why = "the authorization header must be: Bearer tw_…, as the token was shown"
            raise Refused("unauthorized", why, CHALLENGE)
        if token.expires_at_ms is not None and token.expires_at_ms <= now_ms:
            raise Refused("unauthorized", "the token has expired", CHALLENGE)
        return token

    def _count(self, token: Token) -> None:
        """Raise when a token is used more often than it may be."""
        rate = token.rate or self._rate
        if rate is None:
            return
        now = self._clock.time()
        burst = max(1.0, rate * BURST_SECONDS)
        left, at = self._buckets.get(token.id, (burst, now))
        left = min(burst, left + (now - at) * rate)
        self._buckets[token.id] = (left - 1 if left >= 1 else left, now)
        if left < 1:
            after = max(1, round((1 - left) / rate))
            raise Refused(
                "rate_limited",
                f"the token may be used {rate:g} times a second",
                [(b"retry-after", str(after).encode())],
            )


def match_of(given: bytes) -> re.Match[str] | None:
    """Return the id and the secret that an authorization header has, if it is one of ours."""
    scheme, _, text = given.decode("latin-1").strip().partition(" ")
    return TOKEN.fullmatch(text.strip()) if scheme.lower() == "bearer" else None


def named_token(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the id of the token that a request names; None: it is none of ours."""
    match = match_of(headers.get(b"authorization", b""))
    return match[1] if match else None


def chosen(wanted: bytes | None) -> str:
    """Return the namespace that a request names; without a header it is the default one."""
    if wanted is None:
        return ""
    name = wanted.decode("latin-1")
    if not NAMESPACE.fullmatch(name):
        raise Refused(
            "bad_request",
            "tickwheel-namespace must be 1 to 50 of A-Z a-z 0-9 . _ -, or be left out",
        )
    return namespace_named(name)
