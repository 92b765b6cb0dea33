"""The contract of a source: it delivers messages, and keeps them until they are acknowledged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Sequence


class SourceUnavailable(TickwheelError, ConnectionError):
    """The broker is unreachable, or refuses; unacknowledged messages come again."""

    code = "source_unavailable"


class Message(NamedTuple):
    """A message of a source.

    - `id`: unique within the source, and the same at each delivery; None if there is no such id.
    - `place`: the source's own data for the acknowledgement.
    """

    body: bytes
    id: str | None
    place: Any = None


class Place(NamedTuple):
    """Where a source is, and how to read it: the arguments of `source_at`."""

    url: str
    name: str
    group: str
    dead_letter: str | None
    identity: str | None
    batch: int


class Source(Protocol):
    """A queue, topic or stream of one broker.

    A failure of the broker raises `SourceUnavailable`; the consumer then calls `close` and `open`.
    After `open`, every message comes again that was not acknowledged.
    """

    @property
    def name(self) -> str:
        """The source's identity, the same in every process; known after `open`."""

    async def open(self) -> None:
        """Connect; raise ValueError if the configuration can never work."""

    async def receive(self, limit: int) -> list[Message]:
        """Wait for messages, and return up to `limit` of them."""

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """Acknowledge the messages of the last `receive`: their tasks are stored, or refused."""

    async def refuse(self, message: Message, reason: str) -> None:
        """Move a message that cannot become a task to the dead-letter destination, if it has one.

        It returns after the broker has confirmed the copy. The consumer acknowledges the message
        afterwards, with its batch.
        """

    async def close(self) -> None:
        """Disconnect; the contract allows it in every state."""
