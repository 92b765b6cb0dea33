"""API tokens: making and parsing them. Pure; nothing stores a token's secret."""

from __future__ import annotations

import hashlib
import re
import secrets

SCOPES = ("submit", "read", "admin")
ANY = "*"  # the namespace of a token that is valid in all of them
DEFAULT = "default"  # the name for users of the namespace ""
NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,50}")
TOKEN = re.compile(r"tw_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


def new_token() -> tuple[str, str, str]:
    """Return a new token's id, its digest, and the token itself, which the user sees once."""
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return token_id, digest_of(secret), f"tw_{token_id}_{secret}"


def digest_of(secret: str) -> str:
    """Return the digest to store; without a salt, as a token's secret is too long to guess."""
    return hashlib.sha256(secret.encode()).hexdigest()


def namespace_named(name: str) -> str:
    """Return the namespace with this name; the default one is ""."""
    return "" if name == DEFAULT else name
