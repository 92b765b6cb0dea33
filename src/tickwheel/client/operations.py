"""The operations of the API, each a function that returns a `Call`: its request and its reader.

`Client` and `AsyncClient` turn these functions into methods; nothing here touches the network.
Arguments that no server can accept (both times, a time without a zone) are refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.arguments import bounded
from tickwheel.client.encoding import (
    Seconds,
    due_fields,
    encode_given,
    format_time_or_none,
    list_reader,
    page_reader,
    path_segment,
    path_with_query,
    read_document,
    read_nothing,
    state_or_none,
    verdict_reader,
)
from tickwheel.client.errors import error_of
from tickwheel.client.requests import Answer, Call, Request, decode_body
from tickwheel.client.task import Task
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
from tickwheel.values.json.encode import encode
from tickwheel.values.task import TRANSITIONS, Event, State, join_tags

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from datetime import datetime

    from tickwheel.client.requests import Settle

OUTCOMES = ("finished", "failed", "progress")


def batch(items: Iterable[bytes]) -> Call[list[Submitted | TickwheelError]]:
    """Store many tasks, encoded by `batch_item`; return for each the task or its error."""
    body = b"[" + b",".join(items) + b"]"

    def read(document: Document) -> list[Submitted | TickwheelError]:
        return [batch_answer(item) for item in document["items"]]

    return Call(Request("POST", "/v1/tasks/batch", body), read)


def batch_answer(item: Document) -> Submitted | TickwheelError:
    """Read the answer to one task of a batch."""
    if "problem" in item:
        return error_of(item["problem"], item["status"])
    return Submitted.of(item)


def get(task_id: str) -> Call[Task]:
    """Return a task, live or final."""
    return Call(Request("GET", f"/v1/tasks/{path_segment(task_id)}"), Task.of)


def attempts_page(
    task_id: str, *, cursor: int | None = None, limit: int = 100
) -> Call[Page[Attempt]]:
    """Return a page of a task's execution log: one row for each attempt that has ended.

    `next_cursor` of a page is the `cursor` of the next. A page with long errors has fewer than
    `limit` rows. A cursor is the number of an attempt: the page starts after it.
    """
    query = {"cursor": cursor, "limit": bounded("limit", limit, 1, 1_000)}
    path = f"/v1/tasks/{path_segment(task_id)}/attempts"
    return Call(Request("GET", path_with_query(path, query)), page_reader(Attempt.of))


def tasks(
    *,
    state: State | str | None = None,
    service: str | None = None,
    key: str | None = None,
    due_before: datetime | None = None,
    due_after: datetime | None = None,
    tag: str | Sequence[str] | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> Call[Page[Task]]:
    """Return tasks, newest first; `next_cursor` of a page is the `cursor` of the next.

    `due_after` includes that time, `due_before` does not.
    `tag`: one tag, or several, of which a task must have all.
    """
    query = {
        "state": state_or_none(state),
        "service": service,
        "key": key,
        "due_before": format_time_or_none("due_before", due_before),
        "due_after": format_time_or_none("due_after", due_after),
        "tag": list_of_tags(tag),
        "cursor": cursor,
        "limit": bounded("limit", limit, 1, 1_000),
    }
    return Call(Request("GET", path_with_query("/v1/tasks", query)), page_reader(Task.of))


def backlog(
    *,
    state: State | str | None = None,
    service: str | None = None,
    key: str | None = None,
    tag: str | Sequence[str] | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> Call[Page[Task]]:
    """Return final tasks, newest first: finished, failed, cancelled."""
    query = {
        "state": state_or_none(state),
        "service": service,
        "key": key,
        "tag": list_of_tags(tag),
        "cursor": cursor,
        "limit": bounded("limit", limit, 1, 1_000),
    }
    return Call(Request("GET", path_with_query("/v1/backlog", query)), page_reader(Task.of))


def list_of_tags(tag: str | Sequence[str] | None) -> list[str] | None:
    """Return the tags of a filter, one or several, or None without any."""
    tags = [tag] if isinstance(tag, str) else [*(tag or ())]
    return tags if join_tags(tags) else None


def cancel(task_id: str) -> Call[Verdict]:
    """Cancel a task that is not running; return whether this won, and the task's state.

    If the answer to a first try was lost, the retry finds the task cancelled, and has not won.
    """
    path = f"/v1/tasks/{path_segment(task_id)}/cancel"
    return Call(Request("POST", path), verdict_reader(task_id))


def cancel_key(key: str, service: str | None = None) -> Call[int]:
    """Cancel the unclaimed tasks with this key, of one service or of all; return how many.

    If the answer to a first try was lost, the tasks that it cancelled are not counted, and a
    warning is logged.
    """
    return cancel_where(key=key, service=service)


def cancel_where(
    *,
    service: str | None = None,
    key: str | None = None,
    state: State | str | None = None,
    due_before: datetime | None = None,
    tag: str | Sequence[str] | None = None,
) -> Call[int]:
    """Cancel all matching unclaimed tasks; return how many.

    At least one of `service`, `key` and `tag` is required. Of several tags, a task must have all.

    If the answer to a first try was lost, the tasks that it cancelled are not counted, and a
    warning is logged.
    """
    if service is None and key is None and not tag:
        raise ValueError("give service, key or tag, to choose the tasks")
    body = encode_given(
        {
            "key": key,
            "service": service,
            "state": state_or_none(state),
            "due_before": format_time_or_none("due_before", due_before),
            "tag": list_of_tags(tag),
        }
    )
    request = Request("POST", "/v1/tasks/cancel", body)
    return Call(request, lambda answer: int(answer["cancelled"]), counts=True)


def reschedule(
    task_id: str, *, delay: Seconds | None = None, at: datetime | None = None
) -> Call[Verdict]:
    """Change the due time of a task that is not running; return whether this won, and its state."""
    if delay is None and at is None:
        raise ValueError("give either delay or at: got neither")
    path = f"/v1/tasks/{path_segment(task_id)}/reschedule"
    return Call(Request("POST", path, encode_given(due_fields(delay, at))), verdict_reader(task_id))


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
    """Report the outcome of an accepted attempt: "finished", "failed" or still in "progress".

    - `attempt` and `epoch` are those of the call; an attempt that is not the running one raises
      `AttemptOver`. If the answer to a first try was lost, the retry looks into the execution
      log: an attempt that has ended as reported is a success.
    - "finished" takes `result`; "failed" takes `error`, and is retried unless `retry` is False;
      "progress" restarts the feedback timeout.
    """
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome must be one of {OUTCOMES}, got {outcome!r:.100}")
    body = encode_given(
        {
            "outcome": outcome,
            "attempt": bounded("attempt", attempt, 1, 2**31),
            "epoch": epoch,
            "result": result,
            "error": error,
            "retry": retry,
        }
    )
    path = f"/v1/tasks/{path_segment(task_id)}/feedback"
    settle = find_ended_attempt(task_id, attempt, outcome, final=retry is False)
    return Call(Request("POST", path, body), verdict_reader(task_id), settle)


def services() -> Call[list[Service]]:
    """Return all services, by name."""
    return Call(Request("GET", "/v1/services"), list_reader(Service.of))


def get_service(name: str) -> Call[Service]:
    """Return a service."""
    return Call(Request("GET", f"/v1/services/{path_segment(name)}"), Service.of)


def put_service(name: str, *, version: int | None = None, **config: object) -> Call[Service]:
    """Create or replace a service: `config` is its whole configuration.

    `endpoint`, `timeout`, `max_attempts`, `backoff`, `concurrency`, `rate`, `secret`, `headers`,
    `feedback_timeout`, `breaker`, `enabled`, `protocol`, `confirmed`, `cloudevents`, …: an omitted
    field gets the server's default, except that `secret` and `headers` stay; None removes them. An
    `endpoint` on another origin needs both given again. To change one field, read the service and
    put `**service.config | {"enabled": False}, version=service.version`.

    `version` makes the change conditional: it must be the stored version, or 0 if no service has
    this name. Otherwise `ServiceChanged` is raised, so that no one else's change is undone.
    """
    body = encode(config)
    headers = () if version is None else (version_condition(version),)
    return Call(Request("PUT", f"/v1/services/{path_segment(name)}", body, headers), Service.of)


def version_condition(version: int) -> tuple[str, str]:
    """Return the header that requires this stored version; 0: the service must not exist."""
    bounded("version", version, 0, 2**63 - 1)
    return ("if-match", f'"{version}"') if version else ("if-none-match", "*")


def delete_service(name: str) -> Call[None]:
    """Delete a service that has no live tasks.

    If the answer to a first try was lost and the retry finds no service, the call succeeds.
    """
    request = Request("DELETE", f"/v1/services/{path_segment(name)}")
    return Call(request, read_nothing, done_if_gone(UnknownService))


def replay(
    task_id: str,
    *,
    delay: Seconds | None = None,
    at: datetime | None = None,
    force: bool = False,
) -> Call[Task]:
    """Run a final task again, as a new one; a second time only with `force`.

    - If the answer to a first try was lost, the retry returns the task that the first created.
    - With `force` there is no retry once the request was sent: it might run the task twice.
    """
    body = encode_given({**due_fields(delay, at), "force": force or None})
    path = f"/v1/backlog/{path_segment(task_id)}/replay"
    return Call(Request("POST", path, body, safe=not force), Task.of, find_replay(task_id))


def replay_where(
    *,
    state: State | str | None = None,
    service: str | None = None,
    key: str | None = None,
    tag: str | Sequence[str] | None = None,
    force: bool = False,
) -> Call[int]:
    """Replay all final tasks that match; return how many.

    At least one of `state`, `service`, `key` and `tag` is required; `state` defaults to failed. If
    the answer to a first try was lost, the tasks that it replayed are not counted, and a warning is
    logged. With `force` there is no retry once the request was sent.
    """
    if state is None and service is None and key is None and not tag:
        raise ValueError("give state, service, key or tag, to choose the tasks")
    options = {"state": state_or_none(state), "service": service, "key": key}
    body = encode_given({**options, "tag": list_of_tags(tag), "force": force or None})
    request = Request("POST", "/v1/backlog/replay", body, safe=not force)
    return Call(request, lambda answer: int(answer["replayed"]), counts=True)


def schedules_page(*, cursor: str | None = None, limit: int = 100) -> Call[Page[Schedule]]:
    """Return schedules, by name; `next_cursor` of a page is the `cursor` of the next.

    A page with large payloads has fewer than `limit` schedules.
    """
    query = {"cursor": cursor, "limit": bounded("limit", limit, 1, 1_000)}
    return Call(Request("GET", path_with_query("/v1/schedules", query)), page_reader(Schedule.of))


def get_schedule(name: str) -> Call[Schedule]:
    """Return a schedule."""
    return Call(Request("GET", f"/v1/schedules/{path_segment(name)}"), Schedule.of)


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
    """Create or replace a schedule; putting an unchanged one is a no-op.

    - Either `cron` (five fields, in the zone `tz`) or `interval` (seconds or a timedelta).
    - `missed`: what to do about firings missed while no node was running: run "once" for all of
      them, run "all", or "skip" them.
    """
    if (cron is None) == (interval is None):
        raise ValueError(f"give either cron or interval: got {cron!r} and {interval!r}")
    body = encode_given(
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
    return Call(Request("PUT", f"/v1/schedules/{path_segment(name)}", body), Schedule.of)


def delete_schedule(name: str) -> Call[None]:
    """Delete a schedule, and cancel its next firing.

    If the answer to a first try was lost and the retry finds no schedule, the call succeeds.
    """
    request = Request("DELETE", f"/v1/schedules/{path_segment(name)}")
    return Call(request, read_nothing, done_if_gone(UnknownSchedule))


def nodes() -> Call[list[Node]]:
    """Return the known nodes, by name."""
    return Call(Request("GET", "/v1/nodes"), list_reader(Node.of))


def drain_node(name: str) -> Call[None]:
    """Move the shards of a node to the others; it finishes its calls and keeps running.

    This holds until `undrain_node`, or until the node's process ends.
    """
    return Call(Request("POST", f"/v1/nodes/{path_segment(name)}/drain"), read_nothing)


def undrain_node(name: str) -> Call[None]:
    """Let a draining node have shards again."""
    return Call(Request("DELETE", f"/v1/nodes/{path_segment(name)}/drain"), read_nothing)


def shards() -> Call[list[Shard]]:
    """Return all shards."""
    return Call(Request("GET", "/v1/shards"), list_reader(Shard.of))


def wheel(*, cluster: bool = False) -> Call[Document]:
    """Return the wheel of the node that answers: its levels, and how many tasks it holds.

    With `cluster`, the sum of all nodes' wheels; `by_node` has each node, and those that could not
    be asked with their `error`.
    """
    return Call(Request("GET", figures_path("/v1/wheel", cluster=cluster)), read_document)


def stats(*, cluster: bool = False) -> Call[Document]:
    """Return the figures of the node that answers: what it holds and has done.

    With `cluster`, those of all nodes together; see `wheel`.
    """
    return Call(Request("GET", figures_path("/v1/stats", cluster=cluster)), read_document)


def figures_path(path: str, *, cluster: bool) -> str:
    """Return the path for the figures of one node or of all."""
    return path_with_query(path, {"scope": "cluster"}) if cluster else path


def audit(*, cursor: str | None = None, limit: int = 100) -> Call[Page[Audit]]:
    """Return a page of the audit log, newest first."""
    query = {"cursor": cursor, "limit": bounded("limit", limit, 1, 1_000)}
    return Call(Request("GET", path_with_query("/v1/audit", query)), page_reader(Audit.of))


def health() -> Call[Health]:
    """Return whether the server takes requests now; there are no retries."""
    return Call(Request("GET", "/readyz", probe=True), read_health)


# A refusal after a try that may have succeeded: how to find out whether it did.


def done_if_gone(gone: type[TickwheelError]) -> Settle[None]:
    """Accept that the earlier try deleted it, if it is gone."""

    def settle(error: TickwheelError, _: datetime | None) -> Generator[Call[Any], Any, None]:
        yield from ()
        if not isinstance(error, gone):
            raise error

    return settle


def find_replay(task_id: str) -> Settle[Task]:
    """Find the replay that was created since the call began."""

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


def find_ended_attempt(task_id: str, attempt: int, outcome: str, *, final: bool) -> Settle[Verdict]:
    """Find in the execution log that an attempt has ended as reported."""
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
    """Read an answer of any status."""
    return Health(answer.ok, read_document(decode_body(answer)))
