"""Signatures of calls, by Standard Webhooks: the sender signs, the receiver verifies.

It does not depend on services, tasks or HTTP, and needs only the standard library, since a receiver
uses it, too. No message of this module has a secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets as randomness
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PREFIX = "whsec_"
MIN_KEY_BYTES, MAX_KEY_BYTES = 24, 64
NEW_KEY_BYTES = 32
TOLERANCE = 300.0  # seconds between the clocks of both sides, the transfer included
ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"


class InvalidSignature(TickwheelError, ValueError):
    """The call has no valid signature by a known secret, or was signed too long ago."""

    code = "invalid_signature"


def sign(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the header `webhook-signature`: one signature per secret, in their order.

    - The newest secret comes first. During a rotation both sign, and a receiver with either of them
      accepts the call.
    - `timestamp` is in whole seconds since 1970, and is sent as `webhook-timestamp`.
    """
    head = f"{message_id}.{timestamp}.".encode()
    return " ".join(f"v1,{_signature(secret, head, body)}" for secret in secrets)


def verify(
    secrets: Sequence[str],
    headers: Mapping[str, str] | Iterable[tuple[str, str]],
    body: bytes,
    *,
    now: float,
    tolerance: float = TOLERANCE,
) -> str:
    """Return the message's id if one of its signatures is by one of `secrets`.

    - InvalidSignature names the header that is missing or wrong, or says that the time is too far
      from `now`, in seconds since 1970. A difference of exactly `tolerance` is accepted.
    - `body` has the received bytes: JSON that was parsed and encoded again differs.
    - Comparisons take constant time.
    """
    if not secrets:
        raise ValueError("verify needs at least one secret: without one, anybody could have signed")
    message_id, stamp, signatures = _webhook_headers(headers)
    timestamp = _parse_timestamp(stamp)
    if timestamp < now - tolerance:
        raise InvalidSignature(f"{TIMESTAMP} is too old: {now - timestamp:.0f} s before now")
    if timestamp > now + tolerance:
        raise InvalidSignature(f"{TIMESTAMP} is too new: {timestamp - now:.0f} s after now")
    # Sign the header's own text: another spelling of the same number was not signed.
    head = f"{message_id}.{stamp}.".encode("utf-8", "surrogatepass")
    expected = [_signature(secret, head, body).encode() for secret in secrets]
    given = [one[3:] for one in signatures.split(" ") if one.startswith("v1,")]
    matches = [
        hmac.compare_digest(right, one.encode("utf-8", "surrogatepass"))
        for one in given
        for right in expected
    ]
    if not any(matches):
        raise InvalidSignature(f"{SIGNATURE} has no signature by a known secret")
    return message_id


def check_secret(text: str) -> None:
    """Raise ValueError unless `text` is a valid secret; the message never has it."""
    if not isinstance(text, str):
        raise TypeError(f"a secret must be a str, got {type(text).__name__}")
    right = f"{PREFIX!r} and the base64 of {MIN_KEY_BYTES} to {MAX_KEY_BYTES} random bytes"
    if not text.startswith(PREFIX):
        raise ValueError(f"a secret must be {right}; this one does not start with {PREFIX!r}")
    try:
        key = base64.b64decode(text.removeprefix(PREFIX).encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError(
            f"a secret must be {right}; what follows {PREFIX!r} is not base64"
        ) from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a secret must be {right}; this one has {len(key)} bytes")


def new_secret() -> str:
    """Return a new random secret."""
    return PREFIX + base64.b64encode(randomness.token_bytes(NEW_KEY_BYTES)).decode()


def _signature(secret: str, head: bytes, body: bytes) -> str:
    mac = _hmac(secret).copy()
    mac.update(head)
    mac.update(body)
    return binascii.b2a_base64(mac.digest(), newline=False).decode()


@lru_cache(maxsize=4096)
def _hmac(secret: str) -> hmac.HMAC:
    """Return the HMAC with its key applied: half of a short message's work, done once."""
    check_secret(secret)
    return hmac.new(base64.b64decode(secret.removeprefix(PREFIX)), digestmod=hashlib.sha256)


def _webhook_headers(
    headers: Mapping[str, str] | Iterable[tuple[str, str]],
) -> tuple[str, str, str]:
    """Return id, timestamp and signatures; names of headers are case-insensitive."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    found: dict[str, str] = {}
    for name, value in pairs:
        lower = name.lower()
        if lower in (ID, TIMESTAMP, SIGNATURE) and found.setdefault(lower, value) != value:
            raise InvalidSignature(f"the header {lower} came twice, with different values")
    for name in (ID, TIMESTAMP, SIGNATURE):
        if not found.get(name):
            raise InvalidSignature(f"the header {name} is missing")
    return found[ID], found[TIMESTAMP], found[SIGNATURE]


def _parse_timestamp(stamp: str) -> int:
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 15):
        raise InvalidSignature(f"{TIMESTAMP} must be whole seconds since 1970, got {stamp!r:.50}")
    return int(stamp)
