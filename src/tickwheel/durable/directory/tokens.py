"""Tokens: how they are made, written and recognised. Pure; a token's secret is kept nowhere."""

from __future__ import annotations

import hashlib
import re
import secrets

SCOPES = ("submit", "read", "admin")
ANY = "*"  # the namespace of a token that may be used in all of them
DEFAULT = "default"  # how people call the namespace that has no name
NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,50}")
TOKEN = re.compile(r"tw_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


def new_token() -> tuple[str, str, str]:
    """Return a new token's id, its digest, and the token itself, which is shown once."""
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return token_id, digest_of(secret), f"tw_{token_id}_{secret}"


def digest_of(secret: str) -> str:
    """Return what is stored of a token's secret, which is too long to be guessed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def namespace_named(name: str) -> str:
    """Return a namespace by its name; the default one has none inside."""
    return "" if name == DEFAULT else name
