"""Targets: the addresses that calls may go to, so that no endpoint reaches the internal network.

Anybody who may configure a service chooses a URL that this process calls. Unless the operator
allows more, it must lead to a public address. The channel connects to exactly the addresses that
were checked: a name is resolved once, here. This host's own addresses count as private. A call to
this server's own API is always refused: its tasks could make more and more tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.clock import Clock, SystemClock
from tickwheel.durable.channels.http.addresses import (
    METADATA,
    METADATA_NAMES,
    IPAddress,
    IPNetwork,
    embedded_in,
    special_kind,
)
from tickwheel.durable.channels.http.lookups import HUNG_AFTER_SECONDS, MAX_NAMES, Lookups, is_own
from tickwheel.errors import TargetRefused
from tickwheel.http import Address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

CIDR = str | IPNetwork
Resolved = tuple[str, int]  # an address as text, and its family

MAX_URL_CHARACTERS = 2048
FRESH_SECONDS = 5.0  # use the addresses of a name this long without another lookup
STALE_SECONDS = 3600.0  # and this long afterwards, while no DNS server answers
Schemes = Mapping[str, int | None]  # and their usual ports
PORTS: Schemes = {"http": 80, "https": 443}
METADATA_SERVICE = "a cloud's metadata service"
ITSELF = "this server itself"
NEVER_ALLOWED = (METADATA_SERVICE, ITSELF)
LOOPBACKS = (ip_address("127.0.0.1"), ip_address("::1"))

_URL = re.compile(r"([a-z]+)://([^/?#]*)(?:[/?][^#]*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[^\[\]@]*\]|[^\[\]@:]*)(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label like this makes it an address
_AMBIGUOUS = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")  # URL parsers disagree about these


class CachedName(NamedTuple):
    """The permitted addresses of a name."""

    fresh_until: float
    addresses: list[Resolved]


class PendingLookup(NamedTuple):
    """A lookup under way."""

    started_at: float
    answer: asyncio.Task[list[Resolved]]


class Targets:
    """Decides which endpoints may be called, and resolves them to addresses.

    - It refuses all addresses that are not public, in any notation: loopback, private, link-local,
      reserved, multicast, IPv6 addresses with an embedded IPv4 address, and this host's own.
    - `allow_private` permits them all; `allow` permits networks, in CIDR notation or as objects of
      `ipaddress`. An IPv6 address with an embedded IPv4 address needs both to be permitted.
    - It always refuses the metadata services of clouds, and `own_port`, the port of this process's
      own API, on any address of this host.
    - It uses the permitted addresses of a name, and refuses a name without any.
    - It caches checked addresses for some seconds; concurrent requests for a name share one lookup.
    - While a later lookup hangs, or no DNS server answers it, the cached addresses stay in use for
      an hour. A DNS answer that the name is gone, or leads elsewhere, counts at once.
    """

    def __init__(
        self,
        allow_private: bool = False,
        allow: Sequence[CIDR] = (),
        *,
        own_port: int | None = None,
        lookup: Callable[[str, int], Awaitable[Iterable[tuple[Any, ...]]]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._allow_private = allow_private
        self._allow = tuple(map(network_of, allow))
        self._own_port = own_port
        self._lookup = lookup or Lookups()
        self._clock = clock or SystemClock()
        self._cache: dict[str, CachedName] = {}
        self._pending: dict[str, PendingLookup] = {}

    def check_endpoint(self, url: str) -> None:
        """Raise TargetRefused unless `url` may be an endpoint, as far as it shows without DNS.

        The message names the host, never the rest of the URL.
        """
        self.check_host(*authority_of(url))

    def check_host(self, host: str, port: int) -> None:
        """Raise TargetRefused unless a host may be called, as far as it shows without DNS."""
        host = normalize_host(host)
        literal = literal_of(host)
        if literal is not None:
            with contextlib.suppress(OSError):  # no file descriptor: the call checks it again
                self._check(literal, host, port)
        elif host == "localhost" or host.endswith(".localhost"):
            refused = [self._refusal(address, port) for address in LOOPBACKS]
            if all(refused):
                reason = with_hint(str(refused[0]))
                raise TargetRefused(f"{host} must not be called: it is {reason}")
        elif host in METADATA_NAMES:
            raise TargetRefused(f"{host} must not be called: it is {METADATA_SERVICE}")

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Return the permitted addresses of `host`, in the system's order.

        TargetRefused when it has addresses, but no permitted one; OSError when it has none.
        """
        host = normalize_host(host)
        literal = literal_of(host)
        if literal is not None:
            self._check(literal, host, port)
            family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
            return [Address(str(literal), port, family)]
        if host in METADATA_NAMES:
            raise TargetRefused(f"{host} must not be called: it is {METADATA_SERVICE}")
        addresses = [
            Address(address, port, family)
            for address, family in await self._resolve_name(host, port)
            if not self._is_own_api(ip_address(address), port)
        ]
        if not addresses:
            raise TargetRefused(f"{host} must not be called: it is {ITSELF}")
        return addresses

    async def _resolve_name(self, host: str, port: int) -> list[Resolved]:
        cached, now = self._cache.get(host), self._clock.time()
        if cached is not None and now < cached.fresh_until:
            return cached.addresses
        started_at, answer = self._shared_lookup(host, port)
        if cached is None or now >= cached.fresh_until + STALE_SECONDS:
            # A caller that is cancelled must not cancel the lookup for the others.
            return await asyncio.shield(answer)
        await asyncio.wait([answer], timeout=max(0.0, started_at + HUNG_AFTER_SECONDS - now))
        return cached.addresses if is_unanswered(answer) else answer.result()

    def _shared_lookup(self, host: str, port: int) -> PendingLookup:
        """Return the lookup of a name that is under way, or start one."""
        pending = self._pending.get(host)
        if pending is None:
            answer = asyncio.get_running_loop().create_task(self._look_up(host, port))
            self._pending[host] = pending = PendingLookup(self._clock.time(), answer)
            answer.add_done_callback(lambda answer: self._finish_lookup(host, answer))
        return pending

    def _finish_lookup(self, host: str, answer: asyncio.Task[list[Resolved]]) -> None:
        del self._pending[host]
        if answer.cancelled():
            return
        # This also retrieves the exception, in case every caller was cancelled.
        if answer.exception() is not None and not is_unanswered(answer):
            self._cache.pop(host, None)

    async def _look_up(self, host: str, port: int) -> list[Resolved]:
        permitted: dict[Resolved, None] = {}  # each once, in order
        refused: list[str] = []
        for family, _, _, _, sockaddr in await self._lookup(host, port):
            if family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = address_of(sockaddr)
            reason = "no plain address" if address is None else self._refusal(address)
            if reason is None:
                permitted[str(address), int(family)] = None
            else:
                refused.append(reason)
        if not permitted:
            if not refused:
                raise OSError(f"{host} has no address")
            # Without the address, which would reveal the internal network.
            reason = with_hint(refused[0])
            raise TargetRefused(f"{host} must not be called: its address is {reason}")
        addresses = list(permitted)
        self._store_in_cache(host, addresses)
        return addresses

    def _store_in_cache(self, host: str, addresses: list[Resolved]) -> None:
        self._cache.pop(host, None)
        if len(self._cache) >= MAX_NAMES:
            del self._cache[next(iter(self._cache))]  # the oldest
        self._cache[host] = CachedName(self._clock.time() + FRESH_SECONDS, addresses)

    def _check(self, address: IPAddress, host: str, port: int) -> None:
        reason = self._refusal(address, port)
        if reason is not None:
            raise TargetRefused(f"{host} must not be called: its address is {with_hint(reason)}")

    def _is_own_api(self, address: IPAddress, port: int | None) -> bool:
        """Return whether this server's own API listens there."""
        if port is None or port != self._own_port:
            return False
        return any(is_own(one) for one in (address, *embedded_in(address)))

    def _refusal(self, address: IPAddress, port: int | None = None) -> str | None:
        """Return the reason why an address is refused, or None when it is permitted."""
        embedded = embedded_in(address)
        if not METADATA.isdisjoint((address, *embedded)):
            return METADATA_SERVICE
        if self._is_own_api(address, port):
            return ITSELF
        if self._allow_private:
            return None
        reason = special_kind(address, embedded)
        if reason is None and is_own(address):
            reason = "this host's own"
        if reason is None or not any(address in network for network in self._allow):
            return reason
        # An allowed tunnel to IPv4 does not allow the addresses that it leads to.
        return next(filter(None, map(self._refusal, embedded)), None)


def is_unanswered(answer: asyncio.Task[list[Resolved]]) -> bool:
    """Return whether a lookup hangs, or failed because no DNS server answered."""
    if not answer.done():
        return True
    error = None if answer.cancelled() else answer.exception()
    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN


def network_of(cidr: CIDR) -> IPNetwork:
    """Parse a network or an address."""
    try:
        return ip_network(cidr)
    except ValueError as error:
        raise ValueError(
            f"a target to allow must be a network such as 10.1.0.0/16 or fd00::/8,"
            f" or one address: {error}"
        ) from None


def host_of(url: str) -> str:
    """Return the host of an endpoint, normalized; TargetRefused for an invalid endpoint."""
    return authority_of(url)[0]


def authority_of(url: str, schemes: Schemes = PORTS) -> tuple[str, int]:
    """Return an endpoint's host, normalized, and port; TargetRefused for an invalid endpoint."""
    if not isinstance(url, str):
        raise TypeError(f"an endpoint must be a str, got {type(url).__name__}")
    if len(url) > MAX_URL_CHARACTERS:
        raise TargetRefused(
            f"an endpoint may have {MAX_URL_CHARACTERS} characters, this one has {len(url)}"
        )
    if _AMBIGUOUS.search(url):
        raise TargetRefused(
            "an endpoint must have no spaces, control characters, backslashes or lone surrogates"
        )
    if "#" in url:
        raise TargetRefused("an endpoint must have no fragment: it would not be sent")
    whole = _URL.fullmatch(url)
    if whole is None or whole[1].lower() not in schemes:
        starts = " or ".join(f"{scheme}://" for scheme in schemes)
        raise TargetRefused(
            f"an endpoint must start with {starts}, and a host;"
            " for another scheme the service needs its protocol"
        )
    if "@" in whole[2]:
        raise TargetRefused("an endpoint must have no user or password: use a header")
    parts = _AUTHORITY.fullmatch(whole[2])
    if parts is None or not parts[1]:
        raise TargetRefused("an endpoint must have a host, and after it at most a port")
    bracketed = parts[1].startswith("[")
    host = normalize_host(parts[1])
    if bracketed != (":" in host):
        raise TargetRefused("an endpoint must have an IPv6 address, and nothing else, in brackets")
    literal_of(host)
    return host, port_of(host, schemes[whole[1].lower()], parts[2])


def port_of(host: str, usual: int | None, given: str | None) -> int:
    """Return the port of an endpoint: the one that is given, or the usual one of its scheme."""
    port = usual if given is None else int(given)
    if port is None:
        raise TargetRefused(f"{host}: an endpoint of this scheme must have a port")
    if not 1 <= port <= 65535:
        raise TargetRefused(f"{host}: the port must be from 1 to 65535, got {given}")
    return port


def normalize_host(host: str) -> str:
    """Return a host for comparisons and lookups: ASCII, lower case, no brackets, no last dot.

    Circled and full-width letters and digits become plain ones, as in a DNS resolver.
    """
    name = host.removeprefix("[").removesuffix("]")
    try:
        if not name.isascii():
            name = name.encode("idna").decode("ascii")
    except UnicodeError:
        raise TargetRefused(f"{name!r:.100} is not the name of a host") from None
    name = name.lower()
    if ":" in name:
        return name
    name = name.removesuffix(".")
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise TargetRefused(f"{name!r:.100} is not the name of a host")
    return name


def literal_of(host: str) -> IPAddress | None:
    """Return the address that a normalized host denotes, in any notation; None for a name."""
    if ":" in host:
        try:
            address = IPv6Address(host)
        except ValueError:
            raise TargetRefused(f"{host!r:.100} is not an IPv6 address") from None
        if address.scope_id is not None:
            raise TargetRefused(f"{host!r:.100} must not be called: it has a scope")
        return address
    if not _NUMBER.fullmatch(host.rpartition(".")[2]):
        return None
    try:
        # As in C: 127.1, 0177.0.0.1, 0x7f000001 and 2130706433 are the same address.
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        raise TargetRefused(f"{host!r:.100} is not an IPv4 address") from None


def address_of(sockaddr: tuple[Any, ...]) -> IPAddress | None:
    """Return the address of a lookup's result; None for one with a scope, valid on one link."""
    if len(sockaddr) == 4 and sockaddr[3]:
        return None
    address = ip_address(sockaddr[0])
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return None
    return address


def with_hint(reason: str) -> str:
    """Return the reason of a refusal, with the options that would allow it, if any."""
    if reason in NEVER_ALLOWED:
        return reason
    return f"{reason} (see --allow-private-targets and --allow-target, or a Scheduler's options)"
