"""The contract of schedules: recurring submits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tickwheel.durable.store import BATCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.registry import Audit
    from tickwheel.values.schedule import Fired, Firing, Schedule, Timing


class Schedules(Protocol):
    """The contract; `tests/contracts/test_schedules.py` is the other half."""

    async def read(
        self, *, namespace: str | None = None, after: str = "", limit: int = BATCH
    ) -> list[Schedule]:
        """Return schedules in the order of their names, from the first after `after`.

        - `namespace`: only the schedules of this namespace; None: of all.
        - A page ends at `limit` schedules, or when it reaches `PAGE_BYTES`. An empty page is the
          end.
        """

    async def get(self, name: str) -> Schedule | None:
        """Return the schedule of this name, or None."""

    async def first_using(self, service: str) -> str | None:
        """Return the name of the first schedule that submits to this service, or None."""

    async def put(self, schedule: Schedule, audit: Audit, version: str | None = None) -> Schedule:
        """Store a schedule, cancel its pending firings, and return it as it is stored.

        - `version`: the stored one must have it ("": there must be none), or ScheduleChanged is
          raised. None: any.
        - A schedule equal to the stored one (`same_as`) changes nothing.
        - The same transaction writes the line of the audit log, which lists the changes, and raises
          the registry's version. Then other processes are notified of a change.
        """

    async def delete(self, name: str, audit: Audit) -> bool:
        """Delete a schedule and cancel its pending firings; return whether it existed.

        Audit log, version and notification are those of `put`.
        """

    async def timings(self, after: tuple[int, str] = (-1, ""), limit: int = BATCH) -> list[Timing]:
        """Return when schedules fire, in the order of (`changed`, `name`), from after `after`.

        No payload is read. An empty page is the end: nothing was put since.
        """

    async def fire(self, firings: Sequence[Firing]) -> list[Fired]:
        """Insert each firing's task, unless the timing has changed or fired since it was read.

        - The task gets the schedule's current options; the store copies the payload itself.
        - Several firings of one schedule are given in the order of their times.
        - The answers are in the order of the firings. There are fewer answers than firings when the
          copied payloads reach `FIRE_BYTES`: the caller repeats the call for the rest.
        """
