"""Schedules: putting, deleting and listing them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import bounded, nanoseconds
from tickwheel.durable.administration import LOCAL
from tickwheel.durable.store import BATCH, PAGE_BYTES
from tickwheel.durable.verbs.awaited import must_await
from tickwheel.durable.verbs.submission import SubmissionVerbs
from tickwheel.errors import UnknownSchedule
from tickwheel.values.schedule import Schedule
from tickwheel.values.service import check_name, seconds_of

if TYPE_CHECKING:
    from datetime import timedelta

    from tickwheel.durable.verbs.arguments import Target

MISSED = ("once", "all", "skip")


class ScheduleVerbs(SubmissionVerbs):
    """The verbs for schedules."""

    @must_await
    async def put_schedule(
        self,
        name: str,
        target: Target,
        /,
        *args: Any,
        cron: str | None = None,
        interval: float | timedelta | None = None,
        tz: str = "UTC",
        missed: str = "once",
        enabled: bool = True,
        priority: int = 0,
        timeout: float | timedelta | None = None,
        max_attempts: int | None = None,
        **kwargs: Any,
    ) -> Schedule:
        """Create or change a schedule; putting it unchanged is a no-op.

        - Give either `cron` (five fields, in the zone `tz`) or `interval` (seconds or a timedelta).
        - `missed`: what to do about firings while no process ran: run "once" for all of them, run
          "all", or "skip" them.
        """
        self._running_node()
        service, body = self._call(target, args, kwargs)
        return await self.store_schedule(
            name, service, body, cron=cron, interval=interval, tz=tz, missed=missed,
            enabled=enabled, priority=priority, timeout=timeout, max_attempts=max_attempts,
        )  # fmt: skip

    @must_await
    async def store_schedule(
        self,
        name: str,
        service: str,
        body: bytes,
        *,
        cron: str | None = None,
        interval: float | timedelta | None = None,
        tz: str = "UTC",
        missed: str = "once",
        enabled: bool = True,
        priority: int = 0,
        timeout: float | timedelta | None = None,
        max_attempts: int | None = None,
        version: str | None = None,
        actor: str = LOCAL,
        request: str = "",
    ) -> Schedule:
        """Put a schedule as `put_schedule` does, by its service's name and its payload's bytes.

        - `version`: the stored one must have it ("": there must be none), or ScheduleChanged is
          raised, so that no other change is undone.
        - `actor` and `request` go into the audit log.
        """
        node = self._running_node()
        check_name("name", name)
        if (cron is None) == (interval is None):
            raise ValueError(f"give either cron or interval: got {cron!r} and {interval!r}")
        if missed not in MISSED:
            raise ValueError(f"missed must be one of {MISSED}, got {missed!r:.100}")
        if service not in node.services:
            await self._reload_services()
        options = {"priority": priority, "timeout": timeout, "max_attempts": max_attempts}
        built = self._build(node, service, body, options).task
        now = int(node.store.now_ms())
        interval_ms = None if interval is None else _interval_ms(interval)
        wanted = Schedule(
            name, service, body, cron, interval_ms, tz, missed, now, now, enabled, priority,
            built.max_attempts, built.timeout_ms,
        )  # fmt: skip
        wanted.rule.after(now)  # raises for an invalid rule
        audit = self._audit(node, actor, "schedule.put", name, request)
        stored = await node.store.schedules.put(wanted, audit, version)
        node.schedules_changed()
        return stored

    @must_await
    async def delete_schedule(self, name: str, *, actor: str = LOCAL, request: str = "") -> None:
        """Delete a schedule, and cancel its firing that is stored and not yet due."""
        node = self._running_node()
        audit = self._audit(node, actor, "schedule.delete", name, request)
        if not await node.store.schedules.delete(name, audit):
            raise UnknownSchedule(f"no schedule is named {name!r:.100}")
        node.schedules_changed()

    async def firings(self, name: str, limit: int = 10) -> list[int]:
        """Return the times of the next firings of a schedule, in milliseconds since 1970."""
        bounded("limit", limit, 1, 100)
        schedule = await self.get_schedule(name)
        times: list[int] = []
        with suppress(ValueError, OverflowError):  # the rule has no further time
            at = schedule.next_ms(int(self._running_node().store.now_ms()))
            while len(times) < limit:
                times.append(at)
                at = schedule.rule.after(at)
        return times

    async def schedules(self) -> list[Schedule]:
        """Return all schedules, by name."""
        found: list[Schedule] = []
        after: str | None = ""
        while after is not None:
            page, after = await self.schedules_page(after=after, limit=BATCH)
            found += page
        return found

    async def schedules_page(
        self, *, namespace: str | None = None, after: str = "", limit: int = 100
    ) -> tuple[list[Schedule], str | None]:
        """Return a page of schedules, by name, and the `after` of the next page or None.

        A page with large payloads has fewer than `limit` schedules.
        """
        store = self._running_node().store
        found = await store.schedules.read(namespace=namespace, after=after, limit=limit + 1)
        more = len(found) > limit or sum(len(one.body) for one in found) >= PAGE_BYTES
        page = found[:limit]
        return page, page[-1].name if more else None

    async def get_schedule(self, name: str) -> Schedule:
        """Return a schedule."""
        schedule = await self._running_node().store.schedules.get(name)
        if schedule is None:
            raise UnknownSchedule(f"no schedule is named {name!r:.100}")
        return schedule


def _interval_ms(interval: float | timedelta) -> int:
    ms = round(nanoseconds("interval", seconds_of(interval)) / 1e6)
    if ms < 1:
        raise ValueError(f"interval must be at least a millisecond, got {interval!r}")
    return ms
