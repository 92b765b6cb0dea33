"""The HTTP channel: what is sent, and what every kind of answer comes to; on real sockets."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import time
from datetime import UTC, datetime, timedelta

import pytest
import pytest_asyncio
import standardwebhooks

import servers
import tickwheel
from durable.stage import START, START_MS, a_task
from receivers import Receiver, answering, date, flapping, head, writing
from tickwheel import ManualClock
from tickwheel.clock import WallClock
from tickwheel.durable.channel import CallTrace
from tickwheel.durable.channels.http import channel as channel_module
from tickwheel.durable.channels.http.channel import (
    EXCERPT_CHARACTERS,
    MAX_HOLD_MS,
    MAX_RESULT_BYTES,
    HttpChannel,
    check_headers,
    retry_after_ms,
)
from tickwheel.durable.channels.http.target import Targets
from tickwheel.errors import TargetRefused
from tickwheel.http import Pool
from tickwheel.values.service import Service
from tickwheel.values.signature import new_secret, verify
from tickwheel.values.task import Event

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

ODD_JSON = (
    '{ "order":"ö-1",\t"price": 1.10, "many": 10000000000000000000000, "a":1,"a":2 }'.encode()
)


@pytest.fixture
def receiver():
    with Receiver() as receiver:
        yield receiver


@pytest_asyncio.fixture
async def channel():
    channel = HttpChannel(Targets(allow_private=True), now_ms_of(ManualClock(START)))
    yield channel
    await channel.close()


def now_ms_of(clock):
    """The store's time, which is this clock's."""
    return lambda: clock.time_ns() / 1e6


def task(body=b"{}", attempt=1, **more):
    return a_task(service="orders", body=body, attempt=attempt, **more)


def service(endpoint, **options):
    return Service(options.pop("name", "orders"), "http", endpoint=endpoint, **options)


async def sent(channel, receiver, path="/ok", **options):
    """The answer of the service at a path of the receiver."""
    return await channel.send(task(), service(receiver.url(path), **options))


class TestTheRequest:
    async def test_it_is_a_post_with_the_payload_byte_for_byte(self, channel, receiver):
        await channel.send(task(ODD_JSON), service(receiver.url("/ok?shop=7&x=%20y")))
        (request,) = receiver.requests
        assert (request.method, request.target) == ("POST", "/ok?shop=7&x=%20y")
        assert request.body == ODD_JSON
        assert request.header("content-type") == "application/json"
        assert request.header("content-length") == str(len(ODD_JSON))

    async def test_it_says_which_task_attempt_epoch_and_due_time(self, channel, receiver):
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
    async def test_nothing_is_sent_and_the_task_goes_back(self, channel, receiver):
        endpoint = receiver.on("/ok", answering(200))
        answer = await channel.send(task(), service(endpoint), lambda: False)
        assert answer.event is Event.RELEASE
        assert answer.error.startswith("claimed, not sent")
        assert receiver.requests == []

    async def test_it_is_asked_for_when_the_connection_is_there(self, receiver):
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

    async def test_ours_verifies_it_too(self, channel, receiver):
        secret, one = new_secret(), task(ODD_JSON)
        await channel.send(one, service(receiver.url(), secrets=(secret,)))
        (request,) = receiver.requests
        assert verify([secret], request.headers, request.body, now=START) == one.id

    async def test_without_a_secret_nothing_is_signed(self, channel, receiver):
        await sent(channel, receiver)
        assert receiver.requests[0].header("webhook-signature") is None
        assert receiver.requests[0].header("webhook-id")

    async def test_a_new_secret_signs_from_the_next_call_on(self, channel, receiver):
        before, after = new_secret(), new_secret()
        await sent(channel, receiver, secrets=(before,), version=1)
        await sent(channel, receiver, secrets=(after,), version=2)
        request = receiver.requests[1]
        assert verify([after], request.headers, request.body, now=START)

    async def test_a_service_made_anew_with_the_same_version_signs_with_its_own(
        self, channel, receiver
    ):
        before, after = new_secret(), new_secret()
        await sent(channel, receiver, secrets=(before,), version=1)
        await sent(channel, receiver, secrets=(after,), version=1)
        request = receiver.requests[1]
        assert verify([after], request.headers, request.body, now=START)


class TestAnswers:
    @pytest.mark.parametrize("status", [200, 201, 203, 204, 205, 206, 226, 299])
    async def test_2xx_is_finished(self, channel, receiver, status):
        receiver.on("/it", writing(head(status, [("Content-Length", 0)] * (status != 204))))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.result_body, answer.error) == (Event.FINISH, None, None)
        assert answer.healthy is True

    async def test_202_is_accepted_until_the_feedback_timeout(self, channel, receiver):
        answer = await sent(channel, receiver, "/accepted", feedback_timeout=1.5)
        assert (answer.event, answer.after_ms, answer.healthy) == (Event.ACCEPT, 1500, True)

    async def test_410_hands_it_back_and_says_that_the_service_is_gone(self, channel, receiver):
        answer = await sent(channel, receiver, "/gone")
        assert (answer.event, answer.gone) == (Event.RELEASE, True)
        assert answer.error.startswith("127.0.0.1 answered 410")

    @pytest.mark.parametrize("path", ["/moved", "/found", "/temporary"])
    async def test_3xx_is_tried_again_and_not_followed(self, channel, receiver, path):
        answer = await sent(channel, receiver, path)
        assert (answer.event, answer.gone) == (Event.RETRY, False)
        status = {"/moved": 301, "/found": 302, "/temporary": 307}[path]
        assert answer.error == f"127.0.0.1 answered {status}: redirect not followed"
        assert len(receiver.requests) == 1

    @pytest.mark.parametrize("status", [300, 304, 400, 401, 403, 404, 409, 418, 422, 429, 499])
    async def test_3xx_and_4xx_are_tried_again_and_the_service_works(
        self, channel, receiver, status
    ):
        receiver.on("/it", answering(status))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.healthy) == (Event.RETRY, True)
        assert (answer.least_ms, answer.hold_ms, answer.after_ms) == (None, None, None)
        assert answer.error.startswith(f"127.0.0.1 answered {status}")

    @pytest.mark.parametrize("status", [500, 501, 502, 503, 504, 599])
    async def test_5xx_is_tried_again_and_the_service_does_not_work(
        self, channel, receiver, status
    ):
        receiver.on("/it", answering(status))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert (answer.least_ms, answer.hold_ms) == (None, None)
        assert answer.error.startswith(f"127.0.0.1 answered {status}")

    @pytest.mark.parametrize("status", [600, 999])
    async def test_a_status_that_does_not_exist_counts_as_broken(self, channel, receiver, status):
        receiver.on("/it", answering(status))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.healthy) == (Event.RETRY, False)

    async def test_one_that_flaps_is_believed_each_time(self, channel, receiver):
        receiver.on("/it", flapping(answering(500), answering(200), answering(404)))
        events = [(await sent(channel, receiver, "/it")).event for _ in range(4)]
        assert events == [Event.RETRY, Event.FINISH, Event.RETRY, Event.RETRY]


class TestRetryAfter:
    @pytest.mark.parametrize(("status", "healthy"), [(429, True), (503, False)])
    @pytest.mark.parametrize("form", ["seconds", "date"])
    async def test_429_and_503_hold_the_whole_service(
        self, channel, receiver, status, healthy, form
    ):
        wanted = 7 if form == "seconds" else date(START + 7)
        receiver.on("/it", answering(status, retry_after=wanted))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.healthy) == (Event.RETRY, healthy)
        assert (answer.least_ms, answer.hold_ms) == (7000, 7000)

    @pytest.mark.parametrize("status", [301, 400, 404, 409, 500, 502])
    async def test_others_only_put_the_task_off(self, channel, receiver, status):
        receiver.on("/it", answering(status, retry_after=7))
        answer = await sent(channel, receiver, "/it")
        assert (answer.least_ms, answer.hold_ms) == (7000, None)

    @pytest.mark.parametrize("path", ["/ok", "/accepted"])
    async def test_with_a_success_it_means_nothing(self, channel, receiver, path):
        receiver.on(path, answering(202 if path == "/accepted" else 200, retry_after=7))
        answer = await sent(channel, receiver, path)
        assert (answer.least_ms, answer.hold_ms) == (None, None)

    @pytest.mark.parametrize(
        ("text", "ms"),
        [
            ("0", 0),
            ("1", 1000),
            (" 120 ", 120_000),
            ("007", 7000),
            ("86400", MAX_HOLD_MS),
            ("86401", MAX_HOLD_MS),
            ("9" * 5000, MAX_HOLD_MS),
            ("Fri, 15 Jan 2027 08:00:30 GMT", 30_000),
            ("Friday, 15-Jan-27 08:00:30 GMT", 30_000),
            ("Fri Jan 15 08:00:30 2027", 30_000),
            ("Fri, 15 Jan 2027 09:00:30 +0100", 30_000),
            ("Fri, 15 Jan 2027 07:59:30 GMT", 0),
            ("Mon, 01 Jan 1900 00:00:00 GMT", 0),
            ("Fri, 31 Dec 9999 23:59:59 GMT", MAX_HOLD_MS),
        ],
    )
    async def test_seconds_and_dates_count_up_to_a_day(self, text, ms):
        assert retry_after_ms(text, START_MS) == ms

    @pytest.mark.parametrize(
        "text",
        [None, "", " ", "-1", "1.5", "1e3", "٣", "soon", "1 s", "0x10", "Fri", "15 Jan", "\x00",
         "Fri, 32 Jan 2027 08:00:30 GMT", "Fri, 15 Jan 2027 25:00:00 GMT", "2027-01-15T08:00:00Z",
         "Fri, 15 Jan 99999 08:00:30 GMT", "," * 10_000, "Fri, 15 Jan 2027 08:00:30 +9999999"],
        ids=repr,
    )  # fmt: skip
    async def test_what_is_neither_is_ignored(self, text):
        assert retry_after_ms(text, START_MS) is None

    async def test_a_date_is_never_early_by_a_part_of_a_second(self):
        assert retry_after_ms(date(START + 2), START_MS + 300.000001) == 1700

    async def test_a_date_is_measured_when_the_answer_comes(self, receiver):
        clock = ManualClock(START)
        channel = HttpChannel(Targets(allow_private=True), now_ms_of(clock))

        async def late(call):
            clock.advance(10)
            await call.answer(503, headers=[("Retry-After", date(START + 30))])

        receiver.on("/it", late)
        answer = await sent(channel, receiver, "/it")
        await channel.close()
        assert answer.hold_ms == 20_000


class TestResults:
    @pytest.mark.parametrize(
        "text",
        ['{"done": true}', "[1, 2.50]", '"ö"', "null", "0", "1e5", '{"a":1,"a":2}', r'"\u0000"',
         r'"\ud83d\ude00"', "[" * 200 + "]" * 200, "[" + "[]," * 500 + "[]]"],
        ids=lambda text: text[:20],
    )  # fmt: skip
    async def test_a_body_of_json_is_the_result_as_it_was_written(self, channel, receiver, text):
        receiver.on("/it", answering(200, text.encode()))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.result_body) == (Event.FINISH, text)

    async def test_space_around_it_is_left_out(self, channel, receiver):
        receiver.on("/it", answering(201, b' \r\n{"a": 1}\n'))
        assert (await sent(channel, receiver, "/it")).result_body == '{"a": 1}'

    @pytest.mark.parametrize(
        "body",
        [b"thank you", b"", b" ", b"{", b"{'a': 1}", b"NaN", b"[Infinity]", b"-Infinity", b"1e999",
         b"\xff\xfe", '{"a": 1}'.encode("utf-16"), b"\xef\xbb\xbf{}", b'"\x00"', b'"\n"', b"01",
         br'"\ud800"', br'{"\udfff": 1}', b"9" * 5000, b"[" * 201 + b"]" * 201,
         b'{"a":' * 5000 + b"1" + b"}" * 5000, b"[" * 60_000, b"{}{}", b"<html>"],
        ids=lambda body: ascii(body[:20]),
    )  # fmt: skip
    async def test_what_is_not_json_is_finished_without_a_result(self, channel, receiver, body):
        receiver.on("/it", answering(200, body))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.result_body) == (Event.FINISH, None)

    @pytest.mark.parametrize(("more", "kept"), [(0, True), (1, False), (10_000_000, False)])
    async def test_a_result_may_have_64_kib(self, channel, receiver, more, kept):
        body = b'"' + b"x" * (MAX_RESULT_BYTES - 2 + more) + b'"'
        receiver.on("/it", answering(200, body))
        answer = await sent(channel, receiver, "/it")
        assert answer.event is Event.FINISH
        assert (answer.result_body is not None) is kept

    async def test_the_body_of_a_202_is_no_result(self, channel, receiver):
        receiver.on("/it", answering(202, b"{}"))
        assert (await sent(channel, receiver, "/it")).result_body is None


class TestErrors:
    async def test_an_error_shows_the_beginning_of_a_text(self, channel, receiver):
        answer = await sent(channel, receiver, "/bad")
        assert answer.error == "127.0.0.1 answered 400: order is missing"

    @pytest.mark.parametrize(
        ("body", "shown"),
        [
            (b'{"type": "urn:x", "detail": "the bank is closed"}', "the bank is closed"),
            (b'{"detail": 5}', '{"detail": 5}'),
            (b'{"detail": "cut', '{"detail": "cut'),
        ],
    )
    async def test_of_a_problem_document_its_detail_is_shown(self, channel, receiver, body, shown):
        receiver.on("/it", answering(409, body))
        answer = await sent(channel, receiver, "/it")
        assert answer.error == f"127.0.0.1 answered 409: {shown}"

    async def test_it_shows_so_many_characters_and_no_more(self, channel, receiver):
        receiver.on("/it", answering(500, ("ö" * 30_000).encode()))
        answer = await sent(channel, receiver, "/it")
        assert answer.error == "127.0.0.1 answered 500: " + "ö" * EXCERPT_CHARACTERS

    async def test_it_is_one_line_that_does_nothing_to_a_terminal(self, channel, receiver):
        receiver.on("/it", answering(500, "a\r\n\tb\x1b[31m\u202ec\x07  d\x85e".encode()))
        answer = await sent(channel, receiver, "/it")
        assert answer.error == "127.0.0.1 answered 500: a b [31m c d e"

    @pytest.mark.parametrize("body", [bytes(range(256)), b"\x00" * 10, b"\xff" * 50, b"a\x00b"])
    async def test_of_what_is_not_text_it_shows_nothing(self, channel, receiver, body):
        receiver.on("/it", answering(500, body))
        assert (await sent(channel, receiver, "/it")).error == "127.0.0.1 answered 500"

    async def test_a_text_cut_within_a_character_is_still_a_text(self, channel, receiver):
        receiver.on("/it", answering(500, b"x" + ("ö" * 100_000).encode()))
        answer = await sent(channel, receiver, "/it")
        assert answer.error.startswith("127.0.0.1 answered 500: xööö")

    async def test_a_callee_that_sends_everything_back_gives_no_secret_away(
        self, channel, receiver
    ):
        secret = new_secret()
        receiver.on("/it", answering(500, secret.encode()))
        headers = (
            ("Authorization", "Bearer hunter2-hunter2"),
            ("X-Quoted", 'hunter2"<hunter2>'),
            ("X-Api-Key", "hunter2"),
        )
        target = "/echo?token=hunter2%20hunter2"
        answer = await sent(channel, receiver, target, headers=headers, secrets=(secret,))
        assert answer.error.startswith("127.0.0.1 answered 500: /echo?********")
        assert "hunter2" not in answer.error
        assert receiver.requests[0].header("webhook-signature") not in answer.error
        answer = await sent(channel, receiver, "/it", headers=headers, secrets=(secret,))
        assert answer.error == "127.0.0.1 answered 500: ********"

    @pytest.mark.parametrize(
        "page",
        [
            "the token hunter2-hunter2 is wrong",
            '{"error": "no: Bearer hunter2-hunter2"}',
            "<b>&quot;hunter2&lt;hunter2&gt;</b>",
            '{"error": "\\"hunter2<hunter2>"}',
            '{"error": "hunter2\\/hunter2"}',
            "x" * 480 + " hunter2-hunter2",
            "hunter2-hunter2 " * 5000,
        ],
        ids=lambda page: page[:20],
    )
    async def test_nor_does_one_that_sends_a_part_or_writes_it_another_way(
        self, channel, receiver, page
    ):
        receiver.on("/it", answering(401, page.encode()))
        headers = (("Authorization", "Bearer hunter2-hunter2"), ("X-Key", '"hunter2<hunter2>'),
                   ("X-Path", "hunter2/hunter2"))  # fmt: skip
        answer = await sent(channel, receiver, "/it", headers=headers)
        assert "unter2" not in answer.error
        assert "****" in answer.error or "x" * 480 in answer.error


class TestTrouble:
    @pytest.mark.parametrize(
        "path",
        ["/closed", "/reset", "/half", "/half-head", "/half-chunk", "/garbage", "/bad-length",
         "/bad-chunk", "/huge-headers", "/endless-headers"],
    )  # fmt: skip
    async def test_what_is_no_answer_is_tried_again_and_the_service_does_not_work(
        self, channel, receiver, path
    ):
        answer = await sent(channel, receiver, path + "?token=hunter2", secrets=(new_secret(),))
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert "127.0.0.1" in answer.error
        assert len(answer.error) < 300
        assert "hunter2" not in answer.error
        assert (await sent(channel, receiver)).event is Event.FINISH

    @pytest.mark.parametrize("path", ["/endless", "/endless-chunks"])
    async def test_an_endless_body_is_cut_off_and_is_finished_without_a_result(
        self, channel, receiver, path
    ):
        answer = await sent(channel, receiver, path)
        assert (answer.event, answer.result_body) == (Event.FINISH, None)
        assert receiver.poured < 100_000_000  # what the buffers on the way hold, at most
        assert (await sent(channel, receiver)).event is Event.FINISH

    async def test_an_endless_error_is_cut_off_too(self, channel, receiver):
        async def endless(call):
            await call.write(head(500))
            while True:
                await call.write(b"no " * 10_000)

        receiver.on("/it", endless)
        answer = await sent(channel, receiver, "/it")
        assert answer.error.startswith("127.0.0.1 answered 500: no no no")

    async def test_where_nobody_listens_it_is_tried_again(self, channel):
        endpoint = f"http://127.0.0.1:{servers.free_port()}/hook?token=hunter2"
        answer = await channel.send(task(), service(endpoint))
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert "127.0.0.1" in answer.error
        assert "hunter2" not in answer.error

    async def test_a_name_that_does_not_exist_is_tried_again(self):
        async def lookup(host, port):
            raise socket.gaierror(-2, "Name or service not known")

        channel = HttpChannel(Targets(lookup=lookup), now_ms_of(WallClock()))
        answer = await channel.send(task(), service("https://nobody.example/hook"))
        await channel.close()
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert "nobody.example" in answer.error

    async def test_one_that_was_down_is_called_again_when_it_is_back(self, channel, receiver):
        assert (await sent(channel, receiver)).event is Event.FINISH
        receiver.down()
        for _ in range(3):
            assert (await sent(channel, receiver)).healthy is False
        receiver.up()
        assert (await sent(channel, receiver)).event is Event.FINISH

    async def test_a_connection_that_was_closed_meanwhile_costs_no_attempt(self, channel, receiver):
        receiver.on("/it", writing(head(200, [("Content-Length", 0)])))  # and then it closes
        for _ in range(5):
            assert (await sent(channel, receiver, "/it")).event is Event.FINISH

    @pytest.mark.parametrize("path", ["/slow", "/stuck"])
    async def test_a_call_that_is_cancelled_ends_at_once_and_hangs_up(
        self, channel, receiver, path
    ):
        call = asyncio.create_task(sent(channel, receiver, path))
        await receiver.until(lambda: receiver.held == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await receiver.until(lambda: receiver.hang_ups == 1)
        assert (await sent(channel, receiver)).event is Event.FINISH

    async def test_slow_calls_hold_up_no_other(self, channel, receiver):
        slow = [asyncio.create_task(sent(channel, receiver, "/slow")) for _ in range(150)]
        await receiver.until(lambda: receiver.held == 150)
        assert (await sent(channel, receiver)).event is Event.FINISH
        receiver.release()
        answers = await asyncio.gather(*slow)
        assert {answer.event for answer in answers} == {Event.FINISH}

    @pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
    async def test_want_of_something_here_is_no_failure_of_the_service(
        self, channel, receiver, monkeypatch, caplog, number
    ):
        async def none_left(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", none_left)
        answer = await channel.send(task(), service(receiver.url()))
        assert (answer.event, answer.healthy) == (Event.SNOOZE, None)
        assert answer.after_ms > 0
        assert os.strerror(number) in answer.error
        assert "file descriptors" in caplog.text


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
    async def test_an_endpoint_that_is_none_is_an_answer(self, channel, endpoint):
        answer = await channel.send(task(), service(endpoint))
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert answer.error.startswith("orders cannot be called: an endpoint must")

    async def test_a_header_or_secret_that_cannot_be_sent_is_an_answer(self, channel, receiver):
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
    async def test_these_may_be_added(self, headers):
        check_headers(headers)

    @pytest.mark.parametrize(
        "name",
        ["Host", "content-length", "Connection", "Transfer-Encoding", "TE", "Trailer", "Upgrade",
         "Expect", "Keep-Alive", "Proxy-Connection", "Content-Type", "Content-Encoding",
         "User-Agent", "Webhook-Id", "webhook-timestamp", "webhook-signature", "Webhook-Other",
         "Tickwheel-Attempt", "tickwheel-anything"],
    )  # fmt: skip
    async def test_ours_and_those_of_the_connection_cannot_be_chosen(self, name):
        with pytest.raises(ValueError, match=f"the header {name.lower()} is reserved"):
            check_headers({name: "hunter2"})

    @pytest.mark.parametrize("name", ["", "a b", "a:b", "a\r\nb", "ö", "x" * 101, "a\x00", "(a)"])
    async def test_a_name_that_is_none_is_refused(self, name):
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

    async def test_a_name_can_be_given_once(self):
        with pytest.raises(ValueError, match="x-a is given twice"):
            check_headers([("x-a", "1"), ("X-A", "2")])

    async def test_there_can_be_so_many(self):
        with pytest.raises(ValueError, match="may have 50 headers, this one has 51"):
            check_headers({f"x-{n}": "1" for n in range(51)})

    @pytest.mark.parametrize("headers", [{"x-a": 1}, {1: "a"}, {"x-a": None}])
    async def test_they_are_text(self, headers):
        with pytest.raises(TypeError, match="must be str"):
            check_headers(headers)


class TestTheChannel:
    async def test_its_services_share_one_gate_and_can_be_interrupted(self, channel):
        shared = channel.semaphore(service("http://example.com"))
        assert shared is not None
        assert shared is channel.semaphore(service("http://example.org"))
        assert channel.interruptible(service("http://example.com")) is True

    async def test_what_it_sent_goes_on_elsewhere(self, channel):
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

    async def test_it_keeps_how_long_calls_took_by_service(self, receiver):
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

    async def test_a_call_that_got_no_answer_counts_there_too(self, channel, receiver):
        await sent(channel, receiver, "/closed")
        call = asyncio.create_task(sent(channel, receiver, "/slow"))
        await receiver.until(lambda: receiver.held == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert channel.latencies["orders"].count == 2

    async def test_a_change_of_the_service_counts_from_the_next_call_and_keeps_its_latencies(
        self, channel, receiver
    ):
        await sent(channel, receiver, "/ok", version=1, headers=(("x-a", "1"),))
        await sent(channel, receiver, "/json", version=2, headers=(("x-a", "2"),))
        assert [request.path for request in receiver.requests] == ["/ok", "/json"]
        assert [request.header("x-a") for request in receiver.requests] == ["1", "2"]
        assert channel.latencies["orders"].count == 2

    async def test_what_is_the_same_for_every_call_is_made_once(
        self, channel, receiver, monkeypatch
    ):
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

    async def test_it_keeps_plans_for_so_many_services_and_no_more(
        self, channel, receiver, monkeypatch
    ):
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

    async def test_a_pool_that_was_given_is_used_and_left_open(self, receiver):
        targets = Targets(allow_private=True)
        pool = Pool(resolve=targets.resolve)
        channel = HttpChannel(targets, now_ms_of(WallClock()), pool=pool)
        await sent(channel, receiver)
        await channel.close()
        assert (await pool.request("GET", receiver.url())).status == 200
        assert receiver.connections == 1
        await pool.close()

    async def test_by_default_the_time_is_that_of_the_day(self, receiver):
        channel = HttpChannel(Targets(allow_private=True), now_ms_of(WallClock()))
        before = int(time.time())
        await sent(channel, receiver)
        await channel.close()
        stamp = int(receiver.requests[0].header("webhook-timestamp"))
        assert before <= stamp <= datetime.now(UTC).timestamp() + timedelta(seconds=1).seconds
