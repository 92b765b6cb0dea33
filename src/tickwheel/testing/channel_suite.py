"""The conformance suite of channels: every channel, yours included, must pass it.

    from tickwheel.testing.channel_suite import ChannelSuite, Peer

    class LinePeer(Peer):
        ...

    class TestLineChannel(ChannelSuite):
        def make_peer(self):
            return LinePeer()

pytest and unittest find the tests. The suite needs neither of them, and no plugin for asyncio: each
test runs a loop of its own. A test whose `Peer` cannot do something is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import unittest
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from tickwheel.durable.channel import UNSENT, Answer, BatchChannel, CallTrace, Delivery
from tickwheel.durable.permits.semaphore import Semaphore
from tickwheel.values.task import Event, Ids, State, Task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from tickwheel.durable.channel import Channel
    from tickwheel.values.service import Service

__all__ = ["ChannelSuite", "Peer", "make_task"]

PATIENCE_SECONDS = 60.0  # after which a test has hung
MOMENT_SECONDS = 0.05  # in which an answer would have come
DELIVERED = (Event.FINISH, Event.ACCEPT)
NOW_MS = 1_800_000_000_000
HIDDEN = "hush-hush"

_ids = Ids()
_numbers = itertools.count(1)


def make_task(body: bytes | None = None) -> Task:
    """Return a task whose first attempt runs, with a payload of its own if none is given."""
    body = b'{"order": "\xc3\xb6-%d"}' % next(_numbers) if body is None else body
    return Task(
        id=_ids.make(NOW_MS, 0), service="orders", body=body, key=None, state=State.RUNNING,
        due_at_ms=NOW_MS, shard=0, priority=0, attempt=1, failures=0, max_attempts=5,
        timeout_ms=None, deadline_at_ms=None, created_at_ms=NOW_MS, updated_at_ms=NOW_MS,
    )  # fmt: skip


class Peer(ABC):
    """A channel, a service for it, and the other end, which a test controls.

    - `channel` and `service` are there after `open`. The service's name is "orders".
    - `invalid` has services that `check` must refuse; a password in one of them is "hush-hush".
    - A method that raises NotImplementedError skips the tests that need it.
    """

    channel: Channel
    service: Service
    invalid: Sequence[Service] = ()

    @abstractmethod
    async def open(self) -> None:
        """Start the other end, and make the channel and its service."""

    @abstractmethod
    async def received(self) -> list[bytes]:
        """Return the payloads that have arrived, in order."""

    async def refuse(self) -> None:
        """Let the other end refuse whatever arrives from now on."""
        raise NotImplementedError

    async def accept(self) -> None:
        """Let the other end take what arrives again."""
        raise NotImplementedError

    async def hang(self) -> None:
        """Let the other end give no answer from now on; connections stay open."""
        raise NotImplementedError

    async def release(self) -> None:
        """Let the other end answer again, also what has arrived in between."""
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None:
        """Close the channel and the other end."""

    async def send(
        self, task: Task | None = None, may_send: Callable[[], bool] = lambda: True
    ) -> Answer:
        """Send one task, by the batch form if the channel has one."""
        task = task or make_task()
        if not isinstance(self.channel, BatchChannel):
            return await self.channel.send(task, self.service, may_send)
        answers = await self.send_many([task], may_send)
        return answers[0]

    async def send_many(
        self, tasks: Sequence[Task], may_send: Callable[[], bool] = lambda: True
    ) -> list[Answer]:
        """Send tasks together by the batch form; return an answer for each."""
        assert isinstance(self.channel, BatchChannel)
        answers: dict[str, list[Answer]] = {task.id: [] for task in tasks}
        await self.channel.send_many(
            [Delivery(task, self.service, may_send, answers[task.id].append) for task in tasks]
        )
        assert all(len(found) == 1 for found in answers.values()), "each task ends exactly once"
        return [found[0] for found in answers.values()]


class ChannelSuite(ABC):
    """The tests: derive from it, and return your peer in `make_peer`."""

    @abstractmethod
    def make_peer(self) -> Peer:
        """Return a new peer, not open yet."""

    # Delivery

    def test_a_task_arrives_byte_for_byte_and_is_confirmed(self) -> None:
        async def scenario(peer: Peer) -> None:
            task = make_task('{ "order":"ö-1",\t"price": 1.10 }'.encode())
            answer = await peer.send(task)
            assert answer.event in DELIVERED, answer
            assert answer.healthy is not False
            assert await peer.received() == [task.body]

        self._run(scenario)

    def test_tasks_that_are_sent_one_after_the_other_arrive_in_order_and_once(self) -> None:
        async def scenario(peer: Peer) -> None:
            tasks = [make_task() for _ in range(5)]
            for task in tasks:
                assert (await peer.send(task)).event in DELIVERED
            assert await peer.received() == [task.body for task in tasks]

        self._run(scenario)

    def test_tasks_that_are_sent_together_all_arrive(self) -> None:
        async def scenario(peer: Peer) -> None:
            tasks = [make_task() for _ in range(20)]
            answers = await asyncio.gather(*map(peer.send, tasks))
            assert {answer.event for answer in answers} <= {*DELIVERED}
            assert sorted(await peer.received()) == sorted(task.body for task in tasks)

        self._run(scenario)

    def test_a_batch_arrives_and_each_of_its_tasks_ends_once(self) -> None:
        async def scenario(peer: Peer) -> None:
            if not isinstance(peer.channel, BatchChannel):
                raise unittest.SkipTest("the channel has no batch form")
            tasks = [make_task() for _ in range(200)]
            answers = await peer.send_many(tasks)
            assert {answer.event for answer in answers} <= {*DELIVERED}
            assert sorted(await peer.received()) == sorted(task.body for task in tasks)

        self._run(scenario)

    # Refusal

    def test_a_refused_task_is_retried_with_a_reason_and_the_next_one_arrives(self) -> None:
        async def scenario(peer: Peer) -> None:
            await peer.refuse()
            answer = await peer.send()
            assert (answer.event, answer.result_body) == (Event.RETRY, None)
            assert answer.error
            assert not answer.healthy
            await peer.accept()
            task = make_task()
            assert (await peer.send(task)).event in DELIVERED
            assert (await peer.received())[-1] == task.body

        self._run(scenario)

    def test_every_task_of_a_refused_batch_is_retried(self) -> None:
        async def scenario(peer: Peer) -> None:
            if not isinstance(peer.channel, BatchChannel):
                raise unittest.SkipTest("the channel has no batch form")
            await peer.refuse()
            answers = await peer.send_many([make_task() for _ in range(20)])
            assert {answer.event for answer in answers} == {Event.RETRY}
            assert all(answer.error for answer in answers)

        self._run(scenario)

    # Permission

    def test_without_permission_nothing_is_sent(self) -> None:
        async def scenario(peer: Peer) -> None:
            assert await peer.send(may_send=lambda: False) is UNSENT
            task = make_task()
            assert (await peer.send(task)).event in DELIVERED
            assert await peer.received() == [task.body]

        self._run(scenario)

    def test_the_channel_asks_for_permission(self) -> None:
        async def scenario(peer: Peer) -> None:
            asked: list[bool] = []

            def may_send() -> bool:
                asked.append(True)
                return True

            await peer.send(may_send=may_send)
            assert asked

        self._run(scenario)

    # Back-pressure and time-outs

    def test_nothing_is_confirmed_while_the_other_end_hangs(self) -> None:
        async def scenario(peer: Peer) -> None:
            await peer.send()
            await peer.hang()
            calls = [asyncio.ensure_future(peer.send()) for _ in range(10)]
            await asyncio.wait(calls, timeout=MOMENT_SECONDS)
            assert not any(call.done() for call in calls)
            await peer.release()
            answers = await asyncio.gather(*calls)
            assert {answer.event for answer in answers} <= {*DELIVERED, Event.RETRY}
            delivered = sum(answer.event in DELIVERED for answer in answers)
            assert len(await peer.received()) >= 1 + delivered

        self._run(scenario)

    def test_a_caller_may_give_up_a_call_that_hangs_and_send_again(self) -> None:
        async def scenario(peer: Peer) -> None:
            await peer.hang()
            call = asyncio.ensure_future(peer.channel.send(make_task(), peer.service, may_send))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(call, MOMENT_SECONDS)
                raise AssertionError("the call has ended, though the other end hangs")
            await peer.release()
            assert (await peer.send()).event in DELIVERED

        self._run(scenario)

    def test_the_caller_takes_the_shared_permits_and_not_the_channel(self) -> None:
        async def scenario(peer: Peer) -> None:
            semaphore = peer.channel.semaphore(peer.service)
            assert peer.channel.semaphore(peer.service) is semaphore
            if semaphore is None:
                return
            assert isinstance(semaphore, Semaphore)
            assert semaphore.free == semaphore.permits > 0
            await peer.send()
            assert semaphore.free == semaphore.permits

        self._run(scenario)

    # Closing

    def test_a_call_under_way_gets_an_answer_when_the_channel_closes(self) -> None:
        async def scenario(peer: Peer) -> None:
            await peer.send()
            await peer.hang()
            call = asyncio.ensure_future(peer.channel.send(make_task(), peer.service, may_send))
            await asyncio.wait([call], timeout=MOMENT_SECONDS)
            await peer.channel.close()
            await peer.release()
            assert (await call).event in (*DELIVERED, Event.RETRY)

        self._run(scenario)

    def test_a_channel_may_be_closed_unused_and_twice(self) -> None:
        async def scenario(peer: Peer) -> None:
            await peer.channel.close()
            await peer.channel.close()

        self._run(scenario)

    # Configuration

    def test_a_valid_service_passes_the_check_and_nothing_is_sent(self) -> None:
        async def scenario(peer: Peer) -> None:
            peer.channel.check(peer.service)
            assert await peer.received() == []

        self._run(scenario)

    def test_an_invalid_service_is_refused_without_showing_its_password(self) -> None:
        async def scenario(peer: Peer) -> None:
            for service in peer.invalid:
                text = refusal_of(peer.channel, service)
                assert text, f"{service.endpoint} should be refused, with a reason"
                assert HIDDEN not in text

        self._run(scenario)

    def test_the_channel_says_where_its_calls_go_on(self) -> None:
        async def scenario(peer: Peer) -> None:
            assert peer.channel.remote in (True, False)
            assert peer.channel.interruptible(peer.service) in (True, False)

        self._run(scenario)

    # Observation

    def test_each_call_is_observed_whether_it_succeeds_or_fails(self) -> None:
        async def scenario(peer: Peer) -> None:
            assert dict(peer.channel.latencies) == {}
            await peer.send()
            assert peer.channel.latencies["orders"].count == 1
            assert peer.channel.latencies["orders"].sum > 0
            await peer.refuse()
            await peer.send()
            assert peer.channel.latencies["orders"].count == 2

        self._run(scenario)

    def test_a_deleted_service_is_forgotten_and_may_come_back(self) -> None:
        async def scenario(peer: Peer) -> None:
            await peer.send()
            peer.channel.forget("orders")
            peer.channel.forget("unknown")
            assert dict(peer.channel.latencies) == {}
            assert (await peer.send()).event in DELIVERED
            assert peer.channel.latencies["orders"].count == 1

        self._run(scenario)

    def test_a_tracer_is_entered_around_each_call_and_gets_its_answer(self) -> None:
        async def scenario(peer: Peer) -> None:
            log: list[Any] = []

            @contextlib.contextmanager
            def trace(task: Task, service: Service) -> Iterator[CallTrace]:
                log.append(("enter", task.id, service.name))
                yield CallTrace([], lambda answer: log.append(answer.event))
                log.append("exit")

            assert peer.channel.trace is None
            peer.channel.trace = trace
            task = make_task()
            answer = await peer.send(task)
            assert log == [("enter", task.id, "orders"), answer.event, "exit"]

        self._run(scenario)

    def _run(self, scenario: Callable[[Peer], Awaitable[None]]) -> None:
        """Run a scenario with an open peer; skip it if the peer cannot do something."""

        async def run() -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                peer = self.make_peer()
                await peer.open()
                try:
                    await scenario(peer)
                finally:
                    await peer.close()

        try:
            self.run_loop(run())
        except NotImplementedError:
            raise unittest.SkipTest("the peer cannot do this") from None

    def run_loop(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on a new loop."""
        asyncio.run(main)


def refusal_of(channel: Channel, service: Service) -> str | None:
    """Return the reason why a channel refuses a service, or None if it does not."""
    try:
        channel.check(service)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def may_send() -> bool:
    """Allow every call."""
    return True
