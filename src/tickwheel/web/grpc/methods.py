"""The methods of `TaskService`: decode, call the verb that the HTTP API calls, encode."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.durable.verbs.tasks import watch_task
from tickwheel.v1 import tasks_pb2 as pb
from tickwheel.web import schemas, tasks
from tickwheel.web.grpc import wire
from tickwheel.web.grpc.messages import (
    STATES,
    add_item,
    convert,
    decode,
    feedback_values,
    given,
    list_values,
    submit_values,
    task_message,
)
from tickwheel.web.problems import HttpError
from tickwheel.web.views import redacted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from google.protobuf.message import Message

    from tickwheel.values.task import Idempotency, Task
    from tickwheel.web.route import Call, Reply

SERVICE = "tickwheel.v1.TaskService"
EMPTY_TASK = b"\x0a\x00"  # another form of an empty SubmitRequest: its first field is ""


class Method(NamedTuple):
    """One method: the scope that it needs, and the function that answers it.

    - `large`: it takes messages up to the limit of a batch, others up to that of one task.
    - `creates_tasks`: it is refused while the server stops.
    - `reads`: it reads tasks with their payloads, so that few of them run at once.
    """

    scope: str
    answer: Callable[[Call, bytes], Awaitable[Message]]
    creates_tasks: bool = False
    large: bool = False
    reads: bool = False


async def submit(call: Call, message: bytes) -> Message:
    """Submit a task."""
    request = decode(pb.SubmitRequest, message)
    if request.HasField("idempotency_key"):
        raise HttpError("invalid", "idempotency_key is for a batch: use the metadata of Submit")
    call.body = message
    task, new, repeated = await tasks.store_task(
        call, convert(submit_values(request), schemas.SubmitTask)
    )
    shown = task_message(redacted(task, call.access, own_payload=new))
    return pb.SubmitResponse(task=shown, created=new, repeated_request=repeated)


async def submit_batch(call: Call, message: bytes) -> Message:
    """Submit many tasks."""
    decode_one = partial(decode_item, call, tasks.max_task_bytes(call))
    answers = await tasks.store_batch(call, batch_tasks(message), decode_one)
    response = pb.SubmitBatchResponse()
    for number, answer in enumerate(answers, 1):
        add_item(response, answer)
        if number * tasks.TASK_OVERHEAD_BYTES % tasks.SLICE_BYTES == 0:
            await call.app.bodies.next_slice()
    return response


def batch_tasks(message: bytes) -> Iterator[bytes]:
    """Yield the tasks of a batch, each still as bytes and none of them empty."""
    try:
        for text in wire.tasks_in(message):
            yield text or EMPTY_TASK
    except wire.Malformed as error:
        raise HttpError("bad_request", f"the message cannot be read: {error}") from None


def decode_item(
    call: Call, longest: int, text: bytes
) -> tuple[schemas.BatchTask, Idempotency | None]:
    """Return one task of a batch and its idempotency key; raise if it is invalid."""
    if len(text) > longest:
        raise HttpError("too_large", f"a task may have {longest} bytes, this one has more")
    item = convert(submit_values(decode(pb.SubmitRequest, text)), schemas.BatchTask)
    key = item.idempotency_key
    return item, None if key is None else tasks.item_idempotency(call, key, text)


async def get(call: Call, message: bytes) -> Message:
    """Return a task."""
    task = await own_task(call, decode(pb.GetRequest, message).id)
    return pb.GetResponse(task=task_message(redacted(task, call.access)))


async def own_task(call: Call, task_id: str) -> Task:
    """Return a task in the caller's namespace."""
    return await call.scheduler.get(task_id, namespace=call.access.within)


async def list_tasks(call: Call, message: bytes) -> Message:
    """Return tasks, newest first."""
    query = convert(list_values(decode(pb.ListRequest, message)), schemas.ListTasks)
    page = await call.scheduler.list(**tasks.arguments_of(call, query))
    response, cost = pb.ListResponse(next_cursor=page.next_cursor or ""), 0
    for task in page.items:
        response.tasks.append(task_message(redacted(task, call.access)))
        cost += len(task.body) + tasks.TASK_OVERHEAD_BYTES
        if cost >= tasks.SLICE_BYTES:
            await call.app.bodies.next_slice()
            cost = 0
    return response


async def cancel(call: Call, message: bytes) -> Message:
    """Cancel a task that is not running."""
    call.params = {"id": decode(pb.CancelRequest, message).id}
    return pb.CancelResponse(**verdict(await tasks.cancel(call)))


async def reschedule(call: Call, message: bytes) -> Message:
    """Change the due time of a task that is not running."""
    request = decode(pb.RescheduleRequest, message)
    call.params = {"id": request.id}
    due = convert(given(request, "delay", "due_at"), schemas.Reschedule)
    reply = await tasks.reschedule(call, due)
    return pb.RescheduleResponse(**verdict(reply))


async def feedback(call: Call, message: bytes) -> Message:
    """Report how an accepted attempt ended, or that it goes on."""
    request = decode(pb.FeedbackRequest, message)
    call.params = {"id": request.id}
    reply = await tasks.feedback(call, convert(feedback_values(request), schemas.Feedback))
    return pb.FeedbackResponse(**verdict(reply))


def verdict(reply: Reply) -> dict[str, Any]:
    """Return the fields of a verdict."""
    return {"won": reply.value.won, "state": STATES[reply.value.state]}


async def watch(call: Call, message: bytes) -> AsyncIterator[Message]:
    """Yield a task as it is now and after each change, until it has ended."""
    task_id = decode(pb.WatchRequest, message).id
    async for task in watch_task(call.scheduler, task_id, namespace=call.access.within):
        yield pb.WatchResponse(task=task_message(redacted(task, call.access)))


METHODS = {
    "Submit": Method("submit", submit, creates_tasks=True),
    "SubmitBatch": Method("submit", submit_batch, creates_tasks=True, large=True),
    "Get": Method("read", get, reads=True),
    "List": Method("read", list_tasks, reads=True),
    "Cancel": Method("submit", cancel),
    "Reschedule": Method("submit", reschedule),
    "Feedback": Method("submit", feedback),
}
WATCH = "Watch"
WATCH_SCOPE = "read"
