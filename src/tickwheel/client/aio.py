"""`AsyncClient`: the API's operations for asyncio, over a pool of connections."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sized,
)
from contextlib import aclosing
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
)
from tickwheel.client.errors import ServerTimedOut, ServerUnavailable
from tickwheel.client.methods import document_as, document_as_pages, name_methods
from tickwheel.client.requests import (
    CONNECT_TIMEOUT_SECONDS,
    MAX_ANSWER_BYTES,
    Answer,
    Call,
    Options,
    Request,
    answer_too_large,
)
from tickwheel.client.retries import MAY_BE_DONE, Polls, Retries, log_incomplete_count, log_retry
from tickwheel.client.servers import Servers
from tickwheel.client.task import submit as submit_task
from tickwheel.clock import SystemClock, WallClock, forkable
from tickwheel.errors import TickwheelError
from tickwheel.progress import show_progress

try:
    from tickwheel.http import ConnectFailed, HttpError, Pool, TimedOut, Unanswered
except ImportError as missing:
    raise ImportError(f"{missing}; AsyncClient needs: pip install 'tickwheel[client]'") from missing

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from datetime import timedelta
    from typing import Self

    from tickwheel.client.requests import Server
    from tickwheel.client.task import Task
    from tickwheel.client.values import Attempt, Page, Schedule

P = ParamSpec("P")
T = TypeVar("T")

Requests = Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
Batch = list[Stored]  # inside the class `list` is a method
Attempts = list["Attempt"]
Schedules = list["Schedule"]


def awaitable(
    call: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return a coroutine method that sends a call and returns its answer."""

    async def verb(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._do(call(*args, **kwargs))

    return document_as(call, verb)


def paging(
    call: Callable[P, Call[Page[T]]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    """Return a method that iterates over all pages of a list."""

    async def verb(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        while True:
            page = await self._do(call(*args, **kwargs))
            for item in page.items:
                yield item
            if page.next_cursor is None:
                return
            kwargs["cursor"] = page.next_cursor

    return document_as_pages(call, verb, "AsyncIterator")


@name_methods
class AsyncClient:
    """A client of a tickwheel server for asyncio: `async with AsyncClient() as client`.

    Options, methods, retries and errors are those of `Client`; each method is awaited. A client
    belongs to one event loop; in the child of a fork, or once that loop is closed, it opens new
    connections. A cancelled call may have succeeded.
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
        self._ssl = ssl
        self._pool: Pool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left_behind: list[Pool] = []
        self._closed = False
        self._clock = SystemClock()
        self._wall = WallClock()
        self._sleep = asyncio.sleep
        forkable.add(self)

    @property
    def server(self) -> str:
        """The URL of the server that is asked next."""
        return self._servers.current.url

    async def close(self) -> None:
        """Close the connections; `async with` does this."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncClient {self.server}>"

    def _after_fork_in_child(self) -> None:
        """In the child of a fork, keep the parent's pool alive, so that nothing closes it."""
        if self._pool is not None:
            self._left_behind.append(self._pool)
        self._pool = self._loop = None

    def _pool_of_loop(self) -> Pool:
        """Return the pool of the running loop."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._pool is None or self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed() and self._pool is not None:
                raise RuntimeError("the client belongs to another event loop: make one for each")
            self._pool, self._loop = self._new_pool(), loop
        return self._pool

    def _new_pool(self) -> Pool:
        return Pool(
            connect_timeout=CONNECT_TIMEOUT_SECONDS, max_body=MAX_ANSWER_BYTES, ssl=self._ssl
        )

    async def _send(self, request: Request, timeout: float) -> Answer:
        """Send a request to the current server, or to the next one that can be reached."""
        until = self._clock.time() + timeout
        turn = self._servers.turn()
        while True:
            left = max(until - self._clock.time(), 0.001)
            try:
                return turn.end(await self._send_to(turn.server, request, left))
            except ServerUnavailable as failure:
                if not turn.goes_on(request, failure):
                    raise
                log_retry(request, failure, 0.0)

    async def _send_to(self, server: Server, request: Request, timeout: float) -> Answer:
        pool = self._pool_of_loop()
        if not request.safe:  # a reused connection may lose it, and it must not be sent again
            fresh = self._new_pool()
            try:
                return await self._exchange(server, fresh, request, timeout)
            finally:
                await fresh.close()
        until = self._clock.time() + timeout
        try:
            return await self._exchange(server, pool, request, timeout)
        except ServerUnavailable as failure:
            unanswered = failure.__cause__
            if not (isinstance(unanswered, Unanswered) and unanswered.again):
                raise
        try:
            left = max(until - self._clock.time(), 0.001)
            answer = await self._exchange(server, pool, request, left)
        except ServerUnavailable as failure:
            failure.sent = True  # the first try may have been received
            raise
        return answer._replace(resent=True)

    async def _exchange(
        self, server: Server, pool: Pool, request: Request, timeout: float
    ) -> Answer:
        try:
            response = await pool.request(
                request.method,
                server.url + request.path,
                headers=server.headers(request),
                body=request.body,
                timeout=timeout,
                again=False,
            )
        except ConnectFailed as error:
            raise ServerUnavailable(str(error)) from error
        except TimedOut as error:
            raise ServerTimedOut(f"{server.url} did not answer in time", sent=True) from error
        except HttpError as error:
            raise ServerUnavailable(str(error), sent=True) from error
        if not response.whole:
            raise answer_too_large(response.status)
        return Answer(response.status, dict(response.headers), response.body)

    async def _do(self, call: Call[T], timeout: float | None = None) -> T:
        request = call.request
        timeout = timeout or self._options.timeout
        retries = Retries(self._options.retries, timeout, self._clock.time())
        while True:
            try:
                answer = await self._send(request, retries.begin(self._clock.time()))
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
            await self._sleep(wait)
        if not retries.may_be_done:
            return call.result(answer, wall, self.server)
        return await self._settle(call, answer, wall, retries)

    async def _settle(self, call: Call[T], answer: Answer, wall: float, retries: Retries) -> T:
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
                    left = retries.seconds_left(self._clock.time())
                    step = steps.send(await self._do(step, left))
            except StopIteration as end:
                return cast("T", end.value)
            except TickwheelError:
                raise error from None
        if call.counts:
            log_incomplete_count(call.request)
        return result

    submit = awaitable(submit_task)
    get = awaitable(operations.get)
    attempts_page = awaitable(operations.attempts_page)
    iterate_attempts = paging(operations.attempts_page)
    list = awaitable(operations.tasks)
    iterate = paging(operations.tasks)
    cancel = awaitable(operations.cancel)
    cancel_key = awaitable(operations.cancel_key)
    cancel_where = awaitable(operations.cancel_where)
    reschedule = awaitable(operations.reschedule)
    feedback = awaitable(operations.feedback)
    services = awaitable(operations.services)
    get_service = awaitable(operations.get_service)
    put_service = awaitable(operations.put_service)
    delete_service = awaitable(operations.delete_service)
    backlog = awaitable(operations.backlog)
    iterate_backlog = paging(operations.backlog)
    replay = awaitable(operations.replay)
    replay_where = awaitable(operations.replay_where)
    schedules_page = awaitable(operations.schedules_page)
    iterate_schedules = paging(operations.schedules_page)
    get_schedule = awaitable(operations.get_schedule)
    put_schedule = awaitable(operations.put_schedule)
    delete_schedule = awaitable(operations.delete_schedule)
    nodes = awaitable(operations.nodes)
    drain_node = awaitable(operations.drain_node)
    undrain_node = awaitable(operations.undrain_node)
    shards = awaitable(operations.shards)
    wheel = awaitable(operations.wheel)
    stats = awaitable(operations.stats)
    audit = awaitable(operations.audit)
    health = awaitable(operations.health)

    async def wait(self, task_id: str, timeout: float | timedelta | None = None) -> Task:
        """Wait until a task is finished, failed or cancelled, and return it; or TimeoutError.

        See `Client.wait`.
        """
        polls = Polls(task_id, timeout, self._clock.time())
        while not (task := await self.get(task_id)).final:
            await self._sleep(polls.pause(self._clock.time()))
        return task

    async def attempts(self, task_id: str) -> Attempts:
        """Return a task's execution log: one row for each attempt that has ended."""
        return [one async for one in self.iterate_attempts(task_id, limit=1_000)]

    async def schedules(self) -> Schedules:
        """Return all schedules, by name."""
        return [one async for one in self.iterate_schedules(limit=1_000)]

    async def submit_many(
        self,
        requests: Requests,
        *,
        batch: int = DEFAULT_BATCH_TASKS,
        in_flight: int = DEFAULT_IN_FLIGHT,
        progress: Progress = False,
    ) -> Batch:
        """Store any number of tasks, and return their answers in order.

        See `Client.submit_many`. Requests may also come from an async iterator.
        """
        stream = self.submit_stream(requests, batch=batch, in_flight=in_flight, progress=progress)
        async with aclosing(stream):
            return [answer async for answer in stream]

    def submit_stream(
        self,
        requests: Requests,
        *,
        batch: int = DEFAULT_BATCH_TASKS,
        in_flight: int = DEFAULT_IN_FLIGHT,
        progress: Progress = False,
    ) -> AsyncBulk:
        """Store any number of tasks, and yield their answers in order as they are stored.

        `async for answer in client.submit_stream(…)`; see `Client.submit_stream`.
        """
        bounded("in_flight", in_flight, 1, 64)
        return AsyncBulk(self, requests, Batcher(batch), in_flight, progress)


class AsyncBulk(WarnIfUnread, AsyncIterator[Stored]):
    """The answers of `submit_stream`, in order."""

    def __init__(
        self,
        client: AsyncClient,
        requests: Requests,
        batcher: Batcher,
        in_flight: int,
        progress: Progress,
    ) -> None:
        super().__init__()
        self._client = client
        self._requests = requests
        self._batcher = batcher
        self._in_flight = in_flight
        self._progress = progress
        self._answers: AsyncGenerator[Stored, None] | None = None

    async def __anext__(self) -> Stored:
        if self._answers is None:
            if self.begun:
                raise StopAsyncIteration  # closed before the first answer
            self.begun = True
            self._answers = self._run()
        return await anext(self._answers)

    async def aclose(self) -> None:
        """Take no more requests; batches in flight may still be stored."""
        self.begun = True
        if self._answers is not None:
            await self._answers.aclose()

    async def _run(self) -> AsyncGenerator[Stored, None]:
        total = len(self._requests) if isinstance(self._requests, Sized) else None
        sending: deque[asyncio.Task[Batch]] = deque()
        done = 0
        with show_progress(self._progress, "submit", total) as show:
            try:
                async with aclosing(self._send(sending)) as batches:
                    async for answers in batches:
                        done += len(answers)
                        show(done)
                        for answer in answers:
                            yield answer
            except Exception as error:
                error.add_note(f"after {done:,} answers")
                raise
            finally:
                for task in sending:
                    task.cancel()
                await asyncio.gather(*sending, return_exceptions=True)

    async def _send(self, sending: deque[asyncio.Task[Batch]]) -> AsyncGenerator[Batch, None]:
        async with aclosing(self._batches()) as batches:
            async for items in batches:
                sending.append(asyncio.ensure_future(self._client._do(operations.batch(items))))
                while len(sending) >= self._in_flight or (sending and sending[0].done()):
                    yield await take_first(sending)
        while sending:
            yield await take_first(sending)

    async def _batches(self) -> AsyncGenerator[list[bytes], None]:
        requests = self._requests
        if isinstance(requests, AsyncIterable):
            async for request in requests:
                full = self._batcher.add(request)
                if full is not None:
                    yield full
        else:
            for request in requests:
                full = self._batcher.add(request)
                if full is not None:
                    yield full
                    await asyncio.sleep(0)  # so that the batch is sent while the next is built
        rest = self._batcher.rest()
        if rest:
            yield rest


async def take_first(sending: deque[asyncio.Task[Batch]]) -> Batch:
    """Wait for the first batch in flight; it stays in `sending` until it is done."""
    answers = await asyncio.shield(sending[0])
    sending.popleft()
    return answers
