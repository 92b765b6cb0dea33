"""Answers of a hostile server and a hostile callee: a result or the documented error."""

from functools import cache

from fuzz.source import Source
from tickwheel.client import operations, task
from tickwheel.client.requests import Answer
from tickwheel.durable.channels.http.channel import answer_to, plan_for
from tickwheel.durable.histogram import Histogram
from tickwheel.errors import TickwheelError
from tickwheel.http.message import Response
from tickwheel.values.service import Service

NOW = 1_700_000_000.0
STATUSES = (200, 201, 202, 204, 301, 400, 404, 409, 410, 429, 500, 503)


@cache
def calls():
    """Return one call of each kind."""
    return (
        task.submit("mail"), operations.batch([b"{}"]), operations.get("a"),
        operations.attempts_page("a"), operations.tasks(), operations.backlog(),
        operations.cancel("a"), operations.cancel_key("a"), operations.reschedule("a", delay=1),
        operations.services(), operations.get_service("a"), operations.replay("a"),
        operations.schedules_page(), operations.get_schedule("a"), operations.nodes(),
        operations.shards(), operations.wheel(), operations.stats(), operations.audit(),
        operations.health(),
    )  # fmt: skip


def run(data):
    source = Source(data)
    call, status = source.pick((None, *calls())), source.pick(STATUSES)
    after = source.chunk().decode("latin-1")
    body = source.rest()
    if call is None:
        plan = plan_for(Service("mail", endpoint="http://callee/?token=secret"), Histogram())
        response = Response(status, [("retry-after", after)], body, True)
        answer = answer_to(response, plan, NOW * 1_000)
        assert answer.least_ms is None or 0 <= answer.least_ms <= 86_400_000
        return
    try:
        result = call.result(Answer(status, {"retry-after": after}, body), NOW, "http://server")
    except TickwheelError as error:
        assert str(error)
    else:
        repr(result)
