"""What calls of functions and over HTTP answer, beyond the contract: durable.channel has that."""

import asyncio
import contextlib
import json

import pytest
import pytest_asyncio

from contracts.channels import INTERRUPTIBLE, KINDS, LOCAL, REMOTE, peer_of, task
from tickwheel.durable.channel import CallTrace
from tickwheel.values.task import Event

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest_asyncio.fixture(params=KINDS)
async def peer(request, tmp_path):
    """A channel, and a service that finishes each call."""
    peer = peer_of(request.param, tmp_path)
    yield peer
    await peer.close()


def only(kinds):
    """Run a test on some kinds only: the others cannot say this."""
    return pytest.mark.parametrize("peer", kinds, indirect=True)


async def begun(peer, **options):
    """Start a call that hangs, and return it once the service has it."""
    peer.hangs()
    call = asyncio.create_task(peer.send(**options))
    await peer.until_called()
    return call


async def cancel(call):
    call.cancel()
    await asyncio.wait([call])
    return call.cancelled()


class TestAnswers:
    async def test_a_call_that_succeeds_gives_its_result_as_json(self, peer):
        peer.finishes({"total": [1, None, "ö"]})
        answer = await peer.send()
        assert (answer.event, answer.error) == (Event.FINISH, None)
        assert json.loads(answer.result_body) == {"total": [1, None, "ö"]}
        assert answer.healthy in (True, None)

    async def test_a_call_may_succeed_without_a_result(self, peer):
        answer = await peer.send()
        assert (answer.event, answer.result_body, answer.error) == (Event.FINISH, None, None)

    async def test_the_service_gets_the_payload_and_each_call_once(self, peer):
        for number in range(3):
            await peer.send(task(json.dumps({"order": f"ö-{number}"}).encode()))
        assert peer.payloads == [{"order": "ö-0"}, {"order": "ö-1"}, {"order": "ö-2"}]

    async def test_a_failure_is_a_retry_by_the_backoff_with_its_text(self, peer):
        peer.fails("the warehouse is closed")
        answer = await peer.send()
        assert (answer.event, answer.result_body) == (Event.RETRY, None)
        assert (answer.after_ms, answer.least_ms) == (None, None)
        assert "the warehouse is closed" in answer.error
        assert not answer.healthy

    async def test_a_service_that_breaks_off_is_a_retry_and_no_exception(self, peer):
        peer.breaks_off()
        answer = await peer.send()
        assert answer.event is Event.RETRY
        assert answer.error
        assert not answer.healthy

    async def test_a_service_may_ask_for_a_retry_after_a_delay(self, peer):
        peer.asks_for_a_retry_after(7)
        answer = await peer.send()
        assert answer.event is Event.RETRY
        assert 7_000 in (answer.after_ms, answer.least_ms)

    @only(LOCAL)
    async def test_a_service_may_fail_a_task_for_good(self, peer):
        peer.fails_for_good("no such order")
        answer = await peer.send()
        assert (answer.event, answer.error) == (Event.FAIL, "no such order")

    @only(LOCAL)
    async def test_a_service_may_snooze_a_task_and_that_is_no_failure(self, peer):
        peer.snoozes(7)
        answer = await peer.send()
        assert (answer.event, answer.after_ms, answer.error) == (Event.SNOOZE, 7_000, None)
        assert answer.healthy in (True, None)

    @only(REMOTE)
    async def test_a_service_may_accept_a_task_and_report_its_end_later(self, peer):
        peer.accepts()
        answer = await peer.send()
        assert (answer.event, answer.error) == (Event.ACCEPT, None)
        assert answer.after_ms > 0
        assert answer.healthy is True

    async def test_a_service_that_worked_once_more_is_called_as_before(self, peer):
        peer.breaks_off()
        await peer.send()
        peer.finishes(1)
        assert (await peer.send()).event is Event.FINISH

    async def test_calls_of_a_service_run_side_by_side(self, peer):
        calls = [await begun(peer)]
        calls.append(asyncio.create_task(peer.send()))
        await peer.until_called(2)
        peer.release()
        assert [(await call).event for call in calls] == [Event.FINISH, Event.FINISH]


class TestPermission:
    async def test_the_channel_asks_before_the_service_has_the_call(self, peer):
        arrived = []

        def may_send():
            arrived.append(len(peer.payloads))
            return True

        await peer.send(may_send=may_send)
        assert arrived == [0]


class TestInterruption:
    async def test_the_channel_says_whether_a_call_can_be_interrupted(self, peer, request):
        kind = request.node.callspec.params["peer"]
        assert peer.channel.interruptible(peer.service) is (kind in INTERRUPTIBLE)
        assert peer.channel.remote is (kind in REMOTE)

    @only(INTERRUPTIBLE)
    async def test_cancelling_ends_the_call_and_the_service_notices(self, peer):
        call = await begun(peer)
        assert await cancel(call)
        await peer.until(lambda: peer.interrupted == 1)

    @only(["local-plain"])
    async def test_a_call_that_cannot_be_interrupted_runs_to_its_end(self, peer):
        assert await cancel(await begun(peer))
        assert peer.completed == 0
        peer.release()
        await peer.until(lambda: peer.completed == 1)


class TestLatencies:
    async def test_an_interrupted_call_is_observed_too(self, peer):
        await cancel(await begun(peer))
        assert peer.channel.latencies["orders"].count == 1


class TestTrace:
    @pytest.fixture
    def log(self, peer):
        """The log of a tracer of the channel."""
        log = []

        @contextlib.contextmanager
        def trace(task, service):
            log.append(("enter", task.id, service.name, len(peer.payloads)))
            try:
                yield CallTrace([], lambda answer: log.append(answer.event))
            finally:
                log.append(("exit", len(peer.payloads)))

        assert peer.channel.trace is None
        peer.channel.trace = trace
        return log

    async def test_a_tracer_is_entered_around_the_call_and_gets_its_answer(self, peer, log):
        given = task()
        await peer.send(given)
        assert log == [("enter", given.id, "orders", 0), Event.FINISH, ("exit", 1)]

    async def test_a_failure_is_traced_too(self, peer, log):
        peer.fails("no")
        await peer.send()
        assert log[1:] == [Event.RETRY, ("exit", 1)]

    async def test_an_interrupted_call_has_no_answer_to_trace(self, peer, log):
        await cancel(await begun(peer))
        assert log[1:] == [("exit", 1)]
