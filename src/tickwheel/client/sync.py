"""`Client`: the API's operations as blocking methods, over reused connections."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from tickwheel.arguments import bounded
from tickwheel.client import operations
from tickwheel.client.bulk import (
    DEFAULT_BATCH_TASKS,
    DEFAULT_IN_FLIGHT,
    Batcher,
    Progress,
    Stored,
    WarnIfUnread,
    split_batches,
)
from tickwheel.client.connections import Connections
from tickwheel.client.errors import ServerUnavailable
from tickwheel.client.methods import document_as, document_as_pages, name_methods
from tickwheel.client.requests import Call, Options
from tickwheel.client.retries import MAY_BE_DONE, Polls, Retries, log_incomplete_count, log_retry
from tickwheel.client.servers import Servers
from tickwheel.client.task import submit as submit_task
from tickwheel.clock import SystemClock, WallClock
from tickwheel.errors import TickwheelError
from tickwheel.progress import show_progress

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from datetime import timedelta
    from typing import Self

    from tickwheel.client.requests import Answer, Request
    from tickwheel.client.task import Task
    from tickwheel.client.values import Attempt, Page, Schedule

P = ParamSpec("P")
T = TypeVar("T")

Batch = list[Stored]  # inside the class `list` is a method
Attempts = list["Attempt"]
Schedules = list["Schedule"]


def blocking(call: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """Return a method that sends a call and waits for its answer."""

    def verb(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._do(call(*args, **kwargs))

    return document_as(call, verb)


def paging(call: Callable[P, Call[Page[T]]]) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """Return a method that iterates over all pages of a list."""

    def verb(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        while True:
            page = self._do(call(*args, **kwargs))
            yield from page.items
            if page.next_cursor is None:
                return
            kwargs["cursor"] = page.next_cursor

    return document_as_pages(call, verb, "Iterator")


@name_methods
class Client:
    """A client of a tickwheel server, for programs without an event loop.

    Use it as `with Client() as client`.

    - `server`, `token`, `namespace` default to TICKWHEEL_SERVER, TICKWHEEL_TOKEN and
      TICKWHEEL_NAMESPACE, and then to http://127.0.0.1:7380 without a token.
    - `server` may be several servers of one store, a list or separated by commas. A server that
      cannot be reached is left for the next one at once, within the same try.
    - `timeout`: the most seconds for one call, including its retries and the waits between them.
      `retries`: the most retries, after a failed or broken connection and after 429, 502, 503 and
      504, not sooner than Retry-After. The waits grow from 0.25 s to 8 s, less a random part of up
      to half of each; five retries outlast a restart of about 4 s.
    - A retried submit stores one task: it carries an idempotency key.
    - A refusal raises the error of its code, such as `KeyTaken`, or `ApiError`; a server that
      cannot be reached or does not answer raises `ServerUnavailable`.
    - Threads may share a client; in the child of a fork it opens new connections.
    - `ssl`: a context, for example with your own certificate authority.
    """

    def __init__(
        self,
        server: str | Sequence[str] | None = None,
        token: str | None = None,
        namespace: str | None = None,
        timeout: float = 30.0,
        retries: int = 5,
        *,
        ssl: ssl.SSLContext | None = None,
    ) -> None:
        self._options = Options.of(retries, timeout)
        self._servers = Servers(server, token, namespace)
        self._servers.warn(stacklevel=2)
        self._connections = {one: Connections(one, ssl) for one in self._servers.all}
        self._clock = SystemClock()
        self._wall = WallClock()
        self._sleep = time.sleep

    @property
    def server(self) -> str:
        """The URL of the server that is asked next."""
        return self._servers.current.url

    def close(self) -> None:
        """Close the connections; `with` does this."""
        for connections in self._connections.values():
            connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_connections"):
            self.close()

    def __repr__(self) -> str:
        return f"<Client {self.server}>"

    def _send(self, request: Request, timeout: float) -> Answer:
        """Send a request to the current server, or to the next one that can be reached."""
        until = self._clock.time() + timeout
        turn = self._servers.turn()
        while True:
            left = max(until - self._clock.time(), 0.001)
            try:
                return turn.end(self._connections[turn.server].send(request, left))
            except ServerUnavailable as failure:
                if not turn.goes_on(request, failure):
                    raise
                log_retry(request, failure, 0.0)

    def _do(self, call: Call[T], timeout: float | None = None) -> T:
        request = call.request
        timeout = timeout or self._options.timeout
        retries = Retries(self._options.retries, timeout, self._clock.time())
        while True:
            try:
                answer = self._send(request, retries.begin(self._clock.time()))
            except ServerUnavailable as failure:
                reason = str(failure)
                wait = retries.after_failure(request, failure.sent, self._clock.time())
                if wait is None:
                    retries.annotate(failure)
                    raise
            else:
                reason = f"status {answer.status}"
                wall = self._wall.time()
                wait = retries.after_answer(request, answer, self._clock.time(), wall)
                if wait is None:
                    break
            log_retry(request, reason, wait)
            self._sleep(wait)
        if not retries.may_be_done:
            return call.result(answer, wall, self.server)
        return self._settle(call, answer, wall, retries)

    def _settle(self, call: Call[T], answer: Answer, wall: float, retries: Retries) -> T:
        """Return the result of a call when an earlier try of it may have succeeded."""
        try:
            result = call.result(answer, wall, self.server)
        except TickwheelError as error:
            error.add_note(MAY_BE_DONE)
            if call.settle is None:
                raise
            steps = call.settle(error, retries.began_at(answer, self._clock.time()))
            try:
                step = next(steps)
                while True:
                    step = steps.send(self._do(step, retries.seconds_left(self._clock.time())))
            except StopIteration as end:
                return cast("T", end.value)
            except TickwheelError:
                raise error from None
        if call.counts:
            log_incomplete_count(call.request)
        return result

    submit = blocking(submit_task)
    get = blocking(operations.get)
    attempts_page = blocking(operations.attempts_page)
    iterate_attempts = paging(operations.attempts_page)
    list = blocking(operations.tasks)
    iterate = paging(operations.tasks)
    cancel = blocking(operations.cancel)
    cancel_key = blocking(operations.cancel_key)
    cancel_where = blocking(operations.cancel_where)
    reschedule = blocking(operations.reschedule)
    feedback = blocking(operations.feedback)
    services = blocking(operations.services)
    get_service = blocking(operations.get_service)
    put_service = blocking(operations.put_service)
    delete_service = blocking(operations.delete_service)
    backlog = blocking(operations.backlog)
    iterate_backlog = paging(operations.backlog)
    replay = blocking(operations.replay)
    replay_where = blocking(operations.replay_where)
    schedules_page = blocking(operations.schedules_page)
    iterate_schedules = paging(operations.schedules_page)
    get_schedule = blocking(operations.get_schedule)
    put_schedule = blocking(operations.put_schedule)
    delete_schedule = blocking(operations.delete_schedule)
    nodes = blocking(operations.nodes)
    drain_node = blocking(operations.drain_node)
    undrain_node = blocking(operations.undrain_node)
    shards = blocking(operations.shards)
    wheel = blocking(operations.wheel)
    stats = blocking(operations.stats)
    audit = blocking(operations.audit)
    health = blocking(operations.health)

    def wait(self, task_id: str, timeout: float | timedelta | None = None) -> Task:
        """Wait until a task is finished, failed or cancelled, and return it; or TimeoutError.

        The server is asked after 0.1 s, and then less often, down to once per second.
        """
        polls = Polls(task_id, timeout, self._clock.time())
        while not (task := self.get(task_id)).final:
            self._sleep(polls.pause(self._clock.time()))
        return task

    def attempts(self, task_id: str) -> Attempts:
        """Return a task's execution log: one row for each attempt that has ended."""
        return [*self.iterate_attempts(task_id, limit=1_000)]

    def schedules(self) -> Schedules:
        """Return all schedules, by name."""
        return [*self.iterate_schedules(limit=1_000)]

    def submit_many(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        batch: int = DEFAULT_BATCH_TASKS,
        in_flight: int = DEFAULT_IN_FLIGHT,
        progress: Progress = False,
    ) -> Batch:
        """Store any number of tasks, and return their answers in order.

        - A request is a mapping: "service", "payload", and the options of `submit`.
        - An answer is the task as stored (id, state, due time), or the error that refused it, such
          as `KeyTaken`. A batch that cannot be sent after all retries raises.
        - Up to `in_flight` batches are sent at once, so that either of two tasks with the same key
          may be stored first; with 1 they are stored in order.
        - `progress`: True for a bar on a terminal, or a function that takes the count of answers.

        `submit_stream` does the same for more tasks than fit in memory.
        """
        stream = self.submit_stream(requests, batch=batch, in_flight=in_flight, progress=progress)
        return [*stream]

    def submit_stream(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        batch: int = DEFAULT_BATCH_TASKS,
        in_flight: int = DEFAULT_IN_FLIGHT,
        progress: Progress = False,
    ) -> Bulk:
        """Store any number of tasks, and yield their answers in order as they are stored.

        See `submit_many`. Requests are consumed as batches are sent: a few thousand are in memory,
        never all. Nothing is sent before the first answer is read:
        `for answer in client.submit_stream(…)`.
        """
        bounded("in_flight", in_flight, 1, 64)
        return Bulk(self, requests, split_batches(requests, Batcher(batch)), in_flight, progress)


class Bulk(WarnIfUnread, Iterator[Stored]):
    """The answers of `submit_stream`, in order."""

    def __init__(
        self,
        client: Client,
        requests: Iterable[Mapping[str, Any]],
        batches: Iterator[list[bytes]],
        in_flight: int,
        progress: Progress,
    ) -> None:
        super().__init__()
        self._client = client
        self._total = len(requests) if isinstance(requests, Sized) else None
        self._batches = batches
        self._in_flight = in_flight
        self._progress = progress
        self._answers: Generator[Stored, None, None] | None = None

    def __next__(self) -> Stored:
        if self._answers is None:
            if self.begun:
                raise StopIteration  # closed before the first answer
            self.begun = True
            self._answers = self._run()
        return next(self._answers)

    def close(self) -> None:
        """Take no more requests, and wait for batches in flight."""
        self.begun = True
        if self._answers is not None:
            self._answers.close()

    def _run(self) -> Generator[Stored, None, None]:
        sending: deque[Future[Batch]] = deque()
        done = 0
        threads = ThreadPoolExecutor(self._in_flight, "tickwheel-bulk")
        with show_progress(self._progress, "submit", self._total) as show, threads:
            try:
                for answers in self._send(threads, sending):
                    done += len(answers)
                    show(done)
                    yield from answers
            except Exception as error:
                error.add_note(f"after {done:,} answers")
                raise
            finally:
                for future in sending:
                    future.cancel()

    def _send(self, threads: ThreadPoolExecutor, sending: deque[Future[Batch]]) -> Iterator[Batch]:
        for items in self._batches:
            sending.append(threads.submit(self._client._do, operations.batch(items)))
            while len(sending) >= self._in_flight or (sending and sending[0].done()):
                yield sending.popleft().result()
        while sending:
            yield sending.popleft().result()
