"""Services and schedules over HTTP."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from tickwheel.durable.directory.configuration import public_config
from tickwheel.errors import ServiceChanged, UnknownSchedule, UnknownService
from tickwheel.values.task import namespace_of
from tickwheel.web import schemas, views
from tickwheel.web.error_groups import grouped_errors
from tickwheel.web.problems import HttpError
from tickwheel.web.route import Call, Reply, Route

if TYPE_CHECKING:
    from tickwheel.values.schedule import Schedule
    from tickwheel.values.service import Service

NAME = re.compile(schemas.NAME)
ERROR_TASKS = 300  # newest failed and newest live tasks in which errors are looked for
ETAG = re.compile(rb'"[!#-~]*"')


def full_name(call: Call) -> str:
    """Return the full name for the name in the path; raise if it is invalid."""
    name = call.params["name"]
    if not NAME.fullmatch(name) or len(name) > 100:
        raise HttpError(
            "invalid", f"a name must be {schemas.PATTERNS[schemas.NAME]}, got {name!r:.120}"
        )
    return call.access.name(name)


def view_service(call: Call, service: Service) -> schemas.Service:
    """Return the view of a service, with the problem that it has on this node."""
    directory = call.app.directory
    updated_at_ms = directory.updated_at_ms.get(service.name)
    problem = directory.problem(service)
    if problem is None and service.gone_at_ms is not None:
        gone_at = views.format_time(service.gone_at_ms)
        problem = f"disabled: its endpoint answered 410 Gone at {gone_at}"
    return views.service_view(service, public_config(service), updated_at_ms, problem)


async def list_services(call: Call) -> Reply:
    """Return all services, by name."""
    services = await call.scheduler.services()
    services += [service for service, _ in call.app.directory.unusable.values()]
    own = [one for one in services if namespace_of(one.name) == call.access.namespace]
    own.sort(key=lambda one: one.name)
    return Reply(schemas.ServicePage([view_service(call, one) for one in own]))


async def get_service(call: Call) -> Reply:
    """Return a service."""
    service = await call.scheduler.known_service(full_name(call))
    if service is None:
        raise not_found(call)
    return Reply(view_service(call, service), headers=etag_header(service))


def etag_header(service: Service) -> list[tuple[bytes, bytes]]:
    """Return the ETag header with the version; a task function has no version."""
    return [(b"etag", b'"%d"' % service.version)] if service.version else []


def expected_version(call: Call, stored: Service | None) -> int | None:
    """Return the version that a change requires; None: any, 0: the service must not exist."""
    found = 0 if stored is None else stored.version
    match, none_match = call.headers.get(b"if-match"), call.headers.get(b"if-none-match")
    if none_match is not None:
        if none_match.strip() != b"*" or match is not None:
            raise HttpError("bad_request", "If-None-Match must be *, and without If-Match")
        return 0
    if match is None:
        return None
    # A proxy that compresses turns an ETag into a weak one, of the same version.
    tags = [tag.strip().removeprefix(b"W/") for tag in match.split(b",")]
    if tags != [b"*"] and not all(map(ETAG.fullmatch, tags)):
        raise HttpError("bad_request", 'If-Match must be an ETag of this service, such as "3"')
    if not found or (tags != [b"*"] and b'"%d"' % found not in tags):
        state = f"has version {found}" if found else "does not exist"
        name, wanted = call.params["name"], match.decode("latin-1")
        raise ServiceChanged(f"the service {name!r} {state}, but If-Match is {wanted:.100}")
    return found


def not_found(call: Call) -> HttpError:
    """Return the error for a service in the path that does not exist."""
    error = UnknownService(f"no service is named {call.params['name']!r:.120}")
    return HttpError(error.code, str(error), status=404)


async def put_service(call: Call, body: schemas.PutService) -> Reply:
    """Create or change a service; every node uses it at once."""
    name = full_name(call)
    if body.backoff.first > body.backoff.max:
        raise HttpError("invalid", "backoff.max must be at least backoff.first")
    await call.app.directory.refresh()
    stored = call.app.directory.get(name)
    config, version = msgspec.to_builtins(body), expected_version(call, stored)
    service = await call.scheduler.put_service(name, config, version=version, **call.audit_fields)
    return Reply(view_service(call, service), 200 if stored else 201, etag_header(service))


async def delete_service(call: Call) -> Reply:
    """Delete a service that has no live tasks."""
    try:
        await call.scheduler.delete_service(full_name(call), **call.audit_fields)
    except UnknownService:
        raise not_found(call) from None
    return Reply(None, 204)


async def try_service(call: Call, body: schemas.TryService) -> Reply:
    """Call a service once, now; no task is stored, and a paused service is called, too."""
    name, payload = full_name(call), await call.payload(body.payload)
    began = call.app.uptime()
    try:
        answer = await call.scheduler.try_call(name, payload, **call.audit_fields)
    except UnknownService:
        raise not_found(call) from None
    result = msgspec.Raw((answer.result_body or "null").encode())
    took = call.app.uptime() - began
    return Reply(schemas.TryAnswer(str(answer.event), result, answer.error, round(took, 4)))


async def service_errors(call: Call) -> Reply:
    """Return the recent errors of a service in groups, from its newest tasks."""
    name = full_name(call)
    if await call.scheduler.known_service(name) is None:
        raise not_found(call)
    ended = await call.scheduler.backlog(service=name, state="failed", limit=ERROR_TASKS)
    live = await call.scheduler.list(service=name, final=False, limit=ERROR_TASKS)
    found = [*ended.items, *live.items]
    return Reply(schemas.ErrorPage(grouped_errors(found), len(found)))


def view_schedule(call: Call, schedule: Schedule) -> schemas.Schedule:
    """Return the view of a schedule."""
    return views.schedule_view(schedule, call.app.now_ms())


async def list_schedules(call: Call) -> Reply:
    """Return schedules, by name."""
    query: schemas.ListSchedules = call.query
    schedules, last = await call.scheduler.schedules_page(
        namespace=call.access.namespace, limit=query.limit,
        after="" if query.cursor is None else call.access.name(query.cursor),
    )  # fmt: skip
    cursor = None if last is None else views.local_name(last)
    return Reply(schemas.SchedulePage([view_schedule(call, one) for one in schedules], cursor))


async def get_schedule(call: Call) -> Reply:
    """Return a schedule."""
    return Reply(view_schedule(call, await call.scheduler.get_schedule(full_name(call))))


async def put_schedule(call: Call, body: schemas.PutSchedule) -> Reply:
    """Create or change a schedule."""
    name = full_name(call)
    service = call.access.name(body.service)
    if await call.scheduler.known_service(service) is None:
        raise UnknownService(f"no service is named {body.service!r:.120}")
    payload = await call.payload(body.payload)
    exists = await has_schedule(call, name)
    schedule = await call.scheduler.store_schedule(
        name, service, payload, cron=body.cron, interval=body.interval,
        tz=body.tz, missed=body.missed, enabled=body.enabled, priority=body.priority,
        timeout=body.timeout, max_attempts=body.max_attempts, **call.audit_fields,
    )  # fmt: skip
    return Reply(view_schedule(call, schedule), 200 if exists else 201)


async def has_schedule(call: Call, name: str) -> bool:
    """Return whether there is a schedule of this full name."""
    try:
        await call.scheduler.get_schedule(name)
    except UnknownSchedule:
        return False
    return True


async def list_firings(call: Call) -> Reply:
    """Return the times of the next firings of a schedule, as if it were enabled."""
    times = await call.scheduler.firings(full_name(call), call.query.limit)
    return Reply(schemas.FiringPage([views.format_time(at) for at in times]))


async def delete_schedule(call: Call) -> Reply:
    """Delete a schedule; its next firing is cancelled with it."""
    name = full_name(call)
    await call.scheduler.delete_schedule(name, **call.audit_fields)
    return Reply(None, 204)


ROUTES = [
    Route("GET", "/v1/services", list_services, scope="read", gives={200: schemas.ServicePage}),
    Route("GET", "/v1/services/{name}", get_service, scope="read", gives={200: schemas.Service},
          problems=(404,), answers=("etag",)),
    Route("PUT", "/v1/services/{name}", put_service, scope="admin", takes=schemas.PutService,
          gives={200: schemas.Service, 201: schemas.Service}, problems=(412,),
          headers=("if-match", "if-none-match"), answers=("etag",)),
    Route("DELETE", "/v1/services/{name}", delete_service, scope="admin", gives={204: None},
          problems=(404, 409)),
    Route("POST", "/v1/services/{name}/try", try_service, scope="admin", takes=schemas.TryService,
          optional=True, gives={200: schemas.TryAnswer}, problems=(404,)),
    Route("GET", "/v1/services/{name}/errors", service_errors, scope="read",
          gives={200: schemas.ErrorPage}, problems=(404,)),
    Route("GET", "/v1/schedules", list_schedules, scope="read", query=schemas.ListSchedules,
          gives={200: schemas.SchedulePage}),
    Route("GET", "/v1/schedules/{name}", get_schedule, scope="read", gives={200: schemas.Schedule},
          problems=(404,)),
    Route("GET", "/v1/schedules/{name}/firings", list_firings, scope="read",
          query=schemas.ReadFirings, gives={200: schemas.FiringPage}, problems=(404,)),
    Route("PUT", "/v1/schedules/{name}", put_schedule, scope="admin", takes=schemas.PutSchedule,
          gives={200: schemas.Schedule, 201: schemas.Schedule}),
    Route("DELETE", "/v1/schedules/{name}", delete_schedule, scope="admin", gives={204: None},
          problems=(404,)),
]  # fmt: skip
