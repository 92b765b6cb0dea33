"""`Blocking`: the verbs for programs without an event loop, which runs on a thread of its own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tickwheel.durable.background import LoopThread
from tickwheel.durable.verbs import Verbs
from tickwheel.errors import NotStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Self

    from tickwheel.durable.scheduler import Scheduler
    from tickwheel.durable.task import Submission, Task
    from tickwheel.durable.verbs import Target

P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    verb: Callable[Concatenate[Verbs, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Blocking, P], T]:
    """Return a verb that waits for its answer."""

    def wait(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_running()
        return self._thread.run(verb(self._app, *args, **kwargs))

    functools.update_wrapper(wait, verb)
    return wait


class Blocking:
    """A scheduler for sync programs: `with app.blocking() as b`, then its verbs, in any thread."""

    def __init__(self, app: Scheduler) -> None:
        self._app = app
        self._thread = LoopThread()

    def start(self) -> Self:
        """Start the scheduler, on its thread."""
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
        """Store a task, and return it once it is committed; `Scheduler.submit` has the options.

        With `connection=`, a PostgreSQL connection of yours, it is used here, in your thread.
        """
        self._check_running()
        if kwargs.get("connection") is None:
            return self._thread.run(self._app.submit(target, *args, **kwargs))
        submission, connection = self._thread.run(self._submission(target, args, kwargs))
        node = self._app._node
        assert node is not None
        return node.submit.settled(submission, node.store.insert_on_now(connection, submission))

    def _check_running(self) -> None:
        if not self._thread.running:
            raise NotStarted(f"the loop thread is {self._thread.state}: use `with app.blocking()`")

    async def _submission(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Submission, Any]:
        """Make it on the loop's thread: ids are made there, and nowhere else."""
        return await self._app._submission(target, args, kwargs)

    submit_many = blocking(Verbs.submit_many)
    cancel = blocking(Verbs.cancel)
    cancel_key = blocking(Verbs.cancel_key)
    cancel_where = blocking(Verbs.cancel_where)
    reschedule = blocking(Verbs.reschedule)
    reschedule_where = blocking(Verbs.reschedule_where)
    get = blocking(Verbs.get)
    wait = blocking(Verbs.wait)
    list = blocking(Verbs.list)
    backlog = blocking(Verbs.backlog)
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
    feedback = blocking(Verbs.feedback)
    put_service = blocking(Verbs.put_service)
    get_service = blocking(Verbs.get_service)
    delete_service = blocking(Verbs.delete_service)
    services = blocking(Verbs.services)
    known_service = blocking(Verbs.known_service)
    note = blocking(Verbs.note)
    nodes = blocking(Verbs.nodes)
    shards = blocking(Verbs.shards)
    audit = blocking(Verbs.audit)
    counts = blocking(Verbs.counts)
    stats = blocking(Verbs.stats)
