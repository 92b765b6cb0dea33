"""The servers that a store's URL names, and which of them accepts writes.

After a fail-over another server is the primary. A new connection goes to the first server that
accepts writes, beginning with the one that was connected last. Each server has its own part of the
time for connecting: the driver has one timeout for all of them, and a host that was switched off
would use it up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlunsplit

import asyncpg  # type: ignore[import-untyped]

from tickwheel.errors import StoreUnavailable
from tickwheel.values.store_url import split_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.durable.stores.postgres.session import Address


class Hosts:
    """The servers of an address, which messages call `where`.

    Servers given as `?host=one,other` share one timeout. `options` are the driver's.
    """

    def __init__(
        self, address: Address, where: str, options: Mapping[str, Any] | None = None
    ) -> None:
        self._where = where
        parts = split_url(address.url)
        user, at, names = parts.netloc.rpartition("@")
        self._names = names.split(",")
        self._urls = [
            urlunsplit(parts._replace(netloc=f"{user}{at}{name}")) for name in self._names
        ]
        self._first = 0  # the server to try first
        self._options = {"target_session_attrs": address.target, **(options or {})}
        if "application_name=" not in parts.query:
            self._options["server_settings"] = {"application_name": "tickwheel"}

    async def connect(self, seconds: float) -> Any:
        """Return a connection to the first server that accepts one, within `seconds`."""
        count, first = len(self._urls), self._first
        reasons = []
        for place in [*range(first, count), *range(first)]:
            try:
                connection = await asyncpg.connect(
                    self._urls[place], timeout=seconds / count, **self._options
                )
            except asyncpg.ClientConfigurationError as error:
                raise ValueError(f"the URL of {self._where} cannot be used: {error}") from error
            except BaseException as error:
                if self._first == place:  # even if cancelled: it may not have answered
                    self._first = (place + 1) % count
                if not isinstance(error, Exception):
                    raise
                reasons.append((self._names[place], error))
            else:
                self._first = place
                return connection
        said = [f"{name}: {reason_of(error)}" for name, error in reasons]
        text = "; ".join(said) if count > 1 else reason_of(reasons[0][1])
        raise StoreUnavailable(f"cannot connect to {self._where}: {text}") from reasons[-1][1]


def reason_of(error: Exception) -> str:
    """Return why a connection could not be opened."""
    text = str(error) or type(error).__name__
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "it accepts no writes: it is a standby, or read-only by a setting"
    if "unsupported startup parameter" in text:
        text += "; this is PgBouncer: take the parameter out of the URL, or let it ignore that one"
    return text
