"""`AsyncPurgatory`: the purgatory of one event loop.

Everything happens on the loop, and nothing here awaits between looking and acting: between two
awaits no other task can run. So no lock is needed, and no event can fall between the look at the
condition and the watch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tickwheel.aio import AsyncTimer
from tickwheel.purgatory import DelayedOperation, Purgatory

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable
    from typing import Self

    from tickwheel.watchlists import AnyTimer


class AsyncPurgatory(Purgatory):
    """Operations of one event loop: as `Purgatory`, and `wait` for the common case.

    `timer`: an `AsyncTimer` to share; without it the purgatory has its own, and `aclose` ends it.
    """

    _one_thread = True

    def __init__(self, name: str, timer: AnyTimer | None = None) -> None:
        self._own_async_timer = AsyncTimer() if timer is None else None
        super().__init__(name, self._own_async_timer if timer is None else timer)

    async def wait(
        self, keys: Iterable[Hashable], condition: Callable[[], Any], timeout: float
    ) -> Any:
        """Wait until `condition()` is true, looked at whenever one of `keys` is checked.

        Return what it gave; TimeoutError after `timeout` seconds; what it raises is raised here.
        """
        waiting = Waiting(timeout, condition)
        self.try_complete_else_watch(waiting, keys)
        try:
            return await waiting.answer
        finally:
            self.cancel(waiting)

    def cancel(self, operation: DelayedOperation) -> bool:
        """Take `operation` off without completing it; a `wait` is cancelled by it."""
        if not super().cancel(operation):
            return False
        if isinstance(operation, Waiting):
            operation.answer.cancel()
        return True

    async def aclose(self) -> list[DelayedOperation]:
        """Take every operation off, and return them; whoever waits is cancelled."""
        ended = self.close()
        if self._own_async_timer is not None:
            await self._own_async_timer.close()
        return ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Waiting(DelayedOperation):
    """A task that waits for a condition."""

    def __init__(self, timeout: float, condition: Callable[[], Any]) -> None:
        super().__init__(timeout)
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._condition = condition
        self._value: Any = None
        self._error: Exception | None = None

    def try_complete(self) -> bool:
        try:
            self._value = self._condition()
        except Exception as error:  # noqa: BLE001
            self._error = error
            return self.force_complete()
        return bool(self._value) and self.force_complete()

    def on_complete(self) -> None:
        if self.answer.done():
            return
        if self._error is not None:
            self.answer.set_exception(self._error)
        elif self._value:
            self.answer.set_result(self._value)

    def on_expiration(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(TimeoutError(f"nothing within {self.timeout} s"))
