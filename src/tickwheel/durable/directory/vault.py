"""The vault: it encrypts secrets before they are stored, with keys that only the processes have.

A sealed secret is bound to its owner: copied to another row, it does not open. Without a key the
vault stores secrets in plain text, and logs a warning. No message shows a secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from typing import TYPE_CHECKING

from tickwheel.durable.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

SEALED = "bound:"
UNBOUND = "sealed:"  # from before the release of 0.1.0; opening it would undo the binding
PLAIN = "plain:"
MIN_KEY_CHARACTERS = 16


class Vault:
    """Seals with the first of its keys and opens with any of them, so that keys can be rotated.

    - `keys`: one key, or several separated by commas; each has at least 16 characters.
    """

    def __init__(self, keys: str | None = None) -> None:
        texts = [text.strip() for text in (keys or "").split(",") if text.strip()]
        shortest = min(map(len, texts), default=MIN_KEY_CHARACTERS)
        if shortest < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"a secret key must have at least {MIN_KEY_CHARACTERS} characters, got {shortest}"
            )
        self._keys: dict[str, Callable[[bytes, bytes, bytes], bytes]] = {}
        self._seal: Callable[[bytes, bytes, bytes], bytes] | None = None
        self._first = ""
        self._warned = False
        for text in reversed(texts):
            self._add(text)

    def _add(self, text: str) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
        except ImportError as missing:
            raise ImportError(
                f"{missing}; to seal secrets: pip install 'tickwheel[server]'"
            ) from missing

        key = hashlib.scrypt(text.encode(), salt=b"tickwheel secret", n=2**14, r=8, p=1, dklen=32)
        cipher = AESGCM(key)
        self._first = hashlib.sha256(b"tickwheel key id" + key).hexdigest()[:8]
        self._keys[self._first] = cipher.decrypt
        self._seal = cipher.encrypt

    def seal(self, secret: str, owner: str) -> str:
        """Return the text to store for a secret; it opens only for the same `owner`."""
        if self._seal is None:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "secrets are stored in plain text: to encrypt them, set TICKWHEEL_SECRET_KEY"
                    " for the server, or pass secret_key= to the Scheduler"
                )
            return PLAIN + secret
        nonce = os.urandom(12)
        sealed = nonce + self._seal(nonce, secret.encode(), owner.encode())
        return f"{SEALED}{self._first}:{base64.b64encode(sealed).decode()}"

    def open(self, text: str, owner: str) -> str:
        """Return the secret that was sealed for `owner`; ValueError when it does not open."""
        if text.startswith(PLAIN):
            return text.removeprefix(PLAIN)
        if text.startswith(UNBOUND):
            raise ValueError(
                "a stored secret was sealed by an earlier version, which did not bind it to its"
                " service: put the service again, with its secret and its headers"
            )
        if not text.startswith(SEALED):
            raise ValueError("a stored secret is neither sealed nor plain: it is damaged")
        key_id, _, sealed = text.removeprefix(SEALED).partition(":")
        if key_id not in self._keys:
            why = "which TICKWHEEL_SECRET_KEY does not have"
            if not self._keys:
                why = "and TICKWHEEL_SECRET_KEY is not set in this environment"
            raise ValueError(f"a stored secret was sealed with the key {key_id!r:.20}, {why}")
        try:
            data = base64.b64decode(sealed, validate=True)
            return self._keys[key_id](data[:12], data[12:], owner.encode()).decode()
        except (binascii.Error, ValueError):
            pass
        except Exception as error:
            if type(error).__name__ != "InvalidTag":
                raise
        raise ValueError(
            f"a stored secret, sealed with the key {key_id!r}, is damaged, or was sealed for"
            " another service, header or origin"
        )
