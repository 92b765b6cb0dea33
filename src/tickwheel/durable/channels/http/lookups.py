"""Lookups: what only the system knows: the addresses of names, and which are this host's own.

A lookup of a name may hang, and cannot be stopped.
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

KEEP_NAMES = 1024  # that something is remembered of
PROMPT_SECONDS = 1.0  # a lookup that takes longer counts as hung
PROMPT = 64  # lookups at the same time
HUNG = 192  # more of them, which hang
UNASSIGNED: dict[int, IPAddress] = {  # by version: no host has these
    4: IPv4Address("255.255.255.254"),
    6: IPv6Address("2001:db8:ffff::ffff"),
}


class Lookups:
    """Asks the system for the addresses of names, each on a thread that keeps no process alive.

    - At most `PROMPT` at once, for a lookup cannot be stopped. One that hangs makes room for
      others, until `HUNG` of them do. Where file descriptors are few, `most` bounds all of them,
      divided in the same way.
    - A name whose last lookup hung is looked up among the hung ones: names that no server answers
      for hold up no others.
    - For one event loop.
    """

    def __init__(self, most: int | None = None) -> None:
        most = PROMPT + HUNG if most is None else most
        prompt = max(1, most * PROMPT // (PROMPT + HUNG))
        self._prompt = asyncio.Semaphore(prompt)
        self._hung = asyncio.Semaphore(max(1, most - prompt))
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


def is_own(address: IPAddress) -> bool:
    """Say whether an address is one of this host's: a socket can be bound to no other.

    Some hosts let sockets be bound to any address (`ip_nonlocal_bind`). There, an address is its
    own when packets to it would come from it.
    """
    if address.is_loopback or address.is_unspecified:
        return True
    if not can_bind(address):
        return False
    return not can_bind(UNASSIGNED[address.version]) or source_to(address) == str(address)


def can_bind(address: IPAddress) -> bool:
    """Say whether a socket can be bound to an address; OSError when there is no room for one."""
    try:
        with datagram_socket(address) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        return False
    return True


def source_to(address: IPAddress) -> str | None:
    """Return the address that packets to another would come from; None: there is no way to it."""
    try:
        with datagram_socket(address) as probe:
            probe.connect((str(address), 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def datagram_socket(address: IPAddress) -> socket.socket:
    """Return a socket of an address's family."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return socket.socket(family, socket.SOCK_DGRAM)
