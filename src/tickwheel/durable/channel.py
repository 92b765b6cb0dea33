"""The channel: how a task that is due reaches its service, and what came back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.durable.permits.semaphore import Semaphore
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task


class Answer(NamedTuple):
    """How an attempt went: FINISH, RETRY, FAIL, SNOOZE, RELEASE or ACCEPT, and what belongs to it.

    - `healthy`: whether the service works, for its breaker; None: this says nothing of it.
    - `hold_ms`: nothing is sent to the service for so long.
    - `gone`: the service does not exist any more, and is to be disabled.
    """

    event: Event
    result_body: str | None = None
    error: str | None = None
    after_ms: int | None = None  # RETRY, SNOOZE: exactly then; ACCEPT: so long it may take
    least_ms: int | None = None  # RETRY: as the backoff says, but not before that
    healthy: bool | None = None
    hold_ms: int | None = None
    gone: bool = False


UNSENT = Answer(Event.RELEASE, error="claimed, not sent: the lease may be over")


class Traced(NamedTuple):
    """A call that is traced: the headers that carry the trace on, and what to tell its end."""

    headers: list[tuple[str, str]]
    ended: Callable[[Answer], None]


class Channel(Protocol):
    """The contract of every protocol."""

    remote: bool
    """Whether what was sent goes on elsewhere, even when `send` is cancelled."""

    def semaphore(self, service: Service) -> Semaphore | None:
        """Return what else, beside the service's own gate, bounds how many may be sent at once."""

    def interruptible(self, service: Service) -> bool:
        """Say whether `send` ends when it is cancelled."""

    def check(self, service: Service) -> None:
        """Raise when the service's configuration is not one that can be sent by."""

    async def send(self, task: Task, service: Service, may_send: Callable[[], bool]) -> Answer:
        """Call the service; what goes wrong there is an answer, not an exception.

        `may_send()` says whether the attempt is still this node's. A channel that has to wait
        before it sends, or sends again, asks just before; when it says no, nothing is sent, and
        the answer is `UNSENT`.
        """

    def forget(self, name: str) -> None:
        """Let go of what is kept of a service that was deleted."""

    async def close(self) -> None:
        """Let go of what the channel holds."""
