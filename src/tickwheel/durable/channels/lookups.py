"""Lookups: the addresses of names, asked of the system: one may hang, and cannot be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

KEEP_NAMES = 1024  # that something is remembered of
PROMPT_SECONDS = 1.0  # a lookup that takes longer counts as hung
PROMPT = 64  # lookups at the same time
HUNG = 192  # and hung ones beside them


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
