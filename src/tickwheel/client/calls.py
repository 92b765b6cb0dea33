"""The verbs, each as a `Call`: what is asked of the server, and what its answer is read as.

`Client` and `AsyncClient` make their methods of these functions, which touch no network. What
cannot be right whatever the server thinks (both times, a time without a zone) is refused here.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import bounded
from tickwheel.client.encoding import (
    Seconds,
    all_of,
    asked,
    document,
    due,
    given,
    nothing,
    page_of,
    segment,
    stamp,
    stamp_or_none,
    state_or_none,
    verdict_on,
)
from tickwheel.client.errors import error_of
from tickwheel.client.json import written
from tickwheel.client.requests import Answer, Call, Request, document_of, header_text
from tickwheel.client.values import (
    Attempt,
    Audit,
    Document,
    Health,
    Node,
    Page,
    Schedule,
    Service,
    Shard,
    Submitted,
    Task,
    Verdict,
)
from tickwheel.errors import (
    AlreadyReplayed,
    AttemptOver,
    KeyTaken,
    TickwheelError,
    UnknownSchedule,
    UnknownService,
)
from tickwheel.values.json import call as serial
from tickwheel.values.service import check_name
from tickwheel.values.task import TRANSITIONS, Event, State

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from tickwheel.client.requests import Settle

OUTCOMES = ("finished", "failed", "progress")


def submit(
    service: str,
    payload: object = None,
    *,
    delay: Seconds | None = None,
    at: datetime | None = None,
    key: str | None = None,
    on_conflict: str | None = None,
    max_attempts: int | None = None,
    priority: int | None = None,
    timeout: Seconds | None = None,
    deadline: datetime | None = None,
    idempotency_key: str | None = None,
) -> Call[Task]:
    """Store a task, and return it once the server has committed it.

    - `payload` is what JSON can hold; `Json(text)` is sent as it is, byte for byte.
    - `delay` (seconds or a timedelta) or `at` (an aware datetime); with neither it is due now.
    - `key`, unique among the live tasks of a service; `on_conflict` says what to do when it is
      taken: "reject" raises `KeyTaken`, "keep" returns the holder, "replace" changes it.
    - `priority` (higher first), `timeout` (of one attempt, at most the service's),
      `max_attempts`, `deadline` (an aware datetime, after which it is not run any more).
    - `idempotency_key`: the same one again, within a day, stores nothing and returns the same task.
      Without it each call has one of its own, so that tries of one call store one task.
    """
    check_name("service", service)
    options = {
        "service": service,
        "payload": payload,
        **due(delay, at),
        "key": key,
        "on_conflict": on_conflict,
        "max_attempts": max_attempts,
        "priority": priority,
        "timeout": timeout,
        "deadline": stamp_or_none("deadline", deadline),
    }
    name = str(uuid.uuid4()) if idempotency_key is None else idempotency_key
    headers = (("idempotency-key", header_text("idempotency_key", name)),)
    return Call(Request("POST", "/v1/tasks", given(options), headers), Task.of)


def batch(items: Iterable[bytes]) -> Call[list[Submitted | TickwheelError]]:
    """Store many tasks, each as `batch_item` made it; for each the task, or why it was refused."""
    body = b"[" + b",".join(items) + b"]"

    def read(document: Document) -> list[Submitted | TickwheelError]:
        return [batch_answer(item) for item in document["items"]]

    return Call(Request("POST", "/v1/tasks/batch", body), read)


def batch_item(request: Mapping[str, Any], idempotency_key: str) -> bytes:
    """Return one task of a batch as JSON: "service", "payload", and the options of `submit`.

    A key of its own is what makes it safe to send the batch again. What the server does not know is
    the server's to refuse, in the item's place.
    """
    options = {"idempotency_key": idempotency_key, **request}
    if isinstance(options.get("at"), datetime):
        options["due_at"] = stamp("at", options.pop("at"))
    for name in ("due_at", "deadline"):
        if isinstance(options.get(name), datetime):
            options[name] = stamp(name, options[name])
    return written(options)


def batch_answer(item: Document) -> Submitted | TickwheelError:
    """Read what became of one task of a batch."""
    if "problem" in item:
        return error_of(item["problem"], item["status"])
    return Submitted.of(item)


def get(task_id: str) -> Call[Task]:
    """Return a task, live or final."""
    return Call(Request("GET", f"/v1/tasks/{segment(task_id)}"), Task.of)


def attempts_page(
    task_id: str, *, cursor: int | None = None, limit: int = 100
) -> Call[Page[Attempt]]:
    """Return a part of the execution log of a task: one row for each attempt that has ended.

    `next_cursor` of a page is the `cursor` of the next. A page ends earlier than `limit` says when
    its errors are long. A cursor is the number of an attempt: the page begins behind it.
    """
    query = {"cursor": cursor, "limit": bounded("limit", limit, 1, 1_000)}
    path = f"/v1/tasks/{segment(task_id)}/attempts"
    return Call(Request("GET", asked(path, query)), page_of(Attempt.of))


def tasks(
    *,
    state: State | str | None = None,
    service: str | None = None,
    key: str | None = None,
    due_before: datetime | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> Call[Page[Task]]:
    """Return tasks, newest first; `next_cursor` of a page is the `cursor` of the next."""
    query = {
        "state": state_or_none(state),
        "service": service,
        "key": key,
        "due_before": stamp_or_none("due_before", due_before),
        "cursor": cursor,
        "limit": bounded("limit", limit, 1, 1_000),
    }
    return Call(Request("GET", asked("/v1/tasks", query)), page_of(Task.of))


def backlog(
    *,
    state: State | str | None = None,
    service: str | None = None,
    key: str | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> Call[Page[Task]]:
    """Return final tasks, newest first: finished, failed, cancelled."""
    query = {
        "state": state_or_none(state),
        "service": service,
        "key": key,
        "cursor": cursor,
        "limit": bounded("limit", limit, 1, 1_000),
    }
    return Call(Request("GET", asked("/v1/backlog", query)), page_of(Task.of))


def cancel(task_id: str) -> Call[Verdict]:
    """Cancel a task that is not running; the answer says whether this won, and its state.

    When the answer to a first try was lost, the second finds the task cancelled, and has not won.
    """
    return Call(Request("POST", f"/v1/tasks/{segment(task_id)}/cancel"), verdict_on(task_id))


def cancel_key(key: str, service: str | None = None) -> Call[int]:
    """Cancel the unclaimed tasks that have this key, of one service or of all; return how many.

    When the answer to a first try was lost, those that it cancelled are not counted, which is
    logged as a warning.
    """
    return cancel_where(key=key, service=service)


def cancel_where(
    *,
    service: str | None = None,
    key: str | None = None,
    state: State | str | None = None,
    due_before: datetime | None = None,
) -> Call[int]:
    """Cancel all unclaimed tasks of a service, or with a key, that match; return how many.

    When the answer to a first try was lost, those that it cancelled are not counted, which is
    logged as a warning.
    """
    if service is None and key is None:
        raise ValueError("say which tasks: give service or key")
    body = given(
        {
            "key": key,
            "service": service,
            "state": state_or_none(state),
            "due_before": stamp_or_none("due_before", due_before),
        }
    )
    request = Request("POST", "/v1/tasks/cancel", body)
    return Call(request, lambda answer: int(answer["cancelled"]), counts=True)


def reschedule(
    task_id: str, *, delay: Seconds | None = None, at: datetime | None = None
) -> Call[Verdict]:
    """Make a task that is not running due at another time; whether this won, and its state."""
    if delay is None and at is None:
        raise ValueError("give delay or at, one of them: got neither")
    path = f"/v1/tasks/{segment(task_id)}/reschedule"
    return Call(Request("POST", path, given(due(delay, at))), verdict_on(task_id))


def feedback(
    task_id: str,
    outcome: str,
    *,
    attempt: int,
    epoch: int | None = None,
    result: object = None,
    error: str | None = None,
    retry: bool | None = None,
) -> Call[Verdict]:
    """Say how an attempt that was accepted has ended: "finished", "failed", or is in "progress".

    - `attempt` and `epoch` are those of the call; for another attempt than the running one it
      raises `AttemptOver`. When the answer to a first try was lost, the second looks into the
      execution log: an attempt that has ended as told is a success.
    - "finished" takes `result`; "failed" takes `error`, and is tried again unless `retry` is False;
      "progress" gives it the feedback timeout once more.
    """
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome must be one of {OUTCOMES}, got {outcome!r:.100}")
    body = given(
        {
            "outcome": outcome,
            "attempt": bounded("attempt", attempt, 1, 2**31),
            "epoch": epoch,
            "result": result,
            "error": error,
            "retry": retry,
        }
    )
    path = f"/v1/tasks/{segment(task_id)}/feedback"
    settle = ended_so(task_id, attempt, outcome, final=retry is False)
    return Call(Request("POST", path, body), verdict_on(task_id), settle)


def services() -> Call[list[Service]]:
    """Return all services, by name."""
    return Call(Request("GET", "/v1/services"), all_of(Service.of))


def get_service(name: str) -> Call[Service]:
    """Return a service."""
    return Call(Request("GET", f"/v1/services/{segment(name)}"), Service.of)


def put_service(name: str, *, version: int | None = None, **config: object) -> Call[Service]:
    """Make a service, or change the one of this name: `config` is all of its configuration.

    `endpoint`, `timeout`, `max_attempts`, `backoff`, `concurrency`, `rate`, `secret`, `headers`,
    `feedback_timeout`, `breaker`, `enabled`, …: what is left out is the server's default, except
    that `secret` and `headers` stay; None removes them. An `endpoint` on another origin needs both
    given again. To change one thing: read it, and put
    `**service.config | {"enabled": False}, version=service.version`.

    With `version` only while that is the stored one, 0: while there is none of this name; otherwise
    `ServiceChanged` is raised, and another's change is not undone.
    """
    body = serial.encode(config)
    headers = () if version is None else (condition(version),)
    return Call(Request("PUT", f"/v1/services/{segment(name)}", body, headers), Service.of)


def condition(version: int) -> tuple[str, str]:
    """Return the header that makes a change one of this version only, 0: of none."""
    bounded("version", version, 0, 2**63 - 1)
    return ("if-match", f'"{version}"') if version else ("if-none-match", "*")


def delete_service(name: str) -> Call[None]:
    """Delete a service that has no live tasks.

    When the answer to a first try was lost, and the second finds none, it has been deleted.
    """
    request = Request("DELETE", f"/v1/services/{segment(name)}")
    return Call(request, nothing, done_if(UnknownService))


def replay(
    task_id: str,
    *,
    delay: Seconds | None = None,
    at: datetime | None = None,
    force: bool = False,
) -> Call[Task]:
    """Run a final task again, as a new one; a second time only with `force`.

    - When the answer to a first try was lost, the second returns the task that the first has made.
    - With `force` it is not tried again once it was sent: that might run the task twice.
    """
    body = given({**due(delay, at), "force": force or None})
    path = f"/v1/backlog/{segment(task_id)}/replay"
    return Call(Request("POST", path, body, safe=not force), Task.of, replayed_now(task_id))


def replay_where(
    *,
    state: State | str | None = None,
    service: str | None = None,
    key: str | None = None,
    force: bool = False,
) -> Call[int]:
    """Replay all final tasks that match; return how many.

    One of `state`, `service` and `key` must say which; without a state it is the failed ones.
    When the answer to a first try was lost, those that it replayed are not counted, which is
    logged as a warning. With `force` it is not tried again once it was sent.
    """
    if state is None and service is None and key is None:
        raise ValueError("say which tasks: give state, service or key")
    options = {"state": state_or_none(state), "service": service, "key": key}
    body = given({**options, "force": force or None})
    request = Request("POST", "/v1/backlog/replay", body, safe=not force)
    return Call(request, lambda answer: int(answer["replayed"]), counts=True)


def schedules_page(*, cursor: str | None = None, limit: int = 100) -> Call[Page[Schedule]]:
    """Return schedules, by name; `next_cursor` of a page is the `cursor` of the next.

    A page ends earlier than `limit` says when its payloads are large.
    """
    query = {"cursor": cursor, "limit": bounded("limit", limit, 1, 1_000)}
    return Call(Request("GET", asked("/v1/schedules", query)), page_of(Schedule.of))


def get_schedule(name: str) -> Call[Schedule]:
    """Return a schedule."""
    return Call(Request("GET", f"/v1/schedules/{segment(name)}"), Schedule.of)


def put_schedule(
    name: str,
    service: str,
    payload: object = None,
    *,
    cron: str | None = None,
    interval: Seconds | None = None,
    tz: str | None = None,
    missed: str | None = None,
    enabled: bool = True,
    priority: int | None = None,
    timeout: Seconds | None = None,
    max_attempts: int | None = None,
) -> Call[Schedule]:
    """Make a schedule, or change the one of this name; as it was before, nothing happens.

    - One of `cron` (five fields, in the zone `tz`) and `interval` (seconds or a timedelta).
    - `missed`: what to do about firings that no node was there for: run "once" for all of them,
      run "all", or "skip" them.
    """
    if (cron is None) == (interval is None):
        raise ValueError(f"give cron or interval, one of them: got {cron!r} and {interval!r}")
    body = given(
        {
            "service": service,
            "payload": payload,
            "cron": cron,
            "interval": interval,
            "tz": tz,
            "missed": missed,
            "enabled": enabled,
            "priority": priority,
            "timeout": timeout,
            "max_attempts": max_attempts,
        }
    )
    return Call(Request("PUT", f"/v1/schedules/{segment(name)}", body), Schedule.of)


def delete_schedule(name: str) -> Call[None]:
    """Delete a schedule; a firing of it that is still to come is cancelled with it.

    When the answer to a first try was lost, and the second finds none, it has been deleted.
    """
    request = Request("DELETE", f"/v1/schedules/{segment(name)}")
    return Call(request, nothing, done_if(UnknownSchedule))


def nodes() -> Call[list[Node]]:
    """Return the nodes that are known, by name."""
    return Call(Request("GET", "/v1/nodes"), all_of(Node.of))


def shards() -> Call[list[Shard]]:
    """Return all shards."""
    return Call(Request("GET", "/v1/shards"), all_of(Shard.of))


def wheel() -> Call[Document]:
    """Return the wheel of the node that answers: its levels, and how many it holds."""
    return Call(Request("GET", "/v1/wheel"), document)


def stats() -> Call[Document]:
    """Return what the node that answers holds and has done."""
    return Call(Request("GET", "/v1/stats"), document)


def audit(*, cursor: str | None = None, limit: int = 100) -> Call[Page[Audit]]:
    """Return lines of the audit log, newest first."""
    query = {"cursor": cursor, "limit": bounded("limit", limit, 1, 1_000)}
    return Call(Request("GET", asked("/v1/audit", query)), page_of(Audit.of))


def health() -> Call[Health]:
    """Return whether the server takes requests now; one try, whatever the answer."""
    return Call(Request("GET", "/readyz", probe=True), read_health)


# Refusals after a try that may have been done, and what shows that it was.


def done_if(gone: type[TickwheelError]) -> Settle[None]:
    """Take it that what is not there any more was deleted by that try."""

    def settle(error: TickwheelError, _: datetime | None) -> Generator[Call[Any], Any, None]:
        yield from ()
        if not isinstance(error, gone):
            raise error

    return settle


def replayed_now(task_id: str) -> Settle[Task]:
    """Find the task that was made of another since the call began."""

    def settle(error: TickwheelError, since: datetime | None) -> Generator[Call[Any], Any, Task]:
        if since is None or not isinstance(error, AlreadyReplayed | KeyTaken):
            raise error
        name = (yield get(task_id)).replayed_as
        if name is None:
            raise error
        made: Task = yield get(name)
        if made.created_at < since:
            raise error
        return made

    return settle


def ended_so(task_id: str, attempt: int, outcome: str, *, final: bool) -> Settle[Verdict]:
    """Find in the execution log that an attempt has ended as it was told."""
    events = {"finished": [Event.FINISH], "failed": [Event.FAIL], "progress": []}[outcome]
    if outcome == "failed" and not final:
        events.append(Event.RETRY)

    def settle(error: TickwheelError, _: datetime | None) -> Generator[Call[Any], Any, Verdict]:
        if not (events and isinstance(error, AttemptOver)):
            raise error
        page: Page[Attempt] = yield attempts_page(task_id, cursor=attempt - 1, limit=1)
        for row in page.items:
            if row.attempt == attempt and row.event in events:
                return Verdict(task_id, True, TRANSITIONS[State.RUNNING, row.event])
        raise error

    return settle


def read_health(answer: Answer) -> Health:
    """Read an answer that is one whatever its status."""
    return Health(answer.ok, document(document_of(answer)))
