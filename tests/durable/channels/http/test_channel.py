"""The HTTP channel: its requests, and its state; on real sockets."""

import asyncio
import contextlib
import json
import socket
import time
from datetime import UTC, datetime, timedelta

import pytest
import standardwebhooks

import tickwheel
from durable.channels.http.calling import now_ms_of, sent, service, task
from durable.stage import START, START_MS
from receivers import answering
from tickwheel import ManualClock
from tickwheel.clock import WallClock
from tickwheel.durable.channel import CallTrace
from tickwheel.durable.channels.headers import check_headers
from tickwheel.durable.channels.http import channel as channel_module
from tickwheel.durable.channels.http.channel import HttpChannel
from tickwheel.durable.channels.http.target import Targets
from tickwheel.errors import TargetRefused
from tickwheel.http import Pool
from tickwheel.values.signature import new_secret, verify
from tickwheel.values.task import Event

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

ODD_JSON = (
    '{ "order":"ö-1",\t"price": 1.10, "many": 10000000000000000000000, "a":1,"a":2 }'.encode()
)


class TestTheRequest:
    async def test_it_is_a_post_with_the_payload_byte_for_byte(self, channel, receiver):
        await channel.send(task(ODD_JSON), service(receiver.url("/ok?shop=7&x=%20y")))
        (request,) = receiver.requests
        assert (request.method, request.target) == ("POST", "/ok?shop=7&x=%20y")
        assert request.body == ODD_JSON
        assert request.header("content-type") == "application/json"
        assert request.header("content-length") == str(len(ODD_JSON))

    async def test_its_headers_have_task_attempt_epoch_and_due_time(self, channel, receiver):
        one = task(attempt=3, epoch=17, due_at_ms=START_MS + 45)
        await channel.send(one, service(receiver.url()))
        (request,) = receiver.requests
        named = {name: request.header(name) for name, _ in request.headers}
        assert (
            named.items()
            >= {
                "webhook-id": one.id,
                "webhook-timestamp": str(int(START)),
                "tickwheel-service": "orders",
                "tickwheel-attempt": "3",
                "tickwheel-due-at": "2027-01-15T08:00:00.045Z",
                "tickwheel-epoch": "17",
                "user-agent": f"tickwheel/{tickwheel.__version__}",
                "host": f"127.0.0.1:{receiver.port}",
            }.items()
        )

    async def test_no_header_comes_twice(self, channel, receiver):
        await sent(channel, receiver, secrets=(new_secret(),), headers=(("x-shop", "7"),))
        names = [name.lower() for name, _ in receiver.requests[0].headers]
        assert len(names) == len(set(names))

    async def test_the_id_is_the_same_on_every_attempt_and_the_time_is_not(self, receiver):
        clock = ManualClock(START)
        channel = HttpChannel(Targets(allow_private=True), now_ms_of(clock))
        one, called = task(), service(receiver.url())
        await channel.send(one, called)
        clock.advance(90)
        await channel.send(one._replace(attempt=2), called)
        await channel.close()
        first, second = receiver.requests
        assert first.header("webhook-id") == second.header("webhook-id") == one.id
        stamps = [int(each.header("webhook-timestamp")) for each in (first, second)]
        assert stamps == [START, START + 90]
        assert [each.header("tickwheel-attempt") for each in (first, second)] == ["1", "2"]

    async def test_headers_of_the_service_are_added(self, channel, receiver):
        extra = (("Authorization", "Bearer abc"), ("X-Shop", "a, b"), ("x-empty", ""))
        await sent(channel, receiver, headers=extra)
        (request,) = receiver.requests
        assert [request.header(name) for name, _ in extra] == ["Bearer abc", "a, b", ""]

    @pytest.mark.parametrize(
        ("name", "shown"),
        [("orders", "orders"), ("acme/orders", "orders"), ("zahlung ö", "zahlung %C3%B6"),
         ("100%", "100%25")],
    )  # fmt: skip
    async def test_the_service_is_named_as_its_namespace_names_it(
        self, channel, receiver, name, shown
    ):
        await sent(channel, receiver, name=name)
        assert receiver.requests[0].header("tickwheel-service") == shown

    async def test_an_empty_payload_is_an_empty_body(self, channel, receiver):
        await channel.send(task(b""), service(receiver.url()))
        assert receiver.requests[0].body == b""

    async def test_connections_are_kept_and_used_again(self, channel, receiver):
        for _ in range(20):
            await sent(channel, receiver)
        assert receiver.connections == 1


class TestALeaseThatMayBeOver:
    async def test_without_a_lease_nothing_is_sent_and_the_task_is_released(
        self, channel, receiver
    ):
        endpoint = receiver.on("/ok", answering(200))
        answer = await channel.send(task(), service(endpoint), lambda: False)
        assert answer.event is Event.RELEASE
        assert answer.error.startswith("claimed, not sent")
        assert receiver.requests == []

    async def test_the_lease_is_checked_after_the_connection_is_made(self, receiver):
        """Not before: to find and reach the callee may take long."""
        asked = []

        class Slow(Targets):
            async def resolve(self, *args):
                asked.append("resolved")
                return await super().resolve(*args)

        channel = HttpChannel(Slow(allow_private=True), now_ms_of(WallClock()))
        endpoint = receiver.on("/ok", answering(200))
        answer = await channel.send(
            task(), service(endpoint), lambda: not asked.append("may it be sent?")
        )
        assert answer.event is Event.FINISH
        assert asked == ["resolved", "may it be sent?"]
        await channel.close()


class TestSigning:
    async def test_the_public_package_verifies_what_was_received(self, receiver):
        secret = new_secret()
        channel = HttpChannel(Targets(allow_private=True), now_ms_of(WallClock()))
        await channel.send(task(ODD_JSON), service(receiver.url(), secrets=(secret,)))
        await channel.close()
        (request,) = receiver.requests
        webhook = standardwebhooks.Webhook(secret)
        assert webhook.verify(request.body, dict(request.headers)) == json.loads(ODD_JSON)

    async def test_while_a_secret_is_replaced_both_verify_and_no_other(self, receiver):
        new, old, other = new_secret(), new_secret(), new_secret()
        channel = HttpChannel(Targets(allow_private=True), now_ms_of(WallClock()))
        await channel.send(task(), service(receiver.url(), secrets=(new, old)))
        await channel.close()
        (request,) = receiver.requests
        for secret in (new, old):
            standardwebhooks.Webhook(secret).verify(request.body, dict(request.headers))
        with pytest.raises(standardwebhooks.webhooks.WebhookVerificationError):
            standardwebhooks.Webhook(other).verify(request.body, dict(request.headers))

    async def test_our_own_function_verifies_it_too(self, channel, receiver):
        secret, one = new_secret(), task(ODD_JSON)
        await channel.send(one, service(receiver.url(), secrets=(secret,)))
        (request,) = receiver.requests
        assert verify([secret], request.headers, request.body, now=START) == one.id

    async def test_without_a_secret_nothing_is_signed(self, channel, receiver):
        await sent(channel, receiver)
        assert receiver.requests[0].header("webhook-signature") is None
        assert receiver.requests[0].header("webhook-id")

    async def test_a_new_secret_signs_the_next_call(self, channel, receiver):
        before, after = new_secret(), new_secret()
        await sent(channel, receiver, secrets=(before,), version=1)
        await sent(channel, receiver, secrets=(after,), version=2)
        request = receiver.requests[1]
        assert verify([after], request.headers, request.body, now=START)

    async def test_a_service_put_again_with_the_same_version_signs_with_its_own_secret(
        self, channel, receiver
    ):
        before, after = new_secret(), new_secret()
        await sent(channel, receiver, secrets=(before,), version=1)
        await sent(channel, receiver, secrets=(after,), version=1)
        request = receiver.requests[1]
        assert verify([after], request.headers, request.body, now=START)


class TestTargets:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "[::ffff:7f00:1]"])
    async def test_a_private_target_is_not_called(self, receiver, host):
        channel = HttpChannel(Targets(), now_ms_of(WallClock()))
        endpoint = f"http://{host}:{receiver.port}/ok?token=hunter2"
        answer = await channel.send(task(), service(endpoint))
        await channel.close()
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert "must not be called" in answer.error
        assert "hunter2" not in answer.error
        assert receiver.connections == 0

    async def test_a_name_that_leads_to_one_is_not_called(self, receiver):
        async def lookup(host, port):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        channel = HttpChannel(Targets(lookup=lookup), now_ms_of(WallClock()))
        endpoint = f"http://innocent.example:{receiver.port}/ok"
        answer = await channel.send(task(), service(endpoint))
        await channel.close()
        assert answer.event is Event.RETRY
        assert "innocent.example must not be called: its address is loopback" in answer.error
        assert receiver.connections == 0

    async def test_an_allowed_network_is_called(self, receiver):
        channel = HttpChannel(Targets(allow=["127.0.0.0/8"]), now_ms_of(WallClock()))
        assert (await sent(channel, receiver)).event is Event.FINISH
        await channel.close()

    @pytest.mark.parametrize("endpoint", ["", "ftp://h/", "http://a@b/", "nonsense"])
    async def test_an_invalid_endpoint_is_an_answer(self, channel, endpoint):
        answer = await channel.send(task(), service(endpoint))
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert answer.error.startswith("orders cannot be called: an endpoint must")

    async def test_an_invalid_header_or_secret_is_an_answer(self, channel, receiver):
        for wrong in ({"headers": (("x-a", "hunter2\r\nx: y"),)}, {"secrets": ("hunter2",)}):
            answer = await sent(channel, receiver, **wrong)
            assert answer.event is Event.RETRY
            assert "hunter2" not in answer.error
        assert receiver.connections == 0


class TestHeaders:
    @pytest.mark.parametrize(
        "headers",
        [{}, {"Authorization": "Bearer abc"}, {"x-a": "", "x-b": "a b"}, [("X-A", "~!@#$%^&*()")],
         {"x-long": "x" * 4096}, {f"x-{n}": "1" for n in range(50)}, {"accept": "*/*"}],
        ids=lambda headers: ascii(headers)[:30],
    )  # fmt: skip
    async def test_valid_headers_are_accepted(self, headers):
        check_headers(headers)

    async def test_headers_of_tickwheel_and_of_the_connection_are_reserved(self):
        for name in (
            "Host", "content-length", "Connection", "Transfer-Encoding", "TE", "Trailer", "Upgrade",
            "Expect", "Keep-Alive", "Proxy-Connection", "Content-Type", "Content-Encoding",
            "User-Agent", "Webhook-Id", "webhook-timestamp", "webhook-signature", "Webhook-Other",
            "Tickwheel-Attempt", "tickwheel-anything",
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"the header {name.lower()} is reserved"):
                check_headers({name: "hunter2"})

    @pytest.mark.parametrize("name", ["", "a b", "a:b", "a\r\nb", "ö", "x" * 101, "a\x00", "(a)"])
    async def test_an_invalid_header_name_is_refused(self, name):
        with pytest.raises(ValueError, match="a header's name must be"):
            check_headers({name: "hunter2"})

    @pytest.mark.parametrize(
        "value",
        ["hunter2\r\nx: y", "hunter2\n", "hunter2\x00", "hunter2 ", " hunter2", "hunter2ö",
         "\thunter2", "hunter2\x7f", "x" * 4097],
        ids=ascii,
    )  # fmt: skip
    async def test_a_value_that_cannot_be_sent_is_refused_and_not_shown(self, value):
        with pytest.raises(ValueError, match="value of the header x-key must be") as refused:
            check_headers({"X-Key": value})
        assert "hunter2" not in str(refused.value)

    async def test_a_header_name_given_twice_is_refused(self):
        with pytest.raises(ValueError, match="x-a is given twice"):
            check_headers([("x-a", "1"), ("X-A", "2")])

    async def test_too_many_headers_are_refused(self):
        with pytest.raises(ValueError, match="may have 50 headers, this one has 51"):
            check_headers({f"x-{n}": "1" for n in range(51)})

    @pytest.mark.parametrize("headers", [{"x-a": 1}, {1: "a"}, {"x-a": None}])
    async def test_headers_that_are_not_text_are_refused(self, headers):
        with pytest.raises(TypeError, match="must be str"):
            check_headers(headers)


class TestTheChannel:
    async def test_its_services_share_one_semaphore_and_can_be_interrupted(self, channel):
        shared = channel.semaphore(service("http://example.com"))
        assert shared is not None
        assert shared is channel.semaphore(service("http://example.org"))
        assert channel.interruptible(service("http://example.com")) is True

    async def test_it_is_remote(self, channel):
        assert channel.remote is True

    async def test_a_service_can_be_checked_before_it_is_called(self, channel):
        channel.check(service("http://10.0.0.1/", secrets=(new_secret(),), headers=(("x", "1"),)))
        for wrong, error in (
            (service("ftp://example.com/"), TargetRefused),
            (service("http://169.254.169.254/"), TargetRefused),
            (service("http://example.com/", secrets=("hunter2",)), ValueError),
            (service("http://example.com/", headers=(("host", "hunter2"),)), ValueError),
        ):
            with pytest.raises(error) as refused:
                channel.check(wrong)
            assert "hunter2" not in str(refused.value)

    async def test_a_trace_is_entered_around_each_call_and_adds_headers(self, channel, receiver):
        log, ended = [], []

        @contextlib.contextmanager
        def trace(task, service):
            log.append(("begin", task.id, service.name))
            try:
                yield CallTrace([("traceparent", "00-1-2-01")], ended.append)
            finally:
                log.append(("end", len(receiver.requests)))

        channel.trace = trace
        one = task()
        await channel.send(one, service(receiver.url(), secrets=(new_secret(),)))
        assert log == [("begin", one.id, "orders"), ("end", 1)]
        assert receiver.requests[0].header("traceparent") == "00-1-2-01"
        assert [answer.event for answer in ended] == [Event.FINISH]
        call = asyncio.create_task(sent(channel, receiver, "/slow"))
        await receiver.until(lambda: receiver.held == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled()
        assert log[-1] == ("end", 2)

    async def test_it_observes_the_latency_of_each_service(self, receiver):
        stopwatch = ManualClock(5)
        channel = HttpChannel(
            Targets(allow_private=True), now_ms_of(WallClock()), stopwatch=stopwatch
        )

        def taking(seconds, status=200):
            async def behave(call):
                stopwatch.advance(seconds)
                await call.answer(status)

            return behave

        receiver.on("/a", taking(0.002), taking(0.2, 500))
        receiver.on("/b", taking(7))
        for path in ("/a", "/a", "/b"):
            await sent(channel, receiver, path, name=path[1:])
        await channel.close()
        took = {name: (one.count, round(one.sum, 6)) for name, one in channel.latencies.items()}
        assert took == {"a": (2, 0.202), "b": (1, 7)}

    async def test_a_call_without_an_answer_is_observed_too(self, channel, receiver):
        await sent(channel, receiver, "/closed")
        call = asyncio.create_task(sent(channel, receiver, "/slow"))
        await receiver.until(lambda: receiver.held == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert channel.latencies["orders"].count == 2

    async def test_a_change_of_the_service_applies_to_the_next_call_and_keeps_its_latencies(
        self, channel, receiver
    ):
        await sent(channel, receiver, "/ok", version=1, headers=(("x-a", "1"),))
        await sent(channel, receiver, "/json", version=2, headers=(("x-a", "2"),))
        assert [request.path for request in receiver.requests] == ["/ok", "/json"]
        assert [request.header("x-a") for request in receiver.requests] == ["1", "2"]
        assert channel.latencies["orders"].count == 2

    async def test_a_plan_is_made_once_per_service(self, channel, receiver, monkeypatch):
        made = []
        plan_for = channel_module.plan_for
        monkeypatch.setattr(
            channel_module, "plan_for", lambda *args: made.append(args) or plan_for(*args)
        )
        for _ in range(5):
            await sent(channel, receiver)
        assert len(made) == 1

    async def test_a_service_that_was_deleted_can_be_forgotten(self, channel, receiver):
        await sent(channel, receiver)
        channel.forget("orders")
        channel.forget("unknown")
        assert channel.latencies == {}
        assert (await sent(channel, receiver)).event is Event.FINISH

    async def test_it_keeps_a_limited_number_of_plans(self, channel, receiver, monkeypatch):
        monkeypatch.setattr(channel_module, "MAX_PLANS", 3)
        for number in range(10):
            await sent(channel, receiver, name=f"service-{number}")
        assert sorted(channel.latencies) == ["service-7", "service-8", "service-9"]
        assert len(channel._plans) == 3

    async def test_closing_it_closes_its_own_pool_and_may_be_done_twice(self, receiver):
        channel = HttpChannel(Targets(allow_private=True), now_ms_of(WallClock()))
        await channel.close()
        await sent(channel, receiver)
        await channel.close()
        await channel.close()

    async def test_a_given_pool_is_used_and_stays_open(self, receiver):
        targets = Targets(allow_private=True)
        pool = Pool(resolve=targets.resolve)
        channel = HttpChannel(targets, now_ms_of(WallClock()), pool=pool)
        await sent(channel, receiver)
        await channel.close()
        assert (await pool.request("GET", receiver.url())).status == 200
        assert receiver.connections == 1
        await pool.close()

    async def test_the_timestamp_is_the_wall_clock_time(self, receiver):
        channel = HttpChannel(Targets(allow_private=True), now_ms_of(WallClock()))
        before = int(time.time())
        await sent(channel, receiver)
        await channel.close()
        stamp = int(receiver.requests[0].header("webhook-timestamp"))
        assert before <= stamp <= datetime.now(UTC).timestamp() + timedelta(seconds=1).seconds
