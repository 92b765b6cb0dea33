"""The vault: secrets sealed before they are stored, with keys that only the processes have.

A sealed secret is bound to its owner: copied to another one's row, it does not open. Without a key
secrets are stored as they are, and a warning says so. Messages never show a secret.
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
UNBOUND = "sealed:"  # by version 0.1.0 before its release: opening it would undo the binding
PLAIN = "plain:"
LEAST = 16  # characters of a key


class Vault:
    """Seals with the first of its keys, opens with any of them: so keys can be changed.

    - `keys`: one or several, by commas; each any text of 16 characters or more.
    """

    def __init__(self, keys: str | None = None) -> None:
        texts = [text.strip() for text in (keys or "").split(",") if text.strip()]
        if any(len(text) < LEAST for text in texts):
            raise ValueError(f"a secret key must have {LEAST} characters at least")
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
        """Return a text to store for a secret; `owner` names the one place where it belongs."""
        if self._seal is None:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "secrets are stored as they are: to have them sealed, set TICKWHEEL_SECRET_KEY"
                    " for the server, or give a Scheduler its secret_key="
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
                " service: put the service with its secret and its headers given again"
            )
        if not text.startswith(SEALED):
            raise ValueError("a stored secret is neither sealed nor plain: it has been damaged")
        key_id, _, sealed = text.removeprefix(SEALED).partition(":")
        if key_id not in self._keys:
            raise ValueError(
                f"a stored secret was sealed with the key {key_id!r:.20}, which"
                " TICKWHEEL_SECRET_KEY does not have"
            )
        try:
            data = base64.b64decode(sealed, validate=True)
            return self._keys[key_id](data[:12], data[12:], owner.encode()).decode()
        except (binascii.Error, ValueError):
            pass
        except Exception as error:
            if type(error).__name__ != "InvalidTag":
                raise
        raise ValueError(
            f"a stored secret, sealed with the key {key_id!r}, has been damaged, or was sealed for"
            " another service, header or origin"
        )
