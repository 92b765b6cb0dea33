"""Questions to the operating system: DNS lookups, and which addresses are this host's own.

A lookup may hang, and cannot be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Any

from tickwheel.http.connect import NO_ROOM

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.durable.channels.http.addresses import IPAddress

MAX_NAMES = 1024  # that the process remembers something about
HUNG_AFTER_SECONDS = 1.0  # a lookup that takes longer counts as hung
MAX_PROMPT_LOOKUPS = 64  # under way at once
MAX_HUNG_LOOKUPS = 192  # hanging at once, in addition
UNASSIGNED: dict[int, IPAddress] = {  # by version; no host has these addresses
    4: IPv4Address("255.255.255.254"),
    6: IPv6Address("2001:db8:ffff::ffff"),
}


class Lookups:
    """Resolves names, each lookup in a daemon thread.

    - At most `MAX_PROMPT_LOOKUPS` run at once, since a lookup cannot be stopped. A lookup that
      hangs frees its slot for others, until `MAX_HUNG_LOOKUPS` hang. Where file descriptors are
      scarce, `limit` bounds both together, in the same proportion.
    - A name whose last lookup hung uses a slot for hung lookups: a name that no DNS server answers
      delays no other.
    - An object serves one event loop.
    """

    def __init__(self, limit: int | None = None) -> None:
        total = MAX_PROMPT_LOOKUPS + MAX_HUNG_LOOKUPS
        limit = total if limit is None else limit
        prompt = max(1, limit * MAX_PROMPT_LOOKUPS // total)
        self._prompt_slots = asyncio.Semaphore(prompt)
        self._hung_slots = asyncio.Semaphore(max(1, limit - prompt))
        self._slow: dict[str, None] = {}  # names whose last lookup hung, the oldest first

    async def __call__(self, host: str, port: int) -> Iterable[tuple[Any, ...]]:
        """Return the result of getaddrinfo."""
        slots = self._hung_slots if host in self._slow else self._prompt_slots
        await slots.acquire()
        try:
            answer = look_up(host, port)
            await asyncio.wait([answer], timeout=HUNG_AFTER_SECONDS)
            hangs = not answer.done()
            self._remember(host, slow=hangs)
            if hangs and slots is self._prompt_slots and not self._hung_slots.locked():
                await self._hung_slots.acquire()  # does not wait, as it is not locked
                slots.release()
                slots = self._hung_slots
            return await answer
        finally:
            slots.release()

    def _remember(self, host: str, slow: bool) -> None:
        self._slow.pop(host, None)
        if slow:
            if len(self._slow) >= MAX_NAMES:
                del self._slow[next(iter(self._slow))]
            self._slow[host] = None


def look_up(host: str, port: int) -> asyncio.Future[list[tuple[Any, ...]]]:
    """Look a name up in a daemon thread: an executor's threads delay the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[tuple[Any, ...]]] = loop.create_future()

    def resolve() -> None:
        answer: list[tuple[Any, ...]] | Exception
        try:
            answer = [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except Exception as error:  # noqa: BLE001
            answer = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(settle, answer)

    def settle(answer: list[tuple[Any, ...]] | Exception) -> None:
        if future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    threading.Thread(target=resolve, name="tickwheel-lookup", daemon=True).start()
    return future


def is_own(address: IPAddress) -> bool:
    """Return whether an address is this host's own: a socket binds only to such addresses.

    Some hosts allow a socket to bind to any address (`ip_nonlocal_bind`). There, an address is
    the host's own if packets to it would also come from it.
    """
    if address.is_loopback or address.is_unspecified:
        return True
    if not can_bind(address):
        return False
    return not can_bind(UNASSIGNED[address.version]) or source_to(address) == str(address)


def can_bind(address: IPAddress) -> bool:
    """Return whether a socket can bind to an address; OSError without a file descriptor."""
    try:
        with datagram_socket(address) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        return False
    return True


def source_to(address: IPAddress) -> str | None:
    """Return the source address of packets to `address`; None without a route."""
    try:
        with datagram_socket(address) as probe:
            probe.connect((str(address), 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def datagram_socket(address: IPAddress) -> socket.socket:
    """Return a socket of the address's family."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return socket.socket(family, socket.SOCK_DGRAM)
