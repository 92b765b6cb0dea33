"""`Blocking`: the verbs for programs without an event loop; it runs one in a thread."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tickwheel.durable.background import LoopThread
from tickwheel.durable.verbs import Verbs
from tickwheel.durable.verbs.arguments import cancel_key_of, known_verdicts, valid_id
from tickwheel.errors import NotStarted
from tickwheel.values.task import Cancel, CancelKey

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import datetime, timedelta
    from typing import Self

    from tickwheel.durable.scheduler import Scheduler
    from tickwheel.durable.steps.node import Node
    from tickwheel.durable.verbs.arguments import Target
    from tickwheel.durable.verbs.tasks import Verdicts
    from tickwheel.values.task import Reschedule, Task, Verdict

P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    verb: Callable[Concatenate[Verbs, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Blocking, P], T]:
    """Return a verb that blocks until its result is there."""

    def wait(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_running()
        return self._run(verb(self._app, *args, **kwargs))

    functools.update_wrapper(wait, verb)
    return wait


def submit_sync(
    app: Scheduler,
    run: Callable[[Coroutine[Any, Any, Any]], Any],
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Task:
    """Submit from a thread without a loop; `run` runs a coroutine on the scheduler's loop.

    The user's connection is used in the calling thread.
    """
    task: Task
    if kwargs.get("connection") is None:
        task = run(app.submit(target, *args, **kwargs))
        return task
    node = app._node or app.node  # the caller may have an event loop of its own
    submission, connection = run(app._submission(node, target, args, kwargs))
    if connection is None:
        task = run(node.submit.submit(submission))
        return task
    return node.submit.task_of(submission, node.store.within_now(connection, submission))


async def call_on_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in the loop's thread, to which the node's state belongs."""
    return function(*args, **kwargs)


class Blocking:
    """A scheduler for sync programs: `with app.blocking() as b`, then its verbs, in any thread.

    If the scheduler runs already, as in a plain task function, the verbs work without `start`.
    """

    def __init__(self, app: Scheduler) -> None:
        self._app = app
        self._thread = LoopThread()

    def start(self) -> Self:
        """Start the scheduler in its thread."""
        if self._thread.running:
            raise RuntimeError("the scheduler has been started already")
        self._thread.start()
        try:
            self._thread.run(self._app.start())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop the scheduler, and end its thread."""
        try:
            self._thread.run(self._app.stop())
        finally:
            self._thread.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit(self, target: Target, /, *args: Any, **kwargs: Any) -> Task:
        """Store a task and return it after the commit; `Scheduler.submit` has the options.

        This verb and those below use your `connection=` in your thread.
        """
        self._check_running()
        return submit_sync(self._app, self._run, target, args, kwargs)

    def cancel(self, task_id: str, *, connection: Any = None) -> Verdict:
        """Cancel a task that is not running; return whether that worked, and its state."""
        connection = self._user_connection(connection)
        if connection is None:
            return self._run(self._app.cancel(task_id))
        return self._verdicts(connection, Cancel((valid_id(task_id),)))[0]

    def cancel_key(
        self, key: str, service: Target | None = None, *, connection: Any = None
    ) -> Verdicts:
        """Cancel the live tasks with this key, of one service or of all; return their verdicts."""
        connection = self._user_connection(connection)
        if connection is None:
            return self._run(self._app.cancel_key(key, service))
        return self._verdicts(connection, cancel_key_of(key, service))

    def reschedule(
        self,
        task_id: str,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        connection: Any = None,
    ) -> Verdict:
        """Move a task that is not running; return whether that worked, and its state."""
        connection = self._user_connection(connection)
        if connection is None:
            return self._run(self._app.reschedule(task_id, delay=delay, at=at))
        change = self._run(call_on_loop(self._app._reschedule, task_id, delay, at))
        return self._verdicts(connection, change)[0]

    def _verdicts(self, connection: Any, change: Cancel | CancelKey | Reschedule) -> Verdicts:
        """Make a change with the user's connection, in this thread."""
        verdicts = self._node().store.within_now(connection, change)
        return (
            verdicts if isinstance(change, CancelKey) else known_verdicts([*change.ids], verdicts)
        )

    def _user_connection(self, connection: Any) -> Any:
        self._check_running()
        if connection is None:
            return None
        return self._run(call_on_loop(self._app._user_connection, connection))

    def _node(self) -> Node:
        node = self._app._node
        assert node is not None
        return node

    def _run(self, verb: Coroutine[Any, Any, T]) -> T:
        """Run a verb on the loop of the scheduler, wherever that was started."""
        return self._thread.run(verb) if self._thread.running else self._app.run(verb)

    def _check_running(self) -> None:
        if not (self._thread.running or self._app.running):
            raise NotStarted(f"the loop thread is {self._thread.state}: use `with app.blocking()`")

    submit_many = blocking(Verbs.submit_many)
    cancel_where = blocking(Verbs.cancel_where)
    reschedule_where = blocking(Verbs.reschedule_where)
    get = blocking(Verbs.get)
    wait = blocking(Verbs.wait)
    run_due = blocking(Verbs.run_due)
    list = blocking(Verbs.list)
    backlog = blocking(Verbs.backlog)
    due_counts = blocking(Verbs.due_counts)
    attempts = blocking(Verbs.attempts)
    attempts_page = blocking(Verbs.attempts_page)
    replay = blocking(Verbs.replay)
    replay_where = blocking(Verbs.replay_where)
    put_schedule = blocking(Verbs.put_schedule)
    store_schedule = blocking(Verbs.store_schedule)
    delete_schedule = blocking(Verbs.delete_schedule)
    get_schedule = blocking(Verbs.get_schedule)
    schedules = blocking(Verbs.schedules)
    schedules_page = blocking(Verbs.schedules_page)
    firings = blocking(Verbs.firings)
    feedback = blocking(Verbs.feedback)
    put_service = blocking(Verbs.put_service)
    get_service = blocking(Verbs.get_service)
    delete_service = blocking(Verbs.delete_service)
    services = blocking(Verbs.services)
    known_service = blocking(Verbs.known_service)
    try_call = blocking(Verbs.try_call)
    note = blocking(Verbs.note)
    nodes = blocking(Verbs.nodes)
    drain_node = blocking(Verbs.drain_node)
    undrain_node = blocking(Verbs.undrain_node)
    shards = blocking(Verbs.shards)
    tokens = blocking(Verbs.tokens)
    create_token = blocking(Verbs.create_token)
    revoke_token = blocking(Verbs.revoke_token)
    audit = blocking(Verbs.audit)
    counts = blocking(Verbs.counts)
    stats = blocking(Verbs.stats)
    metrics = blocking(Verbs.metrics)
