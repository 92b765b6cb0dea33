"""Signatures of calls, as Standard Webhooks has them: who sends signs, who receives verifies.

Knows nothing of services, tasks or HTTP, and needs nothing but the standard library: a receiver
uses it too. No message of this module holds a secret.
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
FEWEST_BYTES, MOST_BYTES = 24, 64  # of a key
NEW_BYTES = 32
TOLERANCE = 300.0  # seconds that the clocks of both sides may differ, the way included
ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"


class InvalidSignature(TickwheelError, ValueError):
    """A call that is not signed by whom it should be, or was signed too long ago."""

    code = "invalid_signature"


def sign(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header `webhook-signature`: one signature per secret, in their order.

    - Give the newest first. While a secret is being replaced both sign, and a receiver that knows
      either of them is content.
    - `timestamp` is in whole seconds since 1970, and is sent as `webhook-timestamp`.
    """
    head = f"{message_id}.{timestamp}.".encode()
    return " ".join(f"v1,{_encoded(secret, head, body)}" for secret in secrets)


def verify(
    secrets: Sequence[str],
    headers: Mapping[str, str] | Iterable[tuple[str, str]],
    body: bytes,
    *,
    now: float,
    tolerance: float = TOLERANCE,
) -> str:
    """Return the message's id, once one of its signatures was made with one of `secrets`.

    - InvalidSignature says which header is missing or wrong, or that the time is too far from
      `now`, in seconds since 1970. A time off by exactly `tolerance` is accepted.
    - `body` is what was received, byte for byte: JSON that was parsed and written anew differs.
    - Comparisons take the same time however much of a signature is right.
    """
    if not secrets:
        raise ValueError("verify needs a secret at least: without one anybody could have signed")
    message_id, stamp, signatures = _three(headers)
    timestamp = _seconds(stamp)
    if timestamp < now - tolerance:
        raise InvalidSignature(f"{TIMESTAMP} is too old: {now - timestamp:.0f} s before now")
    if timestamp > now + tolerance:
        raise InvalidSignature(f"{TIMESTAMP} is too new: {timestamp - now:.0f} s after now")
    # With the header's own text: another way to write the same number was not signed.
    head = f"{message_id}.{stamp}.".encode("utf-8", "surrogatepass")
    expected = [_encoded(secret, head, body).encode() for secret in secrets]
    given = [one[3:] for one in signatures.split(" ") if one.startswith("v1,")]
    matches = [
        hmac.compare_digest(right, one.encode("utf-8", "surrogatepass"))
        for one in given
        for right in expected
    ]
    if not any(matches):
        raise InvalidSignature(f"{SIGNATURE} holds no signature by a known secret")
    return message_id


def check_secret(text: str) -> None:
    """Raise ValueError unless `text` can sign; the message never holds it."""
    if not isinstance(text, str):
        raise TypeError(f"a secret must be a str, got {type(text).__name__}")
    right = f"{PREFIX!r} and the base64 of {FEWEST_BYTES} to {MOST_BYTES} random bytes"
    if not text.startswith(PREFIX):
        raise ValueError(f"a secret must be {right}; this one does not start with {PREFIX!r}")
    try:
        key = base64.b64decode(text.removeprefix(PREFIX).encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError(
            f"a secret must be {right}; what follows {PREFIX!r} is not base64"
        ) from None
    if not FEWEST_BYTES <= len(key) <= MOST_BYTES:
        raise ValueError(f"a secret must be {right}; this one has {len(key)} bytes")


def new_secret() -> str:
    """Return a new secret, by chance."""
    return PREFIX + base64.b64encode(randomness.token_bytes(NEW_BYTES)).decode()


def _encoded(secret: str, head: bytes, body: bytes) -> str:
    mac = _keyed(secret).copy()
    mac.update(head)
    mac.update(body)
    return binascii.b2a_base64(mac.digest(), newline=False).decode()


@lru_cache(maxsize=4096)
def _keyed(secret: str) -> hmac.HMAC:
    """Return the HMAC after its key: half of a short message's work, done once per secret."""
    check_secret(secret)
    return hmac.new(base64.b64decode(secret.removeprefix(PREFIX)), digestmod=hashlib.sha256)


def _three(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[str, str, str]:
    """Return id, timestamp and signatures; names count in upper and lower case alike."""
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


def _seconds(stamp: str) -> int:
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 15):
        raise InvalidSignature(f"{TIMESTAMP} must be whole seconds since 1970, got {stamp!r:.50}")
    return int(stamp)
