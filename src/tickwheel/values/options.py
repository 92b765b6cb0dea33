"""The options of a submit: declared, checked, and compared, once for every API. Pure.

A new option is a line in `TaskOptions` and `TaskFields`, its check in `task_fields`, and its place
in `new_task`. Each API adds its own form: the type over HTTP, the flag of the command line, the
parameter of the client.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from tickwheel.arguments import bounded
from tickwheel.values.json.encode import encode
from tickwheel.values.outcome import milliseconds
from tickwheel.values.service import check_name, seconds_of
from tickwheel.values.task import State, Task, join_tags
from tickwheel.values.times import deadline_ms, later_ms, moment_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tickwheel.values.service import Service

    # The fields of a task that come from the options of its submit: key, due_at_ms, priority,
    # max_attempts, timeout_ms, deadline_at_ms, tags_text. A named tuple costs twice the time.
    # `Submit.build` reads the first two; a new one goes to the end.
    TaskFields = tuple[str | None, int, int, int, int | None, int | None, str | None]

F = TypeVar("F", bound="Callable[..., Any]")

ON_CONFLICT = ("reject", "replace", "keep")


class TaskOptions(TypedDict, total=False):
    """The options that become fields of the task."""

    delay: float | timedelta | None
    at: datetime | None
    key: str | None
    priority: int
    timeout: float | timedelta | None
    deadline: float | timedelta | datetime | None
    max_attempts: int | None
    tags: Sequence[str] | None


class Options(TaskOptions, total=False):
    """Options of a submit:

    - `delay` (seconds or a timedelta) or `at` (an aware datetime); with neither it is due now.
    - `key`, unique among the live tasks of a service; `on_conflict` says what to do when it is
      taken: "reject" raises `KeyTaken`, "keep" returns the holder, "replace" changes it.
    - `priority` (higher first), `timeout` (of one attempt, at most the service's),
      `max_attempts`, `deadline` (a moment, or seconds from now, after which it is not run any
      more).
    - `tags`: up to 8 strings to find the task by, each of 1 to 32 ASCII letters, digits, `_`, `-`,
      `.` or `:`.
    - `idempotency_key`: the same one again within 24 hours, with the same arguments and
      options, stores nothing and returns the task that the first one stored; with others it
      raises `KeyReused`.
    - `connection`: the task is stored by this PostgreSQL connection or SQLAlchemy session of
      yours, in your transaction, and exists when that commits.
    """

    on_conflict: Literal["reject", "keep", "replace"]
    idempotency_key: str | None
    connection: Any


OPTIONS = frozenset(Options.__annotations__)


def with_options(method: F) -> F:
    """Add the options to the docstring of a method that takes them."""
    if method.__doc__ and Options.__doc__:  # python -OO has neither
        method.__doc__ = f"{cleandoc(method.__doc__)}\n\n{cleandoc(Options.__doc__)}"
    return method


def task_fields(  # noqa: PLR0917
    service: Service,
    now: float,
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    key: str | None = None,
    priority: int = 0,
    timeout: float | timedelta | None = None,
    deadline: float | timedelta | datetime | None = None,
    max_attempts: int | None = None,
    tags: Sequence[str] | None = None,
) -> TaskFields:
    """Return the fields that options give a task; raise if an option is invalid.

    The options have the order of `TaskOptions`.
    """
    if delay is not None and at is not None:
        raise ValueError(f"give delay or at, not both: got delay={delay!r} and at={at!r}")
    due_at_ms = (
        moment_ms("at", at)
        if at is not None
        else later_ms(now, "delay", 0 if delay is None else delay)
    )
    if key is not None:
        check_name("key", key)
    if priority != 0 or type(priority) is not int:
        bounded("priority", priority, -32_768, 32_767)
    attempts = service.max_attempts
    if max_attempts is not None:
        attempts = bounded("max_attempts", max_attempts, 1, 10_000)
    timeout_ms = None if timeout is None else bounded_timeout_ms(timeout, service)
    deadline_at_ms = None if deadline is None else deadline_ms(now, deadline, due_at_ms)
    tags_text = None if tags is None else join_tags(tags)
    return key, due_at_ms, priority, attempts, timeout_ms, deadline_at_ms, tags_text


def new_task(
    task_id: str,
    service: str,
    body: bytes,
    shard: int,
    now_ms: int,
    fields: TaskFields,
    trace: str | None,
) -> Task:
    """Return a task to store, with the fields that its options gave."""
    key, due_at_ms, priority, max_attempts, timeout_ms, deadline_at_ms, tags_text = fields
    # By position: keywords would double the cost.
    return Task(
        task_id, service, body, key, State.DELAY, due_at_ms, shard, priority, 0, 0, max_attempts,
        timeout_ms, deadline_at_ms, now_ms, now_ms, None, tags_text, trace,
    )  # fmt: skip


def check_on_conflict(on_conflict: str) -> None:
    """Raise unless `on_conflict` says what to do when a key is taken."""
    if on_conflict not in ON_CONFLICT:
        raise ValueError(f"on_conflict must be one of {ON_CONFLICT}, got {on_conflict!r:.100}")


def bounded_timeout_ms(timeout: float | timedelta, service: Service) -> int:
    """Return a task's timeout; raise unless it is above 0 and at most its service's."""
    timeout_ms = milliseconds("timeout", timeout)
    if timeout_ms == 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout!r}")
    if service.timeout is not None and timeout_ms > service.timeout_ms:
        seconds = seconds_of(timeout)
        raise ValueError(
            f"timeout must be at most the timeout of {service.name!r}, {service.timeout:.15g} s,"
            f" got {seconds:.15g} s"
        )
    return timeout_ms


def request_bytes(service: str, body: bytes, options: Mapping[str, Any]) -> bytes:
    """Return a request as bytes: equal for equal requests, in any process."""
    given = [[name, plain_option(options[name])] for name in sorted(options)]
    return encode([service, [one for one in given if one[1] is not None]]) + b"\n" + body


def plain_option(value: Any) -> Any:
    """Return an option in a form in which 60, 60.0 and a timedelta of a minute are equal."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, list | tuple):
        return [plain_option(item) for item in value]
    return value if value is None or isinstance(value, str) else float(value)
