"""A scheduler in memory, and what it was asked to do, for assertions."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tickwheel.clock import Clock
    from tickwheel.durable import Scheduler, Task

PAGE = 1_000
TIME_AND_SHARD = 16  # digits of an id: tasks of one millisecond are in the order of the others


class Submitted(NamedTuple):
    """One submit.

    - `function`: the name of the task function, or of the service.
    - `arguments`: of the function, by name; the payload if it is not a function of this scheduler.
    - `delay`: in seconds, from the submit until the task is due now: a retry is due later.
    """

    function: str
    arguments: Any
    delay: float
    task: Task


async def submitted(app: Scheduler, function: str | None = None) -> list[Submitted]:
    """Return every task in the store of a scheduler, or those of one function, oldest first.

    Without an event loop: `app.run(submitted(app))`.
    """
    tasks: list[Task] = []
    cursor: str | None = None
    while True:
        page = await app.list(service=function, cursor=cursor, limit=PAGE)
        tasks += page.items
        cursor = page.next_cursor
        if cursor is None:
            break
    tasks.sort(key=lambda task: (task.created_at_ms, task.id[TIME_AND_SHARD:]))
    return [
        Submitted(
            task.service,
            arguments_of(app, task),
            (task.due_at_ms - task.created_at_ms) / 1000,
            task,
        )
        for task in tasks
    ]


@contextmanager
def scheduler_in_memory(app: object, clock: Clock) -> Iterator[Scheduler]:
    """Move a scheduler to memory for a block, or give a new one if `app` is None; not started."""
    from tickwheel.durable import Scheduler  # noqa: PLC0415 - `testing` is for timers as well

    if app is None:
        yield Scheduler("memory://", clock=clock, dispatch=False)
        return
    if not isinstance(app, Scheduler):
        raise TypeError(f"tickwheel_app names a Scheduler as module:name, this is {app!r:.100}")
    before = app._binding
    app.rebind("memory://", clock=clock, dispatch=False)
    yield app
    app._bind(before)


def arguments_of(app: Scheduler, task: Task) -> Any:
    """Return the arguments of the call that a task makes."""
    function = app._functions.get(task.service)
    return task.payload if function is None else function.signature.named(task.body)
