"""`AsyncClient`: the verbs of a server for asyncio, over a pool of kept connections."""

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
from tickwheel.client import calls
from tickwheel.client.bulk import BATCH, IN_FLIGHT, Cutter, Progress, Stored, Unread
from tickwheel.client.errors import ServerTimedOut, ServerUnavailable
from tickwheel.client.requests import (
    CONNECT_TIMEOUT,
    MAX_ANSWER,
    Answer,
    Call,
    Options,
    Request,
    Server,
    too_long,
)
from tickwheel.client.tries import IN_DOUBT, Tries, tell_of_count, tell_of_wait
from tickwheel.client.verbs import told_as_pages, told_by, with_names
from tickwheel.clock import SystemClock, WallClock, forkable
from tickwheel.errors import TickwheelError
from tickwheel.progress import show_progress

try:
    from tickwheel.http import ConnectFailed, HttpError, Pool, TimedOut, Unanswered
except ImportError as missing:
    raise ImportError(f"{missing}; for AsyncClient: pip install 'tickwheel[client]'") from missing

if TYPE_CHECKING:
    import ssl
    from typing import Self

    from tickwheel.client.values import Attempt, Page, Schedule

P = ParamSpec("P")
T = TypeVar("T")

Requests = Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
Batch = list[Stored]  # inside the class `list` is a verb
Attempts = list["Attempt"]
Schedules = list["Schedule"]


def awaited(
    call: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return a verb that sends a call, and is awaited for its answer."""

    async def verb(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._do(call(*args, **kwargs))

    return told_by(call, verb)


def turning(
    call: Callable[P, Call[Page[T]]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    """Return a verb that goes through all pages of a list."""

    async def verb(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        while True:
            page = await self._do(call(*args, **kwargs))
            for item in page.items:
                yield item
            if page.next_cursor is None:
                return
            kwargs["cursor"] = page.next_cursor

    return told_as_pages(call, verb, "AsyncIterator")


@with_names
class AsyncClient:
    """A tickwheel server, for asyncio: `async with AsyncClient() as client`.

    Options, verbs, retries and errors are those of `Client`, and each verb is awaited. It belongs
    to one event loop; in the child of a fork, or once that loop is closed, it goes on with
    connections of its own. A verb that is cancelled may have been done.
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
        """Where the server is."""
        return self._server.url

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

    def _forked(self) -> None:
        """In the child of a fork: the parent's pool is kept, so that nothing of it is closed."""
        if self._pool is not None:
            self._left_behind.append(self._pool)
        self._pool = self._loop = None

    def _kept(self) -> Pool:
        """Return the pool of the running loop."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._pool is None or self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed() and self._pool is not None:
                raise RuntimeError("the client is used on another event loop: make one for each")
            self._pool, self._loop = self._new_pool(), loop
        return self._pool

    def _new_pool(self) -> Pool:
        return Pool(connect_timeout=CONNECT_TIMEOUT, max_body=MAX_ANSWER, ssl=self._ssl)

    async def _send(self, request: Request, timeout: float) -> Answer:
        kept = self._kept()
        if not request.safe:  # over a kept connection it may be lost, and must not be sent again
            fresh = self._new_pool()
            try:
                return await self._exchange(fresh, request, timeout)
            finally:
                await fresh.close()
        until = self._clock.time() + timeout
        try:
            return await self._exchange(kept, request, timeout)
        except ServerUnavailable as failure:
            unanswered = failure.__cause__
            if not (isinstance(unanswered, Unanswered) and unanswered.again):
                raise
        try:
            answer = await self._exchange(kept, request, max(until - self._clock.time(), 0.001))
        except ServerUnavailable as failure:
            failure.sent = True  # the first one may have been received
            raise
        return answer._replace(again=True)

    async def _exchange(self, pool: Pool, request: Request, timeout: float) -> Answer:
        server = self._server
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
            raise too_long(response.status)
        return Answer(response.status, dict(response.headers), response.body)

    async def _do(self, call: Call[T], timeout: float | None = None) -> T:
        request = call.request
        tries = Tries(self._options.retries, timeout or self._options.timeout, self._clock.time())
        while True:
            try:
                answer = await self._send(request, tries.begin(self._clock.time()))
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
            await self._sleep(wait)
        if not tries.doubt:
            return call.result(answer, wall, self.server)
        return await self._settled(call, answer, wall, tries)

    async def _settled(self, call: Call[T], answer: Answer, wall: float, tries: Tries) -> T:
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
                    step = steps.send(await self._do(step, tries.left(self._clock.time())))
            except StopIteration as end:
                return cast("T", end.value)
            except TickwheelError:
                raise error from None
        if call.counts:
            tell_of_count(call.request)
        return result

    submit = awaited(calls.submit)
    get = awaited(calls.get)
    attempts_page = awaited(calls.attempts_page)
    iterate_attempts = turning(calls.attempts_page)
    list = awaited(calls.tasks)
    iterate = turning(calls.tasks)
    cancel = awaited(calls.cancel)
    cancel_key = awaited(calls.cancel_key)
    cancel_where = awaited(calls.cancel_where)
    reschedule = awaited(calls.reschedule)
    feedback = awaited(calls.feedback)
    services = awaited(calls.services)
    get_service = awaited(calls.get_service)
    put_service = awaited(calls.put_service)
    delete_service = awaited(calls.delete_service)
    backlog = awaited(calls.backlog)
    iterate_backlog = turning(calls.backlog)
    replay = awaited(calls.replay)
    replay_where = awaited(calls.replay_where)
    schedules_page = awaited(calls.schedules_page)
    iterate_schedules = turning(calls.schedules_page)
    get_schedule = awaited(calls.get_schedule)
    put_schedule = awaited(calls.put_schedule)
    delete_schedule = awaited(calls.delete_schedule)
    nodes = awaited(calls.nodes)
    shards = awaited(calls.shards)
    wheel = awaited(calls.wheel)
    stats = awaited(calls.stats)
    audit = awaited(calls.audit)
    health = awaited(calls.health)

    async def attempts(self, task_id: str) -> Attempts:
        """Return the execution log of a task: one row for each attempt that has ended."""
        return [one async for one in self.iterate_attempts(task_id, limit=1_000)]

    async def schedules(self) -> Schedules:
        """Return all schedules, by name."""
        return [one async for one in self.iterate_schedules(limit=1_000)]

    async def submit_many(
        self,
        requests: Requests,
        *,
        batch: int = BATCH,
        in_flight: int = IN_FLIGHT,
        progress: Progress = False,
    ) -> Batch:
        """Store any number of tasks, and return their answers in order.

        `Client.submit_many` has the promises. Requests may come from an async iterator, too.
        """
        stream = self.submit_stream(requests, batch=batch, in_flight=in_flight, progress=progress)
        async with aclosing(stream):
            return [answer async for answer in stream]

    def submit_stream(
        self,
        requests: Requests,
        *,
        batch: int = BATCH,
        in_flight: int = IN_FLIGHT,
        progress: Progress = False,
    ) -> AsyncBulk:
        """Store any number of tasks, and yield their answers in order, while they are being stored.

        `async for answer in client.submit_stream(…)`; `Client.submit_stream` has the promises.
        """
        bounded("in_flight", in_flight, 1, 64)
        return AsyncBulk(self, requests, Cutter(batch), in_flight, progress)


class AsyncBulk(Unread, AsyncIterator[Stored]):
    """The answers of `submit_stream`, in order."""

    def __init__(
        self,
        client: AsyncClient,
        requests: Requests,
        cutter: Cutter,
        in_flight: int,
        progress: Progress,
    ) -> None:
        super().__init__()
        self._client = client
        self._requests = requests
        self._cutter = cutter
        self._in_flight = in_flight
        self._progress = progress
        self._answers: AsyncGenerator[Stored, None] | None = None

    async def __anext__(self) -> Stored:
        if self._answers is None:
            if self.begun:
                raise StopAsyncIteration  # closed before the first
            self.begun = True
            self._answers = self._run()
        return await anext(self._answers)

    async def aclose(self) -> None:
        """Take no more requests; batches that are on their way may still be stored."""
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
                sending.append(asyncio.ensure_future(self._client._do(calls.batch(items))))
                while len(sending) >= self._in_flight or (sending and sending[0].done()):
                    yield await taken(sending)
        while sending:
            yield await taken(sending)

    async def _batches(self) -> AsyncGenerator[list[bytes], None]:
        requests = self._requests
        if isinstance(requests, AsyncIterable):
            async for request in requests:
                full = self._cutter.add(request)
                if full is not None:
                    yield full
        else:
            for request in requests:
                full = self._cutter.add(request)
                if full is not None:
                    yield full
                    await asyncio.sleep(0)  # for the batch to be sent while the next is made
        rest = self._cutter.rest()
        if rest:
            yield rest


async def taken(sending: deque[asyncio.Task[Batch]]) -> Batch:
    """Wait for the first that is on its way; it stays there until it is done, or cancelled."""
    answers = await asyncio.shield(sending[0])
    sending.popleft()
    return answers
