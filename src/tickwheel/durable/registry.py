"""The registry: what the service remembers besides tasks: services, tokens, and who did what.

Every change is one transaction, together with its line in the audit log, and has committed when the
method returns. Names are full names: with a namespace they are `namespace/name`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Audit(NamedTuple):
    """One line of the audit log: who did what, to which thing."""

    at_ms: int
    actor: str  # a token's id and name, "local", or "tickwheel" itself
    namespace: str
    action: str  # "service.put", "service.delete", "service.disable", "token.create", …
    target: str
    request: str = ""  # the request's id
    detail: str = ""  # for people; no secret is ever in it


class ServiceRow(NamedTuple):
    """A service as it is stored: its configuration is JSON, in which secrets are sealed."""

    name: str
    version: int  # one higher with each change
    config: str
    updated_at_ms: int


class Token(NamedTuple):
    """A token as it is stored: never the secret, only its digest."""

    id: str
    name: str
    digest: str
    namespace: str  # "*": any
    scopes: tuple[str, ...]  # of "submit", "read", "admin"
    rate: float | None  # requests per second
    created_at_ms: int
    expires_at_ms: int | None = None


class NotedTimes(NamedTuple):
    """What the store's clock has shown: `prune` says how both are chosen."""

    last_ms: int | None = None  # the time that was noted last
    trusted_ms: int = 0  # the latest that is old enough to be believed; 0: none yet


class Registry(Protocol):
    """The contract; `tests/contracts/test_registry.py` is its other half."""

    async def version(self) -> int:
        """Return a number that rises with every change of a service, a token or a schedule.

        It is cheap.
        """

    async def services(self) -> list[ServiceRow]:
        """Return all services by name."""

    async def put_service(
        self, name: str, config: str, audit: Audit, *, version: int | None = None
    ) -> ServiceRow | None:
        """Store a service's configuration; with `version`, only while that is the stored one.

        None: it is not, or there is none with that version (0: there must be none at all).
        """

    async def delete_service(self, name: str, audit: Audit) -> bool:
        """Delete a service; whether there was one. With live tasks it raises `ServiceInUse`."""

    async def tokens(self) -> list[Token]:
        """Return all tokens, oldest first."""

    async def had_tokens(self) -> bool:
        """Say whether there ever was a token, also when all have been deleted since."""

    async def put_token(self, token: Token, audit: Audit) -> None:
        """Store a token."""

    async def delete_token(self, token_id: str, audit: Audit) -> bool:
        """Delete a token; whether there was one."""

    async def audit(
        self, *, namespace: str | None, cursor: int | None, limit: int
    ) -> tuple[list[Audit], int | None]:
        """Return lines of the audit log, newest first, and the cursor of the next ones."""

    async def note(self, audit: Audit) -> None:
        """Add a line to the audit log: for what is changed elsewhere."""

    async def prune(self, before_ms: int, limit: int, *, audit_before_ms: int | None = None) -> int:
        """Forget idempotency keys that were used before that; return how much was forgotten.

        - With them go lines of the audit log from before `audit_before_ms`, from the first on, or
          none at all, and whatever else nobody needs any more.
        - Up to `limit` rows of all that: when it is so many, there may be more.
        """

    async def noted_times(self) -> NotedTimes:
        """Return the times that were noted last."""

    async def note_times(self, times: NotedTimes) -> None:
        """Note other times instead."""
