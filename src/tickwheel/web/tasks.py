"""Tasks over HTTP: submit, look, cancel, reschedule, feedback, replay."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.durable.verbs.submission import (
    store_submission,
    store_submissions,
    submission_builder,
)
from tickwheel.errors import TickwheelError, UnknownService
from tickwheel.values.options import TaskOptions
from tickwheel.values.task import Idempotency, State, Task
from tickwheel.web import schemas, views
from tickwheel.web.batch_parser import Malformed, elements, lines
from tickwheel.web.bodies import ENVELOPE_BYTES
from tickwheel.web.problems import HttpError, problem_of, with_local_names
from tickwheel.web.route import NDJSON, Call, Reply, Route, check_utf8
from tickwheel.web.validation_messages import describe_bad_json, describe_error
from tickwheel.web.views import task_view, truncated_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tickwheel.durable.verbs.submission import Submitted
    from tickwheel.values.service import Service
    from tickwheel.values.task import Page, Submission

CREATED = 201
SLICE_BYTES = 65_536  # of a batch, or of its results, that are processed in one time slice
TASK_OVERHEAD_BYTES = 512  # added to the bytes of each task
ONE_LINE_HINT = "; one task per line: with curl, --data-binary (-d removes the line ends)"
MAX_LINES_PER_TASK = 4  # in a batch of lines: all but one may be blank

# The fields with the options of a submit, in the order of `TaskOptions`.
options_of = attrgetter(
    *("due_at" if name == "at" else name for name in TaskOptions.__annotations__)
)

_item = msgspec.json.Decoder(schemas.BatchTask)


async def submit(call: Call, body: schemas.SubmitTask) -> Reply:
    """Submit a task; it is stored when this is answered."""
    task, new, repeated = await store_task(call, body)
    headers = [(b"location", b"/v1/tasks/" + task.id.encode())]
    if repeated:
        headers.append((b"idempotency-replayed", b"true"))
    view = task_view(task, call.access, own_payload=new)
    return Reply(view, CREATED if new or repeated else 200, headers)


async def store_task(call: Call, body: schemas.SubmitTask) -> Submitted:
    """Store a task; the bytes of the request identify it for its idempotency key."""
    named = call.headers.get(b"idempotency-key")
    idempotency = None if named is None else idempotency_of(call, named, call.body)
    scheduler = call.scheduler
    name = call.access.name(body.service)
    service = call.app.directory.get(name) or await scheduler.known_service(name)
    payload = await call.payload(body.payload)
    build = submission_builder(scheduler)
    submission = read_submission(build, service, body, payload, idempotency)
    return await store_submission(scheduler, submission, whole=call.access.may("read"))


def idempotency_of(call: Call, named: bytes, body: bytes) -> Idempotency:
    """Return the idempotency key of a request, with the body that must be the same each time."""
    try:
        return Idempotency.of(call.access.namespace, named.decode("latin-1"), body)
    except ValueError as error:
        raise HttpError("bad_request", f"Idempotency-Key: {error}") from None


def read_submission(
    build: Callable[..., Submission],
    service: Service | None,
    body: schemas.SubmitTask,
    payload: bytes,
    idempotency: Idempotency | None,
) -> Submission:
    """Return the task to store; raise if the request is invalid or its service is unknown."""
    if service is None:
        raise UnknownService(f"no service is named {body.service!r:.120}")
    if body.delay is not None and body.due_at is not None:
        raise HttpError("invalid", "give delay or due_at, not both")
    return build(service, payload, options_of(body), body.on_conflict, idempotency)


async def submit_batch(call: Call) -> Reply:
    """Submit many tasks; a refused task does not affect the others."""
    longest = max_task_bytes(call)
    answers = await store_batch(
        call, batch_tasks(call, longest), partial(decode_item, call, longest)
    )
    good = sum(answer.problem is None for answer in answers)
    return Reply(schemas.Batch(answers, good, len(answers) - good))


async def store_batch(
    call: Call,
    texts: Iterator[bytes],
    decode: Callable[[bytes], tuple[schemas.BatchTask, Idempotency | None]],
) -> list[schemas.BatchItem]:
    """Store the tasks of a batch, each given as bytes, and return the result of each.

    It gives way to other requests. An empty text is not a task.
    """
    if b"idempotency-key" in call.headers:
        raise HttpError("bad_request", "in a batch each task has its own idempotency_key")
    answers: list[schemas.BatchItem | None] = []  # None: a submission
    looked = False  # in the store, for services that are unknown here: once per batch
    submissions: list[Submission] = []
    limit, short, cost = call.app.limits.batch, call.app.limits.short_payload, 0
    build = submission_builder(call.scheduler)
    for text in texts:
        size = len(text)
        cost += size + TASK_OVERHEAD_BYTES
        if cost >= SLICE_BYTES:
            await call.app.bodies.next_slice()
            cost = 0
        if not size:
            continue
        if len(answers) == limit:
            raise HttpError("too_large", f"a batch may have {limit} tasks, got more")
        answer = None
        try:
            item, idempotency = decode(text)
            name = call.access.name(item.service)
            service = call.app.directory.get(name)
            if service is None and not looked:
                looked = True
                service = await call.scheduler.known_service(name)
            payload = bytes(item.payload)
            if len(payload) > short:
                await call.check_payload(payload)
            submissions.append(read_submission(build, service, item, payload, idempotency))
        except Exception as error:  # noqa: BLE001
            answer = refused_item(call, error)
        answers.append(answer)
        if size >= SLICE_BYTES:
            await call.app.bodies.next_slice()  # before searching for the next
    call.body = b""  # free its memory: storing takes time
    results = iter(await store_all(call, submissions))
    return [next(results) if answer is None else answer for answer in answers]


async def store_all(call: Call, submissions: list[Submission]) -> list[schemas.BatchItem]:
    """Store tasks, and return the result of each."""
    async with call.app.batches:
        stored = await store_submissions(call.scheduler, submissions)
    results = []
    for number, (submission, task) in enumerate(zip(submissions, stored, strict=True), 1):
        results.append(stored_item(call, submission, task))
        if number * TASK_OVERHEAD_BYTES % SLICE_BYTES == 0:
            await call.app.bodies.next_slice()
    return results


def batch_tasks(call: Call, longest: int) -> Iterator[bytes]:
    """Yield the tasks of a batch, each still as bytes; a blank line is empty."""
    if call.media == NDJSON:
        found = lines(call.body, longest, MAX_LINES_PER_TASK * call.app.limits.batch)
    else:
        found = elements(call.body, longest)
    try:
        for text in map(bytes, found):
            if not text.isascii() and len(text) <= longest:
                check_utf8(text)
            yield text
    except Malformed as error:
        raise HttpError(error.code, f"the body cannot be read: {error}") from None


def max_task_bytes(call: Call) -> int:
    """Return the limit of the bytes of one task in a batch, with all its fields."""
    return call.app.limits.payload + ENVELOPE_BYTES


def decode_item(
    call: Call, longest: int, text: bytes
) -> tuple[schemas.BatchTask, Idempotency | None]:
    """Return one task of a batch and its idempotency key; raise if it is invalid."""
    if len(text) > longest:
        raise HttpError("too_large", f"a task may have {longest} bytes, this one has more")
    try:
        item = _item.decode(text)
    except msgspec.ValidationError as error:
        raise HttpError("invalid", describe_error(error, schemas.BatchTask, text)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        code, why = describe_bad_json(error, text)
        hint = ONE_LINE_HINT if call.media == NDJSON else ""
        raise HttpError(code, f"this cannot be read: {why}{hint}") from None
    key = item.idempotency_key
    return item, None if key is None else item_idempotency(call, key, text)


def item_idempotency(call: Call, key: str, text: bytes) -> Idempotency:
    """Return the idempotency key of a task in a batch, with the bytes that identify it."""
    return idempotency_of(call, key.encode("utf-8", "replace"), text)


def stored_item(
    call: Call, submission: Submission, task: Task | TickwheelError
) -> schemas.BatchItem:
    """Return the result of one task after the attempt to store it."""
    if not isinstance(task, Task):
        return refused_item(call, task)
    status = CREATED if task.id == submission.task.id else 200
    if submission.idempotency is not None:
        status = CREATED  # also for a repeated request
    return schemas.BatchItem(
        status,
        task.id,
        state_name(task.state),
        views.format_time(task.due_at_ms),
    )


def refused_item(call: Call, error: Exception) -> schemas.BatchItem:
    """Return the result of one task that was refused."""
    problem, _ = problem_of(with_local_names(error, call.access.namespace))
    if problem.status >= 500 and problem.code == "internal":
        raise error
    return schemas.BatchItem(problem.status, problem=problem)


async def get(call: Call) -> Reply:
    """Return a task, live or final."""
    task = await call.scheduler.get(call.params["id"], namespace=call.access.within)
    return Reply(truncated_view(task_view(task, call.access), call.query.truncate))


async def list_tasks(call: Call) -> Reply:
    """Return tasks, newest first."""
    return page_of_tasks(call, await call.scheduler.list(**arguments_of(call, call.query)))


async def attempts(call: Call) -> Reply:
    """Return the execution log of a task, by attempt."""
    query: schemas.ListAttempts = call.query
    rows, cursor = await call.scheduler.attempts_page(
        await own_task_id(call), cursor=query.cursor, limit=query.limit
    )
    return Reply(schemas.AttemptPage([views.attempt_view(row) for row in rows], cursor))


async def cancel(call: Call) -> Reply:
    """Cancel a task that is not running."""
    task_id = await own_task_id(call)
    verdict = await call.scheduler.cancel(task_id)
    return Reply(schemas.Verdict(verdict.won, state_name(verdict.state)))


async def reschedule(call: Call, body: schemas.Reschedule) -> Reply:
    """Change the due time of a task that is not running."""
    if (body.delay is None) == (body.due_at is None):
        raise HttpError("invalid", "give delay or due_at, one of them")
    task_id = await own_task_id(call)
    verdict = await call.scheduler.reschedule(task_id, delay=body.delay, at=body.due_at)
    return Reply(schemas.Verdict(verdict.won, state_name(verdict.state)))


async def own_task_id(call: Call) -> str:
    """Return the id in the path; raise if the task is in another namespace."""
    task_id = call.params["id"]
    if call.access.confined:
        await call.scheduler.get(task_id, namespace=call.access.within)
    return task_id


async def feedback(call: Call, body: schemas.Feedback) -> Reply:
    """Report how an accepted attempt ended, or that it goes on."""
    result = await call.payload(body.result, "result")
    verdict = await call.scheduler.feedback(
        call.params["id"], body.outcome, attempt=body.attempt, epoch=body.epoch,
        raw=result, error=body.error, retry=body.retry, namespace=call.access.within,
    )  # fmt: skip
    return Reply(schemas.Verdict(verdict.won, state_name(verdict.state)))


async def cancel_where(call: Call, body: schemas.CancelWhere) -> Reply:
    """Cancel all unclaimed tasks that match every given field."""
    count = await call.scheduler.cancel_where(**arguments_of(call, body))
    if body.key is None:  # cancelling by key is routine; everything else goes to the audit log
        target, detail = call.access.name(body.service or "*"), f"{count} tasks"
        await call.scheduler.note("task.cancel", target, detail=detail, **call.audit_fields)
    return Reply(schemas.Cancelled(count))


async def backlog(call: Call) -> Reply:
    """Return final tasks, newest first."""
    return page_of_tasks(call, await call.scheduler.backlog(**arguments_of(call, call.query)))


async def replay(call: Call, body: schemas.ReplayOne) -> Reply:
    """Run a final task again, as a new one."""
    if body.delay is not None and body.due_at is not None:
        raise HttpError("invalid", "give delay or due_at, not both")
    task_id = await own_task_id(call)
    task = await call.scheduler.replay(
        task_id, delay=body.delay or 0.0, at=body.due_at, force=body.force
    )
    headers = [(b"location", b"/v1/tasks/" + task.id.encode())]
    return Reply(task_view(task, call.access), CREATED, headers)


async def replay_where(call: Call, body: schemas.ReplayWhere) -> Reply:
    """Run all matching final tasks again; without a state, the failed ones."""
    count = await call.scheduler.replay_where(
        **arguments_of(call, body) | {"state": body.state or ""}
    )
    target, detail = call.access.name(body.service or "*"), f"{count} tasks"
    await call.scheduler.note("backlog.replay", target, detail=detail, **call.audit_fields)
    return Reply(schemas.Replayed(count))


def arguments_of(call: Call, which: Any) -> dict[str, Any]:
    """Return a filter as the arguments of a verb, with the full name of its service."""
    given = msgspec.structs.asdict(which)
    given.pop("truncate", None)
    service = None if which.service is None else call.access.name(which.service)
    return given | {"service": service, "namespace": call.access.namespace}


def page_of_tasks(call: Call, page: Page) -> Reply:
    """Return a page of tasks, as its caller may see them."""
    most = call.query.truncate
    items = [truncated_view(task_view(task, call.access), most) for task in page.items]
    return Reply(schemas.TaskPage(items, page.next_cursor))


def state_name(state: State) -> Any:
    """Return a state as text."""
    return str(state)


ROUTES = [
    Route("POST", "/v1/tasks", submit, scope="submit", takes=schemas.SubmitTask,
          gives={201: schemas.Task, 200: schemas.Task}, problems=(409,),
          headers=("idempotency-key",), answers=("location", "idempotency-replayed"),
          creates_tasks=True),
    Route("GET", "/v1/tasks", list_tasks, scope="read", query=schemas.ListTasks,
          gives={200: schemas.TaskPage}),
    Route("POST", "/v1/tasks/batch", submit_batch, scope="submit", takes=list[schemas.BatchTask],
          raw=("application/json", NDJSON), gives={200: schemas.Batch}, creates_tasks=True),
    Route("POST", "/v1/tasks/cancel", cancel_where, scope="submit", takes=schemas.CancelWhere,
          gives={200: schemas.Cancelled}),
    Route("GET", "/v1/tasks/{id}", get, scope="read", query=schemas.ReadTask,
          gives={200: schemas.Task}, problems=(404,)),
    Route("GET", "/v1/tasks/{id}/attempts", attempts, scope="read",
          query=schemas.ListAttempts, gives={200: schemas.AttemptPage}, problems=(404,)),
    Route("POST", "/v1/tasks/{id}/cancel", cancel, scope="submit", gives={200: schemas.Verdict},
          problems=(404,)),
    Route("POST", "/v1/tasks/{id}/reschedule", reschedule, scope="submit",
          takes=schemas.Reschedule, gives={200: schemas.Verdict}, problems=(404,)),
    Route("POST", "/v1/tasks/{id}/feedback", feedback, scope="submit", takes=schemas.Feedback,
          gives={200: schemas.Verdict}, problems=(404, 409)),
    Route("GET", "/v1/backlog", backlog, scope="read", query=schemas.ListBacklog,
          gives={200: schemas.TaskPage}),
    Route("POST", "/v1/backlog/replay", replay_where, scope="submit", takes=schemas.ReplayWhere,
          gives={200: schemas.Replayed}),
    Route("POST", "/v1/backlog/{id}/replay", replay, scope="submit", takes=schemas.ReplayOne,
          optional=True, gives={201: schemas.Task}, problems=(404, 409)),
]  # fmt: skip
