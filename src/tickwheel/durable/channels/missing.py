"""The channel of a protocol whose package is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.durable.channel import Answer, Tracer
    from tickwheel.durable.histogram import Histogram
    from tickwheel.durable.permits.semaphore import Semaphore
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task


class MissingPackage(ImportError, ValueError):
    """Services of a protocol cannot be used: its package is not installed."""

    @classmethod
    def of(cls, protocol: str, extra: str, error: ImportError) -> MissingPackage:
        """Return the error for services of a protocol; it names the extra to install."""
        return cls(
            f"services of protocol {protocol!r} need a package that is not installed ({error}):"
            f" pip install 'tickwheel[{extra}]'"
        )


class MissingChannel:
    """Refuses every service, and names the extra to install."""

    remote = True

    def __init__(self, missing: MissingPackage) -> None:
        self.latencies: dict[str, Histogram] = {}
        self.trace: Tracer | None = None
        self._missing = missing

    def semaphore(self, service: Service) -> Semaphore | None:
        """Return None: `check` refuses every service."""
        return None

    def interruptible(self, service: Service) -> bool:
        """Return True: `check` refuses every service."""
        return True

    def check(self, service: Service) -> NoReturn:
        """Raise for every service."""
        raise self._missing

    async def send(self, task: Task, service: Service, may_send: Callable[[], bool]) -> Answer:
        """Raise: `check` refuses every service."""
        raise self._missing

    def forget(self, name: str) -> None:
        """Do nothing: the channel has no state."""

    async def close(self) -> None:
        """Do nothing: the channel has no resources."""
