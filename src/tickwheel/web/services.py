"""Services and schedules over HTTP."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from tickwheel.durable.directory.configuration import shown_form
from tickwheel.errors import ServiceChanged, UnknownSchedule, UnknownService
from tickwheel.values.task import namespace_of
from tickwheel.web import types, views
from tickwheel.web.problems import Refused
from tickwheel.web.route import Call, Reply, Route
from tickwheel.web.wording import PATTERNS

if TYPE_CHECKING:
    from tickwheel.values.schedule import Schedule
    from tickwheel.values.service import Service

NAME = re.compile(types.NAME)
TAG = re.compile(rb'"[!#-~]*"')


def checked_name(call: Call) -> str:
    """Return the full name that the path names; raise for what cannot be one."""
    name = call.params["name"]
    if not NAME.fullmatch(name) or len(name) > 100:
        raise Refused("invalid", f"a name must be {PATTERNS[types.NAME]}, got {name!r:.120}")
    return call.access.name(name)


def view(call: Call, service: Service) -> types.Service:
    """Return a service as it is shown."""
    directory = call.app.directory
    updated_at_ms = directory.updated_at_ms.get(service.name)
    problem = directory.problem(service)
    if problem is None and service.gone_at_ms is not None:
        problem = f"it answered 410 at {views.time(service.gone_at_ms)}, and is disabled since"
    return views.service_view(service, shown_form(service), updated_at_ms, problem)


async def list_services(call: Call) -> Reply:
    """Return all services, by name."""
    services = await call.scheduler.services()
    services += [service for service, _ in call.app.directory.unusable.values()]
    own = [one for one in services if namespace_of(one.name) == call.access.namespace]
    own.sort(key=lambda one: one.name)
    return Reply(types.ServicePage([view(call, one) for one in own]))


async def get_service(call: Call) -> Reply:
    """Return a service."""
    service = await call.scheduler.known_service(checked_name(call))
    if service is None:
        raise missing(call)
    return Reply(view(call, service), headers=tagged(service))


def tagged(service: Service) -> list[tuple[bytes, bytes]]:
    """Return the header that names the version; a task function has none."""
    return [(b"etag", b'"%d"' % service.version)] if service.version else []


def expected(call: Call, stored: Service | None) -> int | None:
    """Return the version that a change is meant for; None: for any, 0: there must be none."""
    found = 0 if stored is None else stored.version
    match, none_match = call.headers.get(b"if-match"), call.headers.get(b"if-none-match")
    if none_match is not None:
        if none_match.strip() != b"*" or match is not None:
            raise Refused("bad_request", "If-None-Match must be *, and alone: if there is none")
        return 0
    if match is None:
        return None
    # A proxy that compresses makes a tag weak: it is of the same version all the same.
    tags = [tag.strip().removeprefix(b"W/") for tag in match.split(b",")]
    if tags != [b"*"] and not all(map(TAG.fullmatch, tags)):
        raise Refused("bad_request", 'If-Match must be an ETag as it was given, such as "3"')
    if not found or (tags != [b"*"] and b'"%d"' % found not in tags):
        told = f"has version {found}" if found else "is not there"
        name, wanted = call.params["name"], match.decode("latin-1")
        raise ServiceChanged(f"the service {name!r} {told}, and If-Match is {wanted:.100}")
    return found


def missing(call: Call) -> Refused:
    """Return the problem of a service that is not there."""
    error = UnknownService(f"no service is named {call.params['name']!r:.120}")
    return Refused(error.code, str(error), status=404)


async def put_service(call: Call, body: types.PutService) -> Reply:
    """Make a service, or change it; it counts on every node at once."""
    name = checked_name(call)
    if body.backoff.first > body.backoff.max:
        raise Refused("invalid", "backoff.max must be at least backoff.first")
    await call.app.directory.refresh()
    stored = call.app.directory.get(name)
    config, version = msgspec.to_builtins(body), expected(call, stored)
    service = await call.scheduler.put_service(name, config, version=version, **call.who)
    return Reply(view(call, service), 200 if stored else 201, tagged(service))


async def delete_service(call: Call) -> Reply:
    """Delete a service that has no live tasks."""
    try:
        await call.scheduler.delete_service(checked_name(call), **call.who)
    except UnknownService:
        raise missing(call) from None
    return Reply(None, 204)


def shown(call: Call, schedule: Schedule) -> types.Schedule:
    """Return a schedule as it is shown."""
    return views.schedule_view(schedule, call.node.store.now_ms())


async def list_schedules(call: Call) -> Reply:
    """Return schedules, by name."""
    query: types.ListSchedules = call.query
    schedules, last = await call.scheduler.schedules_page(
        namespace=call.access.namespace, limit=query.limit,
        after="" if query.cursor is None else call.access.name(query.cursor),
    )  # fmt: skip
    cursor = None if last is None else views.local_name(last)
    return Reply(types.SchedulePage([shown(call, one) for one in schedules], cursor))


async def get_schedule(call: Call) -> Reply:
    """Return a schedule."""
    schedule = await call.node.store.schedules.get(checked_name(call))
    if schedule is None:
        raise UnknownSchedule(f"no schedule is named {call.params['name']!r:.120}")
    return Reply(shown(call, schedule))


async def put_schedule(call: Call, body: types.PutSchedule) -> Reply:
    """Make a schedule, or change it."""
    name = checked_name(call)
    service = call.access.name(body.service)
    if await call.scheduler.known_service(service) is None:
        raise UnknownService(f"no service is named {body.service!r:.120}")
    payload = await call.payload(body.payload)
    known = await call.node.store.schedules.get(name) is not None
    schedule = await call.scheduler.store_schedule(
        name, service, payload, cron=body.cron, interval=body.interval,
        tz=body.tz, missed=body.missed, enabled=body.enabled, priority=body.priority,
        timeout=body.timeout, max_attempts=body.max_attempts, **call.who,
    )  # fmt: skip
    return Reply(shown(call, schedule), 200 if known else 201)


async def delete_schedule(call: Call) -> Reply:
    """Delete a schedule; a firing that is still to come is cancelled with it."""
    name = checked_name(call)
    await call.scheduler.delete_schedule(name, **call.who)
    return Reply(None, 204)


ROUTES = [
    Route("GET", "/v1/services", list_services, scope="read", gives={200: types.ServicePage}),
    Route("GET", "/v1/services/{name}", get_service, scope="read", gives={200: types.Service},
          problems=(404,), answers=("etag",)),
    Route("PUT", "/v1/services/{name}", put_service, scope="admin", takes=types.PutService,
          gives={200: types.Service, 201: types.Service}, problems=(412,),
          headers=("if-match", "if-none-match"), answers=("etag",)),
    Route("DELETE", "/v1/services/{name}", delete_service, scope="admin", gives={204: None},
          problems=(404, 409)),
    Route("GET", "/v1/schedules", list_schedules, scope="read", query=types.ListSchedules,
          gives={200: types.SchedulePage}),
    Route("GET", "/v1/schedules/{name}", get_schedule, scope="read", gives={200: types.Schedule},
          problems=(404,)),
    Route("PUT", "/v1/schedules/{name}", put_schedule, scope="admin", takes=types.PutSchedule,
          gives={200: types.Schedule, 201: types.Schedule}),
    Route("DELETE", "/v1/schedules/{name}", delete_schedule, scope="admin", gives={204: None},
          problems=(404,)),
]  # fmt: skip
