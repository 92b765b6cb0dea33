"""`AsyncPurgatory`: the purgatory of one event loop.

Everything runs on the loop, and nothing here awaits between evaluating a condition and acting on
it. Between two awaits no other task can run, so no lock is needed, and no event can come between
the evaluation and the watch.
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
    """A `Purgatory` for one event loop, with `wait` for the common case.

    `timer`: a shared `AsyncTimer`. By default the purgatory has its own, which `aclose` closes.
    """

    _one_thread = True

    def __init__(self, name: str, timer: AnyTimer | None = None) -> None:
        self._own_async_timer = AsyncTimer() if timer is None else None
        super().__init__(name, self._own_async_timer if timer is None else timer)

    async def wait(
        self, keys: Iterable[Hashable], condition: Callable[[], Any], timeout: float
    ) -> Any:
        """Wait until `condition()` is true, and return its value.

        It is evaluated at once and when one of `keys` is checked; its exceptions are raised here.
        Raise TimeoutError after `timeout` seconds, or at once if they are negative.
        """
        waiting = Waiting(timeout, condition)
        self.try_complete_else_watch(waiting, keys)
        try:
            return await waiting.answer
        finally:
            self.cancel(waiting)

    def cancel(self, operation: DelayedOperation) -> bool:
        """Remove `operation` without completing it; this cancels a `wait`."""
        if not super().cancel(operation):
            return False
        if isinstance(operation, Waiting):
            operation.answer.cancel()
        return True

    async def aclose(self) -> list[DelayedOperation]:
        """Remove all operations and return them; this cancels every `wait`."""
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
            self.answer.set_exception(
                TimeoutError(f"condition not met within {max(0, self.timeout)} s")
            )
