"""Failed log-ins: recorded in the log and the audit log, at a bounded rate."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger("tickwheel.web")

FIRST_PAUSE_SECONDS = 60.0  # after a line; failures until then are only counted
LONGEST_PAUSE_SECONDS = 3600.0  # the pause doubles up to this while log-ins fail
ACTION = "token.refuse"


class FailedLogins:
    """Records the first failure at once, and then their number, less and less often.

    A flood of bad tokens adds some 30 lines a day to either log.

    - `note(action, target, *, actor, request, detail)` adds a line to the audit log.
    """

    def __init__(self, note: Callable[..., Awaitable[None]]) -> None:
        self._note = note
        self._count = 0  # since the last line
        self._last = ("", "", "", "")  # token, reason, address and request of the last failure
        self._pause = FIRST_PAUSE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._noting: set[asyncio.Future[None]] = set()

    def add(self, token_id: str, reason: str, address: str, request_id: str) -> None:
        """Record a request whose token was refused; `token_id` is the id in that token."""
        self._count += 1
        self._last = token_id, reason, address, request_id
        if self._timer is None:
            self._report()

    def _report(self) -> None:
        """Write a line if log-ins failed since the last one; check again after a pause."""
        self._timer = None
        if not self._count:
            self._pause = FIRST_PAUSE_SECONDS
            return
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._report)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._write()

    def _write(self) -> None:
        token_id, reason, address, request_id = self._last
        detail = f"failed log-ins: {self._count}, the last from {address}: {reason}"
        self._count = 0
        logger.warning("%s (token %s)", detail, token_id, extra={"request": request_id})
        noting = asyncio.ensure_future(
            self._note(ACTION, token_id, actor=address, request=request_id, detail=detail)
        )
        self._noting.add(noting)
        noting.add_done_callback(self._noting.discard)

    async def close(self) -> None:
        """Write a line for the failures that were only counted so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._count:
            self._write()
        await asyncio.gather(*self._noting, return_exceptions=True)
