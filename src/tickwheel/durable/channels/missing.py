"""The channel of a protocol whose package is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.durable.channel import Answer
    from tickwheel.durable.permits.semaphore import Gate
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task


class MissingChannel:
    """Refuses every service, and names the extra to install."""

    remote = True

    def __init__(self, protocol: str, extra: str, error: ImportError) -> None:
        self._message = (
            f"services of protocol {protocol!r} need a package that is not installed ({error}):"
            f" pip install 'tickwheel[{extra}]'"
        )

    def gate(self, service: Service) -> Gate | None:
        """Return None: no service gets this far."""
        return None

    def interruptible(self, service: Service) -> bool:
        """Say yes: no service gets this far."""
        return True

    def check(self, service: Service) -> NoReturn:
        """Raise, whatever the service."""
        raise ImportError(self._message)

    async def send(self, task: Task, service: Service, may_send: Callable[[], bool]) -> Answer:
        """Raise: `check` lets no service get this far."""
        raise ImportError(self._message)

    def forget(self, name: str) -> None:
        """Do nothing: there is nothing to forget."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
