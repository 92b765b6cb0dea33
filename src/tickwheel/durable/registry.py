"""The contract of the registry: services, tokens and the audit log.

Every change is one transaction, which also writes its line of the audit log, and has committed when
the method returns. Names are full names: those of a namespace are `namespace/name`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Audit(NamedTuple):
    """One line of the audit log."""

    at_ms: int
    actor: str  # a token's id and name, "local", or "tickwheel"
    namespace: str
    action: str  # "service.put", "service.delete", "service.disable", "token.create", …
    target: str
    request: str = ""  # the request's id
    detail: str = ""  # for people; never a secret


class ServiceRow(NamedTuple):
    """A service as it is stored: its configuration as JSON, with sealed secrets."""

    name: str
    version: int  # one higher with each change
    config: str
    updated_at_ms: int


class Token(NamedTuple):
    """A token as it is stored: only the digest of the secret."""

    id: str
    name: str
    digest: str
    namespace: str  # "*": any
    scopes: tuple[str, ...]  # of "submit", "read", "admin"
    rate: float | None  # requests per second
    created_at_ms: int
    expires_at_ms: int | None = None


class NotedTimes(NamedTuple):
    """Two times of the store's clock; the step `prune` chooses them."""

    last_ms: int | None = None  # the last time that was noted
    trusted_ms: int = 0  # the latest time old enough to be trusted; 0: none yet


class Registry(Protocol):
    """The contract; `tests/contracts/test_registry.py` is the other half."""

    async def version(self) -> int:
        """Return a number that rises with every change of a service, a token or a schedule.

        This is cheap: every process polls it.
        """

    async def services(self) -> list[ServiceRow]:
        """Return all services in the order of their names."""

    async def put_service(
        self, name: str, config: str, audit: Audit, *, version: int | None = None
    ) -> ServiceRow | None:
        """Store a service's configuration, if `version` is None or the stored version.

        Return None if it is another. Version 0 means that no service has this name.
        """

    async def delete_service(self, name: str, audit: Audit) -> bool:
        """Delete a service and return whether it existed; `ServiceInUse` if it has live tasks."""

    async def tokens(self) -> list[Token]:
        """Return all tokens, oldest first."""

    async def had_tokens(self) -> bool:
        """Return whether there ever was a token, even if all have been deleted since."""

    async def put_token(self, token: Token, audit: Audit) -> None:
        """Store a token."""

    async def delete_token(self, token_id: str, audit: Audit) -> bool:
        """Delete a token, and return whether it existed."""

    async def audit(
        self, *, namespace: str | None, cursor: int | None, limit: int
    ) -> tuple[list[Audit], int | None]:
        """Return lines of the audit log, newest first, and the cursor of the next ones."""

    async def note(self, audit: Audit) -> None:
        """Add a line to the audit log, for a change made elsewhere."""

    async def prune(self, before_ms: int, limit: int, *, audit_before_ms: int | None = None) -> int:
        """Delete idempotency keys used before `before_ms`; return how many rows were deleted.

        - Lines of the audit log from before `audit_before_ms` go as well, the oldest first; None:
          no lines. So do rows that no process needs any more.
        - At most `limit` rows together: if the result is `limit`, there may be more.
        """

    async def noted_times(self) -> NotedTimes:
        """Return the noted times."""

    async def note_times(self, times: NotedTimes) -> None:
        """Replace the noted times."""
