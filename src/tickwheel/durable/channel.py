"""The channel: how a task that is due reaches its service, and what came back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tickwheel.durable.gate import Gate
    from tickwheel.durable.service import Service
    from tickwheel.durable.task import Event, Task


class Answer(NamedTuple):
    """How an attempt went: FINISH, RETRY, FAIL, SNOOZE or RELEASE, and what belongs to it."""

    event: Event
    result_body: str | None = None
    error: str | None = None
    after_ms: int | None = None  # RETRY: not before that; SNOOZE: then


class Channel(Protocol):
    """The contract of every protocol."""

    def gate(self, service: Service) -> Gate | None:
        """Return what else, beside the service's own gate, bounds how many may be sent at once."""

    def interruptible(self, service: Service) -> bool:
        """Say whether `send` ends when it is cancelled."""

    async def send(self, task: Task, service: Service) -> Answer:
        """Call the service; what goes wrong there is an answer, not an exception."""

    async def close(self) -> None:
        """Let go of what the channel holds."""
