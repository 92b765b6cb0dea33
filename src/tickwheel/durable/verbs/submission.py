"""Submitting tasks: one, many, or within a transaction of the user's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.clock import ManualClock
from tickwheel.durable.administration import LOCAL, Administration
from tickwheel.durable.channel import Answer
from tickwheel.durable.function import Request, TaskFunction
from tickwheel.durable.verbs.awaited import must_await
from tickwheel.errors import UnknownService
from tickwheel.progress import show_progress
from tickwheel.values.json.encode import encode
from tickwheel.values.options import OPTIONS, request_bytes, with_options
from tickwheel.values.service import Service, check_name
from tickwheel.values.task import Event, Idempotency, RepeatedRequest, Task, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tickwheel.clock import Clock
    from tickwheel.durable.steps.node import Node
    from tickwheel.durable.steps.submit import SubmitError
    from tickwheel.durable.verbs.arguments import Progress, Target
    from tickwheel.values.task import Submission


TRY_SECONDS = 30.0  # the longest that a test call of a service takes


class Submitted(NamedTuple):
    """The task that a submit stored or found.

    - `new`: this submit created the task; otherwise it existed before.
    - `repeated`: an earlier submit with the same idempotency key stored it.
    """

    task: Task
    new: bool
    repeated: bool


class SubmissionVerbs(Administration):
    """The verbs that submit tasks."""

    _functions: dict[str, TaskFunction[..., Any]]
    _clock: Clock | None

    @must_await
    @with_options
    async def submit(self, target: Target, /, *args: Any, **kwargs: Any) -> Task:
        """Store a task and return it after the commit.

        `target` is a task function, with its arguments, or a name with one payload.
        """
        node = self._running_node()
        submission, connection = await self._submission(node, target, args, kwargs)
        if connection is not None:
            return node.submit.task_of(submission, await node.store.within(connection, submission))
        answer = await node.submit.store_one(submission)
        return await node.submit.read_whole(node.submit.task_of(submission, answer), answer)

    @must_await
    async def submit_many(
        self, requests: Iterable[Request | Mapping[str, Any]], *, progress: Progress = False
    ) -> list[Task | SubmitError]:
        """Store many tasks, a thousand at a time, and return them in order.

        A request comes from `function.request(...)`, or is a mapping: "service", "payload", and
        options. A refused request has its error in the result: `KeyTaken`, or `KeyReused` for its
        idempotency key. An invalid request raises, and the thousands before it are stored. A task
        that existed before comes without its payload and result, which `get` reads.
        """
        node = self._running_node()
        known = requests if isinstance(requests, Sized) else [*requests]
        if not node.services.keys() >= set(map(target_name, known)):
            await self._reload_services()
        with show_progress(progress, "submit", len(known)) as show:
            return await store_submissions(self, self._submissions(node, known), show)

    async def _submission(
        self, node: Node, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Submission, Any]:
        """Return the submission, and the user's connection or None."""
        options = {name: kwargs.pop(name) for name in [*kwargs] if name in OPTIONS}
        service, body = self._call(target, args, kwargs)
        if service not in node.services and service not in self._functions:
            await self._reload_services()
        connection = options.pop("connection", None)
        if connection is not None:
            connection = self._user_connection(connection)
        any_node = connection is not None
        return self._build(node, service, body, options, any_node=any_node), connection

    def _submissions(
        self, node: Node, requests: Iterable[Request | Mapping[str, Any]]
    ) -> Iterator[Submission]:
        for number, request in enumerate(requests):
            try:
                if isinstance(request, Request):
                    yield self._build(node, *request)
                else:
                    options = dict(request)
                    service = options.pop("service")
                    payload = options.pop("payload", None)
                    yield self._build(node, *self._call(service, (payload,), {}), options)
            except (LookupError, TypeError, ValueError) as error:
                error.add_note(f"in request {number} of submit_many")
                raise

    def _call(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, bytes]:
        """Return the service's name and the payload for a call."""
        if isinstance(target, TaskFunction):
            if self._functions.get(target.name) is not target:
                raise UnknownService(f"{target!r} belongs to another scheduler")
            return target.name, target.pack(args, kwargs)
        if callable(target):
            raise TypeError(
                f"the target {target!r:.100} is not a task function: decorate it with @app.task"
            )
        check_name("target", target)
        if kwargs or len(args) > 1:
            raise TypeError(
                f"submit({target!r}, payload, ...) takes one payload"
                + (f", and no option {min(kwargs)!r}" if kwargs else f", got {len(args)}")
            )
        return target, encode(args[0] if args else None)

    async def try_call(
        self, name: str, body: bytes, *, actor: str = LOCAL, request: str = ""
    ) -> Answer:
        """Call a service once, now, and return its answer; no task is stored, nothing is retried.

        It needs no permit and works for a service that is paused: a person wants to know whether
        the service answers.
        """
        node = self._running_node()
        service = await self.known_service(name)
        if service is None:
            raise UnknownService(f"no service is named {name!r:.100}")
        channel = node.channels.get(service.protocol)
        if channel is None or service.protocol == "local":
            raise ValueError(f"{name!r} is a task function: only services can be tried")
        task = self._build(node, name, body, {"max_attempts": 1}).task._replace(attempt=1)
        try:
            async with asyncio.timeout(min(service.timeout or TRY_SECONDS, TRY_SECONDS)):
                answer = await channel.send(task, service, lambda: True)
        except TimeoutError:
            answer = Answer(Event.FAIL, error="the service did not answer in time")
        detail = ": ".join(filter(None, (answer.event, answer.error)))[:200]
        await self.note("service.try", name, actor=actor, request=request, detail=detail)
        return answer

    def _build(
        self, node: Node, service: str, body: bytes, options: Mapping[str, Any],
        *, any_node: bool = False,
    ) -> Submission:  # fmt: skip
        known = node.directory.get(service)
        if known is None and service in self._functions:  # another process runs it
            known = self._functions[service].service
        if known is None and node.dispatches:
            raise UnknownService(
                f"no service or task function is named {service!r}; there are"
                f" {sorted(node.services)[:20]}"
            )
        # The node that calls an unknown service bounds the timeout.
        known = known or Service(service, timeout=None)
        if "idempotency_key" not in options:
            return node.submit.build(known, body, any_node=any_node, **options)
        options = dict(options)
        key = options.pop("idempotency_key")
        any_node = any_node or key is not None
        submission = node.submit.build(known, body, any_node=any_node, **options)
        if key is None:
            return submission
        # The options are valid, so they can be compared with those of other requests.
        # No caller over HTTP has this name: their namespaces have no colon.
        caller = f"{LOCAL}:{namespace_of(service)}"
        idempotency = Idempotency.of(caller, key, request_bytes(service, body, options))
        return node.submit.build(known, body, idempotency=idempotency, **options)

    def _user_connection(self, connection: Any) -> Any:
        """Return the user's connection, or None to make the change at once without it.

        That is for tests on SQLite with a ManualClock.
        """
        if connection is None or self._running_node().store.joins_transactions:
            return connection
        if isinstance(self._clock, ManualClock):
            return None
        raise TypeError(
            "connection= needs a store on PostgreSQL; this one is on SQLite, which accepts it only"
            " in tests, with clock=ManualClock()"
        )

    async def _reload_services(self) -> None:
        """Load services that another process may have put a moment ago.

        A process that does not dispatch accepts unknown names, so it reloads only now and then.
        """
        node = self._running_node()
        await (node.directory.reload() if node.dispatches else node.directory.reload_if_stale())


def target_name(request: Request | Mapping[str, Any]) -> str:
    """Return the name of a request's service, or "" for an invalid request."""
    if isinstance(request, Request):
        return request.service
    get = getattr(request, "get", None)
    target = None if get is None else get("service")
    if isinstance(target, TaskFunction):
        return target.name
    return target if isinstance(target, str) else ""


def submission_builder(scheduler: SubmissionVerbs) -> Callable[..., Submission]:
    """Return `Submit.build`, which makes a task to store of a service and a payload's bytes.

    This and `store_submission` are the two halves of `submit`, for the HTTP API as well: it has its
    own idempotency keys, and reports how a task was stored.
    """
    return scheduler._running_node().submit.build


async def store_submission(
    scheduler: SubmissionVerbs, submission: Submission, *, whole: bool = True
) -> Submitted:
    """Store a task, batched with others that wait to be stored.

    `whole`: read the payload and the result of a task that existed before.
    """
    submit = scheduler._running_node().submit
    answer = await submit.store_one(submission)
    task = submit.task_of(submission, answer)
    if whole:
        task = await submit.read_whole(task, answer)
    # A task whose shard is lost during the insert gets another id; a replaced one has a key.
    new = answer is task and (task.id == submission.task.id or task.key is None)
    return Submitted(task, new, isinstance(answer, RepeatedRequest))


async def store_submissions(
    scheduler: SubmissionVerbs,
    submissions: Iterable[Submission],
    progress: Callable[[int], object] = lambda _: None,
) -> list[Task | SubmitError]:
    """Store many tasks, a thousand at a time; call `progress` with the number stored so far."""
    return await scheduler._running_node().submit.submit_many(submissions, progress)
