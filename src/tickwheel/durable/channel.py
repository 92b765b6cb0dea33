"""The contract of a channel: it delivers a due task to its service, and returns the outcome."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from tickwheel.values.service import Service
from tickwheel.values.task import Event, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tickwheel.durable.histogram import Histogram
    from tickwheel.durable.permits.semaphore import Semaphore


class Answer(NamedTuple):
    """The outcome of an attempt: FINISH, RETRY, FAIL, SNOOZE, RELEASE or ACCEPT, and its details.

    - `healthy`: whether the service works, for its breaker; None if the call shows neither.
    - `hold_ms`: send nothing to the service for this long.
    - `gone`: the service no longer exists; disable it.
    - `delivered_to`: where the message is, as JSON, for the execution log.
    - `exception`: the class and message of a task function's exception; `error` has its traceback.
    """

    event: Event
    result_body: str | None = None
    error: str | None = None
    after_ms: int | None = None  # RETRY, SNOOZE: wait exactly this long; ACCEPT: the time limit
    least_ms: int | None = None  # RETRY: wait as the backoff says, but at least this long
    healthy: bool | None = None
    hold_ms: int | None = None
    gone: bool = False
    delivered_to: str | None = None
    exception: tuple[str, str] | None = None


UNSENT = Answer(Event.RELEASE, error="claimed, not sent: the lease may be over")


class CallTrace(NamedTuple):
    """A traced call: the headers that propagate the trace, and a callback for its outcome."""

    headers: list[tuple[str, str]]
    end: Callable[[Answer], None]


Tracer = Callable[[Task, Service], AbstractContextManager[CallTrace]]
"""A channel enters `tracer(task, service)` around each call, and calls `end` with its answer."""


class Delivery(NamedTuple):
    """One task of a batch, which the channel ends with an answer of its own.

    - `may_send()`: as in `Channel.send`; also False after the attempt has timed out.
    - `end(answer)`: give the answer, and the permits of the task. Later answers are ignored.
    """

    task: Task
    service: Service
    may_send: Callable[[], bool]
    end: Callable[[Answer], None]


class Channel(Protocol):
    """Delivers tasks by one protocol. The caller holds a permit, a lease and the timeout."""

    remote: bool
    """Whether a sent task goes on elsewhere when `send` is cancelled."""

    trace: Tracer | None
    """Traces the calls; None, the default, traces nothing."""

    @property
    def latencies(self) -> Mapping[str, Histogram]:
        """How long the calls of each service took, in seconds; calls that failed count, too."""

    def semaphore(self, service: Service) -> Semaphore | None:
        """Return the permits that calls of this service share with others, or None.

        The caller takes a permit before `send`, and gives it back after the call has ended.
        """

    def interruptible(self, service: Service) -> bool:
        """Return whether cancelling `send` ends the call."""

    def check(self, service: Service) -> None:
        """Raise TypeError or ValueError when no call can be made with this configuration."""

    async def send(self, task: Task, service: Service, may_send: Callable[[], bool]) -> Answer:
        """Call the service; return an error there as an answer, never as an exception.

        `may_send()` returns whether this node still holds the attempt. A channel asks just before
        it sends, and again before it sends once more. If it returns False, nothing is sent, and
        the answer is `UNSENT`.
        """

    def forget(self, name: str) -> None:
        """Drop the state of a service that was deleted, its latencies included."""

    async def close(self) -> None:
        """Release all resources. A call under way ends with an answer, or runs to its end."""


@runtime_checkable
class BatchChannel(Channel, Protocol):
    """A channel that sends several tasks at once: one round trip for a batch."""

    async def send_many(self, deliveries: Sequence[Delivery]) -> None:
        """Send tasks of one service that were claimed together, and end each of them.

        - The channel asks each `may_send` just before it sends the task.
        - A task that times out keeps its permits until the channel ends it: a full or stuck
          receiver holds no more tasks than its services have permits. If cancelling ends the calls
          (`interruptible`), a batch is cancelled when all of its tasks have timed out.
        - A task that is not ended when this returns or raises is retried.
        """
