"""`Client`: the verbs of a server for any program, over connections that are kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from tickwheel.arguments import bounded
from tickwheel.client import calls
from tickwheel.client.bulk import BATCH, IN_FLIGHT, Cutter, Progress, Stored, Unread, cut
from tickwheel.client.connections import Connections
from tickwheel.client.errors import ServerUnavailable
from tickwheel.client.requests import Call, Options, Server
from tickwheel.client.tries import IN_DOUBT, Tries, tell_of_count, tell_of_wait
from tickwheel.client.verbs import told_as_pages, told_by, with_names
from tickwheel.clock import SystemClock, WallClock
from tickwheel.errors import TickwheelError
from tickwheel.progress import show_progress

if TYPE_CHECKING:
    import ssl
    from typing import Self

    from tickwheel.client.requests import Answer
    from tickwheel.client.values import Attempt, Page, Schedule

P = ParamSpec("P")
T = TypeVar("T")

Batch = list[Stored]  # inside the class `list` is a verb
Attempts = list["Attempt"]
Schedules = list["Schedule"]


def blocking(call: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """Return a verb that sends a call, and waits for its answer."""

    def verb(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._do(call(*args, **kwargs))

    return told_by(call, verb)


def turning(call: Callable[P, Call[Page[T]]]) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """Return a verb that goes through all pages of a list."""

    def verb(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        while True:
            page = self._do(call(*args, **kwargs))
            yield from page.items
            if page.next_cursor is None:
                return
            kwargs["cursor"] = page.next_cursor

    return told_as_pages(call, verb, "Iterator")


@with_names
class Client:
    """A tickwheel server, for programs without an event loop: `with Client() as client`.

    - `server`, `token`, `namespace`: else TICKWHEEL_SERVER, TICKWHEEL_TOKEN, TICKWHEEL_NAMESPACE;
      else http://127.0.0.1:7380, without a token.
    - `timeout`: seconds that one verb may take in all, its tries and the waits between them
      included. `retries`: how often it is tried again at most: after a connection that failed or
      broke, and after 429, 502, 503 and 504, not sooner than Retry-After says. The waits grow from
      0.25 s to 8 s; five retries outlast a restart of some 4 s.
    - A submit that is tried again stores one task: it carries an idempotency key.
    - What the server refuses is raised as the error of its code, `KeyTaken` say, else `ApiError`;
      a server that is not there, or does not answer, as `ServerUnavailable`.
    - Threads may share a client; in the child of a fork it goes on with connections of its own.
    - `ssl`: a context, for a certificate authority of your own.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        namespace: str | None = None,
        timeout: float = 30.0,
        retries: int = 5,
        *,
        ssl: ssl.SSLContext | None = None,
    ) -> None:
        self._options = Options.of(retries, timeout)
        self._server = Server(server, token, namespace)
        self._server.warn_if_insecure(stacklevel=2)
        self._connections = Connections(self._server, ssl)
        self._clock = SystemClock()
        self._wall = WallClock()
        self._sleep = time.sleep

    @property
    def server(self) -> str:
        """Where the server is."""
        return self._server.url

    def close(self) -> None:
        """Close the connections; `with` does this."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_connections"):
            self._connections.close()

    def __repr__(self) -> str:
        return f"<Client {self.server}>"

    def _do(self, call: Call[T], timeout: float | None = None) -> T:
        request = call.request
        tries = Tries(self._options.retries, timeout or self._options.timeout, self._clock.time())
        while True:
            try:
                answer = self._connections.send(request, tries.begin(self._clock.time()))
            except ServerUnavailable as failure:
                reason = str(failure)
                wait = tries.after_failure(request, failure.sent, self._clock.time())
                if wait is None:
                    tries.tell(failure)
                    raise
            else:
                reason = f"status {answer.status}"
                wall = self._wall.time()
                wait = tries.after_answer(request, answer, self._clock.time(), wall)
                if wait is None:
                    break
            tell_of_wait(request, reason, wait)
            self._sleep(wait)
        if not tries.doubt:
            return call.result(answer, wall, self.server)
        return self._settled(call, answer, wall, tries)

    def _settled(self, call: Call[T], answer: Answer, wall: float, tries: Tries) -> T:
        """Return what a call has come to, when an earlier try of it may have been done."""
        try:
            result = call.result(answer, wall, self.server)
        except TickwheelError as error:
            error.add_note(IN_DOUBT)
            if call.settle is None:
                raise
            steps = call.settle(error, tries.began_at(answer, self._clock.time()))
            try:
                step = next(steps)
                while True:
                    step = steps.send(self._do(step, tries.left(self._clock.time())))
            except StopIteration as end:
                return cast("T", end.value)
            except TickwheelError:
                raise error from None
        if call.counts:
            tell_of_count(call.request)
        return result

    submit = blocking(calls.submit)
    get = blocking(calls.get)
    attempts_page = blocking(calls.attempts_page)
    iterate_attempts = turning(calls.attempts_page)
    list = blocking(calls.tasks)
    iterate = turning(calls.tasks)
    cancel = blocking(calls.cancel)
    cancel_key = blocking(calls.cancel_key)
    cancel_where = blocking(calls.cancel_where)
    reschedule = blocking(calls.reschedule)
    feedback = blocking(calls.feedback)
    services = blocking(calls.services)
    get_service = blocking(calls.get_service)
    put_service = blocking(calls.put_service)
    delete_service = blocking(calls.delete_service)
    backlog = blocking(calls.backlog)
    iterate_backlog = turning(calls.backlog)
    replay = blocking(calls.replay)
    replay_where = blocking(calls.replay_where)
    schedules_page = blocking(calls.schedules_page)
    iterate_schedules = turning(calls.schedules_page)
    get_schedule = blocking(calls.get_schedule)
    put_schedule = blocking(calls.put_schedule)
    delete_schedule = blocking(calls.delete_schedule)
    nodes = blocking(calls.nodes)
    shards = blocking(calls.shards)
    wheel = blocking(calls.wheel)
    stats = blocking(calls.stats)
    audit = blocking(calls.audit)
    health = blocking(calls.health)

    def attempts(self, task_id: str) -> Attempts:
        """Return the execution log of a task: one row for each attempt that has ended."""
        return [*self.iterate_attempts(task_id, limit=1_000)]

    def schedules(self) -> Schedules:
        """Return all schedules, by name."""
        return [*self.iterate_schedules(limit=1_000)]

    def submit_many(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        batch: int = BATCH,
        in_flight: int = IN_FLIGHT,
        progress: Progress = False,
    ) -> Batch:
        """Store any number of tasks, and return their answers in order.

        - A request is a mapping: "service", "payload", and options as `submit` has them.
        - An answer is the task as stored (id, state, due time), or the error that refused it:
          `KeyTaken`, say. A batch that cannot be sent, whatever the retries, raises.
        - `in_flight` batches are sent at once, so that of two tasks with one key either may be
          first; with 1 they are stored in order.
        - `progress`: True for a bar on a terminal, or a function that takes the count of answers.

        `submit_stream` does the same for more tasks than fit into memory.
        """
        stream = self.submit_stream(requests, batch=batch, in_flight=in_flight, progress=progress)
        return [*stream]

    def submit_stream(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        batch: int = BATCH,
        in_flight: int = IN_FLIGHT,
        progress: Progress = False,
    ) -> Bulk:
        """Store any number of tasks, and yield their answers in order, while they are being stored.

        `submit_many` has the promises. Requests are taken as batches are sent: some thousands are
        in memory, never all. Nothing is sent before the first answer is read:
        `for answer in client.submit_stream(…)`.
        """
        bounded("in_flight", in_flight, 1, 64)
        return Bulk(self, requests, cut(requests, Cutter(batch)), in_flight, progress)


class Bulk(Unread, Iterator[Stored]):
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
                raise StopIteration  # closed before the first
            self.begun = True
            self._answers = self._run()
        return next(self._answers)

    def close(self) -> None:
        """Take no more requests; batches that are on their way are waited for."""
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
            sending.append(threads.submit(self._client._do, calls.batch(items)))
            while len(sending) >= self._in_flight or (sending and sending[0].done()):
                yield sending.popleft().result()
        while sending:
            yield sending.popleft().result()
