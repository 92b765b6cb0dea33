"""Targets: which addresses a call may go to, so that no endpoint leads into the network within.

Whoever may configure a service chooses a URL that this process will call. Unless the operator has
allowed more, it must lead to a public address, and what was checked is what is connected to: a
name is looked up once, here, and the connection goes to the addresses that this gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.clock import Clock, SystemClock
from tickwheel.errors import TargetRefused
from tickwheel.http import Address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network
CIDR = str | IPv4Network | IPv6Network
Found = tuple[str, int]  # an address as text, and its family

MAX_URL = 2048
KEEP_SECONDS = 5.0  # that what a name led to is used without a look
LAST_KNOWN_SECONDS = 3600.0  # that it is used after that, while no server of names answers
KEEP_NAMES = 1024
PROMPT_SECONDS = 1.0  # a lookup that takes longer counts as hung
PROMPT = 64  # lookups at the same time
HUNG = 192  # and hung ones beside them

# Not left to `ipaddress`, whose opinion of what is private differs from one Python to the next.
SPECIAL: tuple[tuple[IPNetwork, str], ...] = tuple(
    (ip_network(network), what)
    for network, what in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by a carrier's customers"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "for documentation"),
        ("192.88.99.0/24", "a 6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "for benchmarks"),
        ("198.51.100.0/24", "for documentation"),
        ("203.0.113.0/24", "for documentation"),
        ("224.0.0.0/4", "multicast"),
        ("255.255.255.255/32", "broadcast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::/96", "an IPv4 address in disguise"),
        ("::ffff:0:0/96", "an IPv4 address in disguise"),
        ("::ffff:0:0:0/96", "an IPv4 address in disguise"),
        ("64:ff9b::/96", "an IPv4 address behind NAT64"),
        ("64:ff9b:1::/48", "an IPv4 address behind NAT64"),
        ("2001::/32", "an IPv4 address behind Teredo"),
        ("2001:2::/48", "for benchmarks"),
        ("2001::/23", "reserved"),
        ("2001:db8::/32", "for documentation"),
        ("2002::/16", "an IPv4 address behind 6to4"),
        ("3fff::/20", "for documentation"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
)
GLOBAL_UNICAST = ip_network("2000::/3")  # all else of IPv6 is not given out
LOOPBACKS = (ip_address("127.0.0.1"), ip_address("::1"))

# What a cloud tells a machine about itself, credentials among it: whoever asks from here gets it.
METADATA = frozenset(
    map(
        ip_address,
        (
            "169.254.169.254",
            "169.254.170.2",
            "169.254.170.23",
            "169.254.0.23",
            "169.254.42.42",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "fe80::a9fe:a9fe",
        ),
    )
)
METADATA_NAMES = frozenset(
    {
        "instance-data.ec2.internal",
        "metadata.goog",
        "metadata.google.internal",
        "metadata.tencentyun.com",
    }
)

_URL = re.compile(r"(?:https?)://([^/?#]*)(?:[/?][^#]*)?", re.IGNORECASE)
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
      link-local, reserved, multicast, and IPv6 addresses with an IPv4 address inside.
    - `allow_private` permits them all; `allow` permits networks, in CIDR notation or as objects of
      `ipaddress`. An IPv6 address with an IPv4 address inside needs both to be permitted.
    - The metadata services of clouds are refused whatever is allowed.
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
        lookup: Callable[[str, int], Awaitable[Iterable[tuple[Any, ...]]]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._allow_private = allow_private
        self._allow = tuple(map(network_of, allow))
        self._lookup = lookup or Lookups()
        self._clock = clock or SystemClock()
        self._kept: dict[str, Kept] = {}
        self._asked: dict[str, Asked] = {}

    def check_endpoint(self, url: str) -> None:
        """Raise TargetRefused unless `url` may be an endpoint, as far as can be seen without DNS.

        The message names the host, never the rest of the URL.
        """
        host = host_of(url)
        literal = literal_of(host)
        if literal is not None:
            self._check(literal, host)
        elif host == "localhost" or host.endswith(".localhost"):
            if not any(self._refusal(address) is None for address in LOOPBACKS):
                raise TargetRefused(f"{host} must not be called: it is {hinted('loopback')}")
        elif host in METADATA_NAMES:
            raise TargetRefused(f"{host} must not be called: it is a cloud's metadata service")

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Return the addresses of `host` that may be connected to, in the system's order.

        TargetRefused when there are some, and none is permitted; OSError when there are none.
        """
        host = normal(host)
        literal = literal_of(host)
        if literal is not None:
            self._check(literal, host)
            family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
            return [Address(str(literal), port, family)]
        if host in METADATA_NAMES:
            raise TargetRefused(f"{host} must not be called: it is a cloud's metadata service")
        found = await self._found(host, port)
        return [Address(address, port, family) for address, family in found]

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

    def _check(self, address: IPAddress, host: str) -> None:
        why = self._refusal(address)
        if why is not None:
            raise TargetRefused(f"{host} must not be called: its address is {hinted(why)}")

    def _refusal(self, address: IPAddress) -> str | None:
        """Return why an address is refused, or None when it is permitted."""
        inside = embedded_in(address)
        if not METADATA.isdisjoint((address, *inside)):
            return "a cloud's metadata service"
        if self._allow_private:
            return None
        why = special(address, inside)
        if why is None or not any(address in network for network in self._allow):
            return why
        # That a way to IPv4 is allowed says nothing of where it leads.
        return next(filter(None, map(self._refusal, inside)), None)


class Lookups:
    """Asks the system for the addresses of names, each on a thread that keeps no process alive.

    - At most `PROMPT` at once, for a lookup cannot be stopped. One that hangs makes room for
      others, until `HUNG` of them do.
    - A name whose last lookup hung is looked up among the hung ones: names that no server answers
      for hold up no others.
    - For one event loop.
    """

    def __init__(self) -> None:
        self._prompt = asyncio.Semaphore(PROMPT)
        self._hung = asyncio.Semaphore(HUNG)
        self._slow: dict[str, None] = {}  # names whose last lookup hung, the oldest first

    async def __call__(self, host: str, port: int) -> Iterable[tuple[Any, ...]]:
        """Return what getaddrinfo does."""
        place = self._hung if host in self._slow else self._prompt
        await place.acquire()
        try:
            answer = on_a_thread(host, port)
            await asyncio.wait([answer], timeout=PROMPT_SECONDS)
            self._note(host, slow=not answer.done())
            if not answer.done() and place is self._prompt and not self._hung.locked():
                await self._hung.acquire()  # at once, as it is not locked
                place.release()
                place = self._hung
            return await answer
        finally:
            place.release()

    def _note(self, host: str, slow: bool) -> None:
        self._slow.pop(host, None)
        if slow:
            if len(self._slow) >= KEEP_NAMES:
                del self._slow[next(iter(self._slow))]
            self._slow[host] = None


def on_a_thread(host: str, port: int) -> asyncio.Future[list[tuple[Any, ...]]]:
    """Look a name up on a daemon thread: an executor's are waited for when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[tuple[Any, ...]]] = loop.create_future()

    def ask() -> None:
        answer: list[tuple[Any, ...]] | Exception
        try:
            answer = [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except Exception as error:  # noqa: BLE001
            answer = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, answer)

    def tell(answer: list[tuple[Any, ...]] | Exception) -> None:
        if future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    threading.Thread(target=ask, name="tickwheel-lookup", daemon=True).start()
    return future


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
    if "@" in whole[1]:
        raise TargetRefused("an endpoint must have no user or password: use a header")
    parts = _AUTHORITY.fullmatch(whole[1])
    if parts is None or not parts[1]:
        raise TargetRefused("an endpoint must have a host, and after it at most a port")
    bracketed = parts[1].startswith("[")
    host = normal(parts[1])
    if bracketed != (":" in host):
        raise TargetRefused("an endpoint must have an IPv6 address, and nothing else, in brackets")
    if parts[2] is not None and not 1 <= int(parts[2]) <= 65535:
        raise TargetRefused(f"{host}: the port must be from 1 to 65535, got {parts[2]}")
    literal_of(host)
    return host


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


def special(address: IPAddress, inside: tuple[IPv4Address, ...]) -> str | None:
    """Return what is special about an address that is not public, None about one that is."""
    for network, what in SPECIAL:
        if address in network:
            return what
    if inside:
        return "an IPv4 address behind ISATAP"
    return None if address.version == 4 or address in GLOBAL_UNICAST else "reserved"


def embedded_in(address: IPAddress) -> tuple[IPv4Address, ...]:
    """Return the IPv4 addresses that an IPv6 address may lead to, by any of the known ways."""
    if isinstance(address, IPv4Address):
        return ()
    number = int(address)
    low = IPv4Address(number & 0xFFFFFFFF)
    if number >> 32 in (0, 0xFFFF, 0xFFFF0000, 0x64FF9B << 64):
        return () if number <= 1 else (low,)  # :: and ::1 are what they are
    if number >> 80 == 0x64FF9B0001:
        return nat64(number)
    if number >> 112 == 0x2002:
        return (IPv4Address(number >> 80 & 0xFFFFFFFF),)
    if number >> 96 == 0x20010000:  # the server's, and the client's with all bits turned
        return IPv4Address(number >> 64 & 0xFFFFFFFF), IPv4Address(~number & 0xFFFFFFFF)
    if number >> 32 & 0xFDFFFFFF == 0x5EFE:
        return (low,)
    return ()


def nat64(number: int) -> tuple[IPv4Address, ...]:
    """Return what an address of the local NAT64 prefix may lead to.

    The prefix may have 48, 56, 64 or 96 bits, and bits 64 to 71 are skipped (RFC 6052): which it is
    cannot be seen, so that each counts, save those that only zeros make.
    """
    upper, lower = number >> 64, number & (1 << 56) - 1
    found = {
        (upper & 0xFFFF) << 16 | lower >> 40,
        (upper & 0xFF) << 24 | lower >> 32,
        lower >> 24,
        number & 0xFFFFFFFF,
    }
    return tuple(IPv4Address(one) for one in sorted(found) if one >> 24) or (IPv4Address(0),)


def hinted(why: str) -> str:
    """Return why an address is refused, and how it could be allowed where it could."""
    if "metadata" in why:
        return why
    return f"{why} (see --allow-private-targets and --allow-target, or a Scheduler's options)"
