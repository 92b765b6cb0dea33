"""Tasks over HTTP: submit, look, cancel, reschedule, feedback, replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.errors import TickwheelError, UnknownService
from tickwheel.values.options import OPTIONS
from tickwheel.values.task import Idempotency, Repeated, State, Task
from tickwheel.web import types, views
from tickwheel.web.bodies import ENVELOPE_BYTES
from tickwheel.web.elements import Malformed, elements, lines
from tickwheel.web.problems import Refused, localised, problem
from tickwheel.web.route import NDJSON, Call, Reply, Route, check_utf8
from tickwheel.web.views import task_view
from tickwheel.web.wording import in_words, no_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.values.task import Page, Submission

CREATED = 201
TURN_COST = 65_536  # bytes of a batch, or of its answers, that are worked on in one turn
TASK_COST = 512  # bytes that a task counts as, besides its own
SPARE = 4  # lines for each task that a batch may have: most may be blank

# The fields that are options of a submit under the same name.
OPTION_NAMES = [name for name in types.SubmitTask.__struct_fields__ if name in OPTIONS]

_item = msgspec.json.Decoder(types.BatchTask)


async def submit(call: Call, body: types.SubmitTask) -> Reply:
    """Submit a task; it is stored when this is answered."""
    named = call.headers.get(b"idempotency-key")
    idempotency = None if named is None else idempotency_of(call, named, call.body)
    await call.scheduler.known_service(call.access.name(body.service))
    submission = await build(call, body, idempotency)
    answer = await call.node.submit.store_one(submission)
    task = call.node.submit.task_of(submission, answer)
    new, repeated = task.id == submission.task.id, isinstance(answer, Repeated)
    headers = [(b"location", b"/v1/tasks/" + task.id.encode())]
    if repeated:
        headers.append((b"idempotency-replayed", b"true"))
    view = task_view(task, call.access, own_payload=new)
    return Reply(view, CREATED if new or repeated else 200, headers)


def idempotency_of(call: Call, named: bytes, body: bytes) -> Idempotency:
    """Return the name that a caller has given a request; the body must be the same each time."""
    try:
        return Idempotency.of(call.access.namespace, named.decode("latin-1"), body)
    except ValueError as error:
        raise Refused("bad_request", f"Idempotency-Key: {error}") from None


async def build(call: Call, body: types.SubmitTask, idempotency: Idempotency | None) -> Submission:
    """Return what to store; raise for what cannot be right."""
    service = call.app.directory.get(call.access.name(body.service))
    if service is None:
        raise UnknownService(f"no service is named {body.service!r:.120}")
    if body.delay is not None and body.due_at is not None:
        raise Refused("invalid", "give delay or due_at, not both")
    payload = await call.payload(body.payload)
    options: Any = {name: getattr(body, name) for name in OPTION_NAMES}
    return call.node.submit.build(
        service, payload, at=body.due_at, idempotency=idempotency, **options
    )


async def submit_batch(call: Call) -> Reply:
    """Submit many tasks; one that is refused refuses only itself."""
    if b"idempotency-key" in call.headers:
        raise Refused("bad_request", "in a batch each task has its own idempotency_key")
    answers: list[Any] = []
    looked = False  # for services that are unknown here: once for all of them
    submissions: list[Submission] = []
    places: list[int] = []
    async for text in batch_tasks(call):
        answer = None
        try:
            item, idempotency = read_item(call, text)
            name = call.access.name(item.service)
            if not looked and call.app.directory.get(name) is None:
                looked = True
                await call.scheduler.known_service(name)
            submissions.append(await build(call, item, idempotency))
            places.append(len(answers))
        except Exception as error:  # noqa: BLE001
            answer = refused(call, error)
        answers.append(answer)
    call.body = b""  # it may be large, and storing takes time
    async with call.app.batches:
        stored = await call.node.submit.submit_many(submissions, lambda _: None)
    for number, (place, task) in enumerate(zip(places, stored, strict=True), 1):
        answers[place] = answered(call, submissions[number - 1], task)
        if number * TASK_COST % TURN_COST == 0:
            await call.app.bodies.turn()
    good = sum(answer.problem is None for answer in answers)
    return Reply(types.Batch(answers, good, len(answers) - good))


async def batch_tasks(call: Call) -> AsyncIterator[bytes]:
    """Give the tasks of a batch, each still as bytes; take turns with other requests."""
    limit, longest, cost, count = call.app.limits.batch, longest_task(call), 0, 0
    if call.media == NDJSON:
        found = lines(call.body, longest, SPARE * limit)
    else:
        found = elements(call.body, longest)
    try:
        for text in map(bytes, found):
            cost += len(text) + TASK_COST
            if cost >= TURN_COST:
                await call.app.bodies.turn()
                cost = 0
            if not text:
                continue  # a blank line
            count += 1
            if count > limit:
                raise Refused("too_large", f"a batch may have {limit} tasks, got more")
            if len(text) <= longest:
                check_utf8(text)
            yield text
            if len(text) >= TURN_COST:
                await call.app.bodies.turn()  # before the next is looked for
    except Malformed as error:
        raise Refused(error.code, f"the body cannot be read: {error}") from None


def longest_task(call: Call) -> int:
    """Return how many bytes a task of a batch may have, with all its fields."""
    return call.app.limits.payload + ENVELOPE_BYTES


def read_item(call: Call, text: bytes) -> tuple[types.BatchTask, Idempotency | None]:
    """Return one task of a batch; raise when it is none."""
    longest = longest_task(call)
    if len(text) > longest:
        raise Refused("too_large", f"a task may have {longest} bytes, this one has more")
    try:
        item = _item.decode(text)
    except msgspec.ValidationError as error:
        raise Refused("invalid", in_words(error, types.BatchTask, text)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        code, why = no_json(error, text)
        raise Refused(code, f"this cannot be read: {why}") from None
    if item.idempotency_key is None:
        return item, None
    named = item.idempotency_key.encode("utf-8", "replace")
    return item, idempotency_of(call, named, text)


def answered(call: Call, submission: Submission, task: Task | TickwheelError) -> types.BatchItem:
    """Return what is answered for one task that was to be stored."""
    if not isinstance(task, Task):
        return refused(call, task)
    status = CREATED if task.id == submission.task.id else 200
    if submission.idempotency is not None:
        status = CREATED  # the same the second time
    return types.BatchItem(
        status,
        task.id,
        shown_state(task.state),
        views.time(task.due_at_ms),
    )


def refused(call: Call, error: Exception) -> types.BatchItem:
    """Return what is answered for one task that was refused."""
    told, _ = problem(localised(error, call.access.namespace))
    if told.status >= 500 and told.code == "internal":
        raise error
    return types.BatchItem(told.status, problem=told)


async def get(call: Call) -> Reply:
    """Return a task, live or final."""
    task = await call.scheduler.get(call.params["id"], namespace=call.access.within)
    return Reply(task_view(task, call.access))


async def list_tasks(call: Call) -> Reply:
    """Return tasks, newest first."""
    return page_of_tasks(call, await call.scheduler.list(**arguments_of(call, call.query)))


async def attempts(call: Call) -> Reply:
    """Return the execution log of a task, by attempt."""
    query: types.ListAttempts = call.query
    rows, cursor = await call.scheduler.attempts_page(
        await own(call), cursor=query.cursor, limit=query.limit
    )
    return Reply(types.AttemptPage([views.attempt_view(row) for row in rows], cursor))


async def cancel(call: Call) -> Reply:
    """Cancel a task that is not running."""
    task_id = await own(call)
    verdict = await call.scheduler.cancel(task_id)
    return Reply(types.Verdict(verdict.won, shown_state(verdict.state)))


async def reschedule(call: Call, body: types.Reschedule) -> Reply:
    """Make a task that is not running due at another time."""
    if (body.delay is None) == (body.due_at is None):
        raise Refused("invalid", "give delay or due_at, one of them")
    task_id = await own(call)
    verdict = await call.scheduler.reschedule(task_id, delay=body.delay, at=body.due_at)
    return Reply(types.Verdict(verdict.won, shown_state(verdict.state)))


async def own(call: Call) -> str:
    """Return the id in the path; raise when it is another namespace's."""
    task_id = call.params["id"]
    if call.access.confined:
        await call.scheduler.get(task_id, namespace=call.access.within)
    return task_id


async def feedback(call: Call, body: types.Feedback) -> Reply:
    """Say how an accepted attempt ended, or that it goes on."""
    result = await call.payload(body.result, "result")
    verdict = await call.scheduler.feedback(
        call.params["id"], body.outcome, attempt=body.attempt, epoch=body.epoch,
        raw=result, error=body.error, retry=body.retry, namespace=call.access.within,
    )  # fmt: skip
    return Reply(types.Verdict(verdict.won, shown_state(verdict.state)))


async def cancel_where(call: Call, body: types.CancelWhere) -> Reply:
    """Cancel all unclaimed tasks of a service, or with a key, that match."""
    count = await call.scheduler.cancel_where(**arguments_of(call, body))
    if body.key is None:  # many at once is administration; by key it is everyday work
        target = call.access.name(body.service or "*")
        await call.scheduler.note("task.cancel", target, detail=f"{count} tasks", **call.who)
    return Reply(types.Cancelled(count))


async def backlog(call: Call) -> Reply:
    """Return final tasks, newest first."""
    return page_of_tasks(call, await call.scheduler.backlog(**arguments_of(call, call.query)))


async def replay(call: Call, body: types.ReplayOne) -> Reply:
    """Run a final task again, as a new one."""
    if body.delay is not None and body.due_at is not None:
        raise Refused("invalid", "give delay or due_at, not both")
    task_id = await own(call)
    task = await call.scheduler.replay(
        task_id, delay=body.delay or 0.0, at=body.due_at, force=body.force
    )
    headers = [(b"location", b"/v1/tasks/" + task.id.encode())]
    return Reply(task_view(task, call.access), CREATED, headers)


async def replay_where(call: Call, body: types.ReplayWhere) -> Reply:
    """Run all final tasks again that match: without a state the failed ones."""
    count = await call.scheduler.replay_where(
        **arguments_of(call, body) | {"state": body.state or ""}
    )
    await call.scheduler.note(
        "backlog.replay", call.access.name(body.service or "*"), detail=f"{count} tasks", **call.who
    )
    return Reply(types.Replayed(count))


def arguments_of(call: Call, which: Any) -> dict[str, Any]:
    """Return which tasks are meant as arguments of the scheduler's verb, in the full names."""
    given = msgspec.structs.asdict(which)
    service = None if which.service is None else call.access.name(which.service)
    return given | {"service": service, "namespace": call.access.namespace}


def page_of_tasks(call: Call, page: Page) -> Reply:
    """Return a part of a list of tasks, as its caller may see them."""
    items = [task_view(task, call.access) for task in page.items]
    return Reply(types.TaskPage(items, page.next_cursor))


def shown_state(state: State) -> Any:
    """Return a state as it is shown."""
    return str(state)


ROUTES = [
    Route("POST", "/v1/tasks", submit, scope="submit", takes=types.SubmitTask,
          gives={201: types.Task, 200: types.Task}, problems=(409,),
          headers=("idempotency-key",), answers=("location", "idempotency-replayed"), adds=True),
    Route("GET", "/v1/tasks", list_tasks, scope="read", query=types.ListTasks,
          gives={200: types.TaskPage}),
    Route("POST", "/v1/tasks/batch", submit_batch, scope="submit", takes=list[types.BatchTask],
          raw=("application/json", NDJSON), gives={200: types.Batch}, adds=True),
    Route("POST", "/v1/tasks/cancel", cancel_where, scope="submit", takes=types.CancelWhere,
          gives={200: types.Cancelled}),
    Route("GET", "/v1/tasks/{id}", get, scope="read", gives={200: types.Task}, problems=(404,)),
    Route("GET", "/v1/tasks/{id}/attempts", attempts, scope="read",
          query=types.ListAttempts, gives={200: types.AttemptPage}, problems=(404,)),
    Route("POST", "/v1/tasks/{id}/cancel", cancel, scope="submit", gives={200: types.Verdict},
          problems=(404,)),
    Route("POST", "/v1/tasks/{id}/reschedule", reschedule, scope="submit",
          takes=types.Reschedule, gives={200: types.Verdict}, problems=(404,)),
    Route("POST", "/v1/tasks/{id}/feedback", feedback, scope="submit", takes=types.Feedback,
          gives={200: types.Verdict}, problems=(404, 409)),
    Route("GET", "/v1/backlog", backlog, scope="read", query=types.ListBacklog,
          gives={200: types.TaskPage}),
    Route("POST", "/v1/backlog/replay", replay_where, scope="submit", takes=types.ReplayWhere,
          gives={200: types.Replayed}),
    Route("POST", "/v1/backlog/{id}/replay", replay, scope="submit", takes=types.ReplayOne,
          optional=True, gives={201: types.Task}, problems=(404, 409)),
]  # fmt: skip
