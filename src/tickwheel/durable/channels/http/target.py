"""Targets: which addresses a call may go to, so that no endpoint leads into the network within.

Whoever may configure a service chooses a URL that this process will call. Unless the operator has
allowed more, it must lead to a public address, and what was checked is what is connected to: a
name is looked up once, here, and the connection goes to the addresses that this gave. This host's
own addresses count as private, and this server's own API is never called: its tasks could make ever
more tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.clock import Clock, SystemClock
from tickwheel.durable.channels.http.addresses import (
    METADATA,
    METADATA_NAMES,
    IPAddress,
    IPNetwork,
    embedded_in,
    special,
)
from tickwheel.durable.channels.http.lookups import KEEP_NAMES, PROMPT_SECONDS, Lookups, is_own
from tickwheel.errors import TargetRefused
from tickwheel.http import Address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

CIDR = str | IPNetwork
Found = tuple[str, int]  # an address as text, and its family

MAX_URL = 2048
KEEP_SECONDS = 5.0  # that what a name led to is used without a look
LAST_KNOWN_SECONDS = 3600.0  # that it is used after that, while no server of names answers
PORTS = {"http": 80, "https": 443}
METADATA_SERVICE = "a cloud's metadata service"
ITSELF = "this server itself"
NEVER_ALLOWED = (METADATA_SERVICE, ITSELF)
LOOPBACKS = (ip_address("127.0.0.1"), ip_address("::1"))

_URL = re.compile(r"(https?)://([^/?#]*)(?:[/?][^#]*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[^\[\]@]*\]|[^\[\]@:]*)(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label like this makes it an address
_UNCLEAN = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")  # what parsers of URLs disagree about


class Kept(NamedTuple):
    """What a name led to."""

    fresh_until: float
    found: list[Found]


class Asked(NamedTuple):
    """A lookup that is under way."""

    begun_at: float
    answer: asyncio.Task[list[Found]]


class Targets:
    """Says which endpoints may be called, and finds the addresses to connect to.

    - Refused are all addresses that are not public, however they are written: loopback, private,
      link-local, reserved, multicast, IPv6 addresses with an IPv4 address inside, and this host's
      own.
    - `allow_private` permits them all; `allow` permits networks, in CIDR notation or as objects of
      `ipaddress`. An IPv6 address with an IPv4 address inside needs both to be permitted.
    - The metadata services of clouds are refused whatever is allowed, and so is `own_port`, the
      port of this process's own API, on any address of this host.
    - Of a name's addresses the permitted ones are used; without one the name is refused.
    - A name's addresses are remembered for some seconds, once checked, and whoever asks for the
      same name meanwhile shares one lookup.
    - While a later lookup hangs, or no server of names answers it, the addresses that were checked
      last are used, for an hour. One that says that the name is gone, or leads elsewhere, counts.
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
        self._kept: dict[str, Kept] = {}
        self._asked: dict[str, Asked] = {}

    def check_endpoint(self, url: str) -> None:
        """Raise TargetRefused unless `url` may be an endpoint, as far as can be seen without DNS.

        The message names the host, never the rest of the URL.
        """
        host, port = authority_of(url)
        literal = literal_of(host)
        if literal is not None:
            with contextlib.suppress(OSError):  # without a descriptor: it is checked when called
                self._check(literal, host, port)
        elif host == "localhost" or host.endswith(".localhost"):
            refused = [self._refusal(address, port) for address in LOOPBACKS]
            if all(refused):
                raise TargetRefused(f"{host} must not be called: it is {hinted(str(refused[0]))}")
        elif host in METADATA_NAMES:
            raise TargetRefused(f"{host} must not be called: it is {METADATA_SERVICE}")

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Return the addresses of `host` that may be connected to, in the system's order.

        TargetRefused when there are some, and none is permitted; OSError when there are none.
        """
        host = normal(host)
        literal = literal_of(host)
        if literal is not None:
            self._check(literal, host, port)
            family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
            return [Address(str(literal), port, family)]
        if host in METADATA_NAMES:
            raise TargetRefused(f"{host} must not be called: it is {METADATA_SERVICE}")
        addresses = [
            Address(address, port, family)
            for address, family in await self._found(host, port)
            if not self._is_itself(ip_address(address), port)
        ]
        if not addresses:
            raise TargetRefused(f"{host} must not be called: it is {ITSELF}")
        return addresses

    async def _found(self, host: str, port: int) -> list[Found]:
        kept, now = self._kept.get(host), self._clock.time()
        if kept is not None and now < kept.fresh_until:
            return kept.found
        begun_at, answer = self._asked_once(host, port)
        if kept is None or now >= kept.fresh_until + LAST_KNOWN_SECONDS:
            # One that gives up waiting must not end it for the others.
            return await asyncio.shield(answer)
        await asyncio.wait([answer], timeout=max(0.0, begun_at + PROMPT_SECONDS - now))
        return kept.found if is_unanswered(answer) else answer.result()

    def _asked_once(self, host: str, port: int) -> Asked:
        """Look the name up, unless that is under way."""
        asked = self._asked.get(host)
        if asked is None:
            answer = asyncio.get_running_loop().create_task(self._look_up(host, port))
            self._asked[host] = asked = Asked(self._clock.time(), answer)
            answer.add_done_callback(lambda answer: self._answered(host, answer))
        return asked

    def _answered(self, host: str, answer: asyncio.Task[list[Found]]) -> None:
        del self._asked[host]
        if answer.cancelled():
            return
        # The exception is seen thereby, should all who waited for it have given up.
        if answer.exception() is not None and not is_unanswered(answer):
            self._kept.pop(host, None)

    async def _look_up(self, host: str, port: int) -> list[Found]:
        permitted: dict[Found, None] = {}  # each once, in order
        refused: list[str] = []
        for family, _, _, _, sockaddr in await self._lookup(host, port):
            if family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = address_of(sockaddr)
            why = "no plain address" if address is None else self._refusal(address)
            if why is None:
                permitted[str(address), int(family)] = None
            else:
                refused.append(why)
        if not permitted:
            if not refused:
                raise OSError(f"{host} has no address")
            # Which one is not said: it would tell a stranger about the network within.
            raise TargetRefused(f"{host} must not be called: its address is {hinted(refused[0])}")
        found = list(permitted)
        self._keep(host, found)
        return found

    def _keep(self, host: str, found: list[Found]) -> None:
        self._kept.pop(host, None)
        if len(self._kept) >= KEEP_NAMES:
            del self._kept[next(iter(self._kept))]  # the oldest
        self._kept[host] = Kept(self._clock.time() + KEEP_SECONDS, found)

    def _check(self, address: IPAddress, host: str, port: int) -> None:
        why = self._refusal(address, port)
        if why is not None:
            raise TargetRefused(f"{host} must not be called: its address is {hinted(why)}")

    def _is_itself(self, address: IPAddress, port: int | None) -> bool:
        """Say whether this server's own API is there."""
        if port is None or port != self._own_port:
            return False
        return any(is_own(one) for one in (address, *embedded_in(address)))

    def _refusal(self, address: IPAddress, port: int | None = None) -> str | None:
        """Return why an address is refused, or None when it is permitted."""
        inside = embedded_in(address)
        if not METADATA.isdisjoint((address, *inside)):
            return METADATA_SERVICE
        if self._is_itself(address, port):
            return ITSELF
        if self._allow_private:
            return None
        why = special(address, inside)
        if why is None and is_own(address):
            why = "this host's own"
        if why is None or not any(address in network for network in self._allow):
            return why
        # That a way to IPv4 is allowed says nothing of where it leads.
        return next(filter(None, map(self._refusal, inside)), None)


def is_unanswered(answer: asyncio.Task[list[Found]]) -> bool:
    """Say whether a lookup hangs, or ended because no server of names answered."""
    if not answer.done():
        return True
    error = None if answer.cancelled() else answer.exception()
    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN


def network_of(cidr: CIDR) -> IPNetwork:
    """Return a network as an object; ValueError says what would be right."""
    try:
        return ip_network(cidr)
    except ValueError as error:
        raise ValueError(
            f"a target to allow must be a network such as 10.1.0.0/16 or fd00::/8, "
            f"or one address: {error}"
        ) from None


def host_of(url: str) -> str:
    """Return the host of an endpoint, normalised; TargetRefused when it is none to call."""
    return authority_of(url)[0]


def authority_of(url: str) -> tuple[str, int]:
    """Return an endpoint's host, normalised, and port; TargetRefused when it is none to call."""
    if not isinstance(url, str):
        raise TypeError(f"an endpoint must be a str, got {type(url).__name__}")
    if len(url) > MAX_URL:
        raise TargetRefused(f"an endpoint may have {MAX_URL} characters, this one has {len(url)}")
    if _UNCLEAN.search(url):
        raise TargetRefused(
            "an endpoint must have no spaces, control characters, backslashes or half characters"
        )
    if "#" in url:
        raise TargetRefused("an endpoint must have no fragment: it would not be sent")
    whole = _URL.fullmatch(url)
    if whole is None:
        raise TargetRefused("an endpoint must start with http:// or https://, and a host")
    if "@" in whole[2]:
        raise TargetRefused("an endpoint must have no user or password: use a header")
    parts = _AUTHORITY.fullmatch(whole[2])
    if parts is None or not parts[1]:
        raise TargetRefused("an endpoint must have a host, and after it at most a port")
    bracketed = parts[1].startswith("[")
    host = normal(parts[1])
    if bracketed != (":" in host):
        raise TargetRefused("an endpoint must have an IPv6 address, and nothing else, in brackets")
    port = PORTS[whole[1].lower()] if parts[2] is None else int(parts[2])
    if not 1 <= port <= 65535:
        raise TargetRefused(f"{host}: the port must be from 1 to 65535, got {parts[2]}")
    literal_of(host)
    return host, port


def normal(host: str) -> str:
    """Return a host as it is compared and looked up: ASCII, lower case, no brackets, no last dot.

    Letters and digits in circles or of another width become plain ones, as a resolver has it.
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
    """Return the address that a normalised host is, however it is written; None for a name."""
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
        # As C has it: 127.1, 0177.0.0.1, 0x7f000001 and 2130706433 are the same address.
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        raise TargetRefused(f"{host!r:.100} is not an IPv4 address") from None


def address_of(sockaddr: tuple[Any, ...]) -> IPAddress | None:
    """Return the address that a lookup gave; None for one that counts on one link only."""
    if len(sockaddr) == 4 and sockaddr[3]:
        return None
    address = ip_address(sockaddr[0])
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return None
    return address


def hinted(why: str) -> str:
    """Return why an address is refused, and how it could be allowed where it could."""
    if why in NEVER_ALLOWED:
        return why
    return f"{why} (see --allow-private-targets and --allow-target, or a Scheduler's options)"
