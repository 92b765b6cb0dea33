"""Arguments of the verbs: targets, ids and filters; and tasks and verdicts as users see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tickwheel.durable.function import TaskFunction
from tickwheel.errors import UnknownTask
from tickwheel.values.task import CancelKey, Filter, State, Task, Verdict, join_tags
from tickwheel.values.times import moment_ms

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from tickwheel.values.json.call import Signature

Target = TaskFunction[..., Any] | str
Progress = bool | Callable[[int], object]
Tag = str | Sequence[str] | None  # a tag that tasks must have, or several: all of them


def valid_id(task_id: object) -> str:
    """Return a task id; raise for a text that cannot be one."""
    if not isinstance(task_id, str):
        raise TypeError(f"a task id must be a str, got {task_id!r:.100} ({type(task_id).__name__})")
    if len(task_id) != 32 or not set(task_id) <= set("0123456789abcdef"):
        raise UnknownTask(f"no task has the id {task_id!r:.100}: an id is 32 hexadecimal digits")
    return task_id


def known_verdicts(ids: list[str], verdicts: list[Verdict | None]) -> list[Verdict]:
    """Return the verdicts; raise UnknownTask for an id without one."""
    found = []
    for task_id, verdict in zip(ids, verdicts, strict=True):
        if verdict is None:
            raise UnknownTask(f"no task has the id {task_id!r:.100}")
        found.append(verdict)
    return found


class TypedTask(Task[Any]):
    """A task whose result has the type that its function returns, not only JSON's types."""

    signature: Signature | None = None

    @property
    def result(self) -> Any:
        """The result, or None."""
        value = super().result
        return value if self.signature is None else self.signature.restore_result(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Task, tuple(self)


def task_view(
    task: Task, now_ms: float, functions: Mapping[str, TaskFunction[..., Any]]
) -> Task[Any]:
    """Return a task as users see it: READY once it is due, and with the result of its function."""
    if task.state is State.DELAY and task.due_at_ms <= now_ms:
        return task._replace(state=State.READY)
    function = functions.get(task.service)
    if task.result_body is None or function is None or function.signature.result_plan is None:
        return task
    typed = TypedTask(*task)
    typed.signature = function.signature
    return typed


def service_name(target: Target) -> str:
    """Return the name of a target's service."""
    return target.name if isinstance(target, TaskFunction) else target


def cancel_key_of(key: str, service: Target | None) -> CancelKey:
    """Return the change that cancels by key, for one service or for all."""
    return CancelKey(key, None if service is None else service_name(service))


def filter_of(
    service: Target | None,
    key: str | None,
    state: State | str | None,
    due_before: datetime | None,
    tag: Tag,
    namespace: str | None = None,
    *,
    bulk: bool = False,
) -> Filter:
    """Return a filter; a bulk change needs a service, a key or a tag."""
    tags = (tag,) if isinstance(tag, str) else (*(tag or ()),)
    join_tags(tags)  # raises for a tag that no task can have
    if bulk and service is None and key is None and not tags:
        raise ValueError("say which tasks: give service, key or tag")
    if state is not None:
        try:
            state = State(state)
        except ValueError:
            raise ValueError(
                f"state must be one of {[str(one) for one in State]}, got {state!r:.100}"
            ) from None
    name = None if service is None else service_name(service)
    due_before_ms = None if due_before is None else moment_ms("due_before", due_before)
    return Filter(state, name, key, due_before_ms, namespace=namespace, tags=tags)
