"""How many tasks are due when, for the next minute, hour, day and week; counted seldom.

All callers share one answer per namespace and span, so that a page that is open in many browsers
costs one read. Each read is bounded, whatever the number of tasks; see `Tasks.due_counts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tickwheel.values.task import DueSpans
from tickwheel.web import schemas, views
from tickwheel.web.route import Call, Reply, Route

if TYPE_CHECKING:
    from tickwheel.web.app import App


class Span(NamedTuple):
    """A time to look ahead: `buckets` of `step_ms` each, read every `refresh_ms` at most."""

    step_ms: int
    buckets: int
    refresh_ms: int


SPANS = {
    "minute": Span(1_000, 60, 2_000),
    "hour": Span(60_000, 60, 15_000),
    "day": Span(1_800_000, 48, 60_000),
    "week": Span(7_200_000, 84, 300_000),
}


class DueCache:
    """The last answers, by namespace and span, with the time until which they hold."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._answers: dict[tuple[str, str], tuple[float, schemas.DueCounts]] = {}

    async def read(self, namespace: str, name: str) -> schemas.DueCounts:
        """Return the counts of a span, at most as old as its time between two reads."""
        now_ms = self._app.now_ms()
        until_ms, answer = self._answers.get((namespace, name), (0.0, None))
        span = SPANS[name]
        if answer is not None and now_ms < until_ms <= now_ms + span.refresh_ms:
            return answer
        start = int(now_ms) // span.step_ms * span.step_ms
        spans = DueSpans(start, span.step_ms, span.buckets)
        found = await self._app.scheduler.due_counts(spans, namespace=namespace)
        counts = [one.tasks for one in found]
        estimated = [number for number, one in enumerate(found) if one.estimated]
        answer = schemas.DueCounts(
            name, views.format_time(start), span.step_ms / 1000, counts, estimated
        )
        if len(self._answers) >= 4 * len(SPANS):  # namespaces that nobody watches any more
            self._answers.clear()
        self._answers[namespace, name] = now_ms + span.refresh_ms, answer
        return answer


async def read_due(call: Call, name: str) -> schemas.DueCounts:
    """Return the counts of a span, in the caller's namespace."""
    return await call.app.due.read(call.access.namespace, name)


async def due(call: Call) -> Reply:
    """Return how many tasks are due in the next minute, hour, day or week."""
    return Reply(await read_due(call, call.query.span))


ROUTES = [
    Route("GET", "/v1/due", due, scope="read", query=schemas.ReadDue,
          gives={200: schemas.DueCounts}),
]  # fmt: skip
