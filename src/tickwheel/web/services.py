"""Services and schedules over HTTP."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from tickwheel.durable.directory.configuration import backoff_of, public_config
from tickwheel.errors import ScheduleChanged, ServiceChanged, UnknownSchedule, UnknownService
from tickwheel.values.task import namespace_of
from tickwheel.web import schemas, views
from tickwheel.web.error_groups import grouped_errors
from tickwheel.web.preconditions import required_version
from tickwheel.web.problems import HttpError
from tickwheel.web.route import Call, Reply, Route

if TYPE_CHECKING:
    from tickwheel.values.schedule import Schedule
    from tickwheel.values.service import Service

NAME = re.compile(schemas.NAME)
SLICE_SERVICES = 100  # of a list, that are processed in one time slice
ERROR_TASKS = 300  # newest failed and newest live tasks in which errors are looked for


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
    views_of_own = []
    for number, one in enumerate(own, 1):
        views_of_own.append(view_service(call, one))
        if number % SLICE_SERVICES == 0:
            await call.app.bodies.next_slice()
    return Reply(schemas.ServicePage(views_of_own))


async def get_service(call: Call) -> Reply:
    """Return a service."""
    service = await call.scheduler.known_service(full_name(call))
    if service is None:
        raise not_found(call)
    return Reply(view_service(call, service), headers=etag_header(service.version))


def etag_header(version: int | str) -> list[tuple[bytes, bytes]]:
    """Return the ETag header with a version; a task function has none."""
    return [(b"etag", f'"{version}"'.encode())] if version else []


def expected_version(call: Call, stored: Service | None) -> int | None:
    """Return the version that a change requires; None: any, 0: the service must not exist."""
    found = str(stored.version) if stored is not None and stored.version else None
    required = required_version(call, "service", found, ServiceChanged)
    return None if required is None else int(required or 0)


def not_found(call: Call) -> HttpError:
    """Return the error for a service in the path that does not exist."""
    error = UnknownService(f"no service is named {call.params['name']!r:.120}")
    return HttpError(error.code, str(error), status=404)


async def put_service(call: Call, body: schemas.PutService) -> Reply:
    """Create or change a service; every node uses it at once."""
    name, config = full_name(call), msgspec.to_builtins(body)
    await call.app.directory.refresh()
    stored = call.app.directory.get(name)
    kept = stored is not None and stored.backoff == backoff_of(config["backoff"])
    if body.backoff.first > body.backoff.max and not kept:
        raise HttpError("invalid", "backoff.max must be at least backoff.first")
    version = expected_version(call, stored)
    service = await call.scheduler.put_service(name, config, version=version, **call.audit_fields)
    return Reply(view_service(call, service), 200 if stored else 201, etag_header(service.version))


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
    schedule = await call.scheduler.get_schedule(full_name(call))
    return Reply(view_schedule(call, schedule), headers=etag_header(schedule.version))


async def put_schedule(call: Call, body: schemas.PutSchedule) -> Reply:
    """Create or change a schedule."""
    name = full_name(call)
    service = call.access.name(body.service)
    if await call.scheduler.known_service(service) is None:
        raise UnknownService(f"no service is named {body.service!r:.120}")
    payload = await call.payload(body.payload)
    stored = await stored_schedule(call, name)
    found = None if stored is None else stored.version
    schedule = await call.scheduler.store_schedule(
        name, service, payload, cron=body.cron, interval=body.interval,
        tz=body.tz, missed=body.missed, enabled=body.enabled, priority=body.priority,
        timeout=body.timeout, max_attempts=body.max_attempts,
        version=required_version(call, "schedule", found, ScheduleChanged), **call.audit_fields,
    )  # fmt: skip
    status = 201 if stored is None else 200
    return Reply(view_schedule(call, schedule), status, etag_header(schedule.version))


async def stored_schedule(call: Call, name: str) -> Schedule | None:
    """Return the schedule of this full name, or None."""
    try:
        return await call.scheduler.get_schedule(name)
    except UnknownSchedule:
        return None


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
          problems=(404,), answers=("etag",)),
    Route("GET", "/v1/schedules/{name}/firings", list_firings, scope="read",
          query=schemas.ReadFirings, gives={200: schemas.FiringPage}, problems=(404,)),
    Route("PUT", "/v1/schedules/{name}", put_schedule, scope="admin", takes=schemas.PutSchedule,
          gives={200: schemas.Schedule, 201: schemas.Schedule}, problems=(412,),
          headers=("if-match", "if-none-match"), answers=("etag",)),
    Route("DELETE", "/v1/schedules/{name}", delete_schedule, scope="admin", gives={204: None},
          problems=(404,)),
]  # fmt: skip
