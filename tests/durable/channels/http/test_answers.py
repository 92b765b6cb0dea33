"""The HTTP channel: the answer for every kind of response and failure; on real sockets."""

import asyncio
import errno
import os
import socket

import pytest

import servers
from durable.channels.http.calling import now_ms_of, sent, service, task
from durable.stage import START, START_MS
from receivers import answering, date, flapping, head, writing
from tickwheel import ManualClock
from tickwheel.clock import WallClock
from tickwheel.durable.channels.http.channel import (
    EXCERPT_CHARACTERS,
    MAX_RESULT_BYTES,
    MAX_RETRY_AFTER_MS,
    HttpChannel,
    retry_after_ms,
)
from tickwheel.durable.channels.http.target import Targets
from tickwheel.values.signature import new_secret
from tickwheel.values.task import Event

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class TestAnswers:
    @pytest.mark.parametrize("status", [200, 204, 299])
    async def test_2xx_is_finished(self, channel, receiver, status):
        receiver.on("/it", writing(head(status, [("Content-Length", 0)] * (status != 204))))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.result_body, answer.error) == (Event.FINISH, None, None)
        assert answer.healthy is True

    async def test_202_accepts_the_task_until_the_feedback_timeout(self, channel, receiver):
        answer = await sent(channel, receiver, "/accepted", feedback_timeout=1.5)
        assert (answer.event, answer.after_ms, answer.healthy) == (Event.ACCEPT, 1500, True)

    async def test_410_releases_the_task_and_reports_that_the_service_is_gone(
        self, channel, receiver
    ):
        answer = await sent(channel, receiver, "/gone")
        assert (answer.event, answer.gone) == (Event.RELEASE, True)
        assert answer.error.startswith("127.0.0.1 answered 410")

    @pytest.mark.parametrize("path", ["/moved", "/found", "/temporary"])
    async def test_3xx_is_retried_and_not_followed(self, channel, receiver, path):
        answer = await sent(channel, receiver, path)
        assert (answer.event, answer.gone) == (Event.RETRY, False)
        status = {"/moved": 301, "/found": 302, "/temporary": 307}[path]
        assert answer.error == f"127.0.0.1 answered {status}: redirect not followed"
        assert len(receiver.requests) == 1

    @pytest.mark.parametrize("status", [300, 304, 400, 429, 499])
    async def test_3xx_and_4xx_are_retried_and_the_service_counts_as_healthy(
        self, channel, receiver, status
    ):
        receiver.on("/it", answering(status))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.healthy) == (Event.RETRY, True)
        assert (answer.least_ms, answer.hold_ms, answer.after_ms) == (None, None, None)
        assert answer.error.startswith(f"127.0.0.1 answered {status}")

    @pytest.mark.parametrize("status", [500, 503, 599])
    async def test_5xx_is_retried_and_the_service_counts_as_failing(
        self, channel, receiver, status
    ):
        receiver.on("/it", answering(status))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert (answer.least_ms, answer.hold_ms) == (None, None)
        assert answer.error.startswith(f"127.0.0.1 answered {status}")

    @pytest.mark.parametrize("status", [600])
    async def test_an_unknown_status_counts_as_a_failure_of_the_service(
        self, channel, receiver, status
    ):
        receiver.on("/it", answering(status))
        answer = await sent(channel, receiver, "/it")
        assert (answer.event, answer.healthy) == (Event.RETRY, False)

    async def test_each_answer_of_a_flapping_service_counts(self, channel, receiver):
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

    @pytest.mark.parametrize("status", [301, 400, 500])
    async def test_other_statuses_delay_only_the_task(self, channel, receiver, status):
        receiver.on("/it", answering(status, retry_after=7))
        answer = await sent(channel, receiver, "/it")
        assert (answer.least_ms, answer.hold_ms) == (7000, None)

    @pytest.mark.parametrize("path", ["/ok", "/accepted"])
    async def test_retry_after_of_a_success_is_ignored(self, channel, receiver, path):
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
            ("0000000007", 7000),
            ("0" * 5000, 0),
            ("86400", MAX_RETRY_AFTER_MS),
            ("86401", MAX_RETRY_AFTER_MS),
            ("9" * 5000, MAX_RETRY_AFTER_MS),
            ("Fri, 15 Jan 2027 08:00:30 GMT", 30_000),
            ("Friday, 15-Jan-27 08:00:30 GMT", 30_000),
            ("Fri Jan 15 08:00:30 2027", 30_000),
            ("Fri, 15 Jan 2027 09:00:30 +0100", 30_000),
            ("Fri, 15 Jan 2027 07:59:30 GMT", 0),
            ("Mon, 01 Jan 1900 00:00:00 GMT", 0),
            ("Fri, 31 Dec 9999 23:59:59 GMT", MAX_RETRY_AFTER_MS),
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
    async def test_an_invalid_retry_after_is_ignored(self, text):
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

    async def test_space_around_the_result_is_stripped(self, channel, receiver):
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
    async def test_a_body_that_is_not_json_gives_no_result(self, channel, receiver, body):
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

    async def test_the_body_of_a_202_is_not_a_result(self, channel, receiver):
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
    async def test_an_error_shows_the_detail_of_a_problem_document(
        self, channel, receiver, body, shown
    ):
        receiver.on("/it", answering(409, body))
        answer = await sent(channel, receiver, "/it")
        assert answer.error == f"127.0.0.1 answered 409: {shown}"

    async def test_an_error_shows_a_limited_number_of_characters(self, channel, receiver):
        receiver.on("/it", answering(500, ("ö" * 30_000).encode()))
        answer = await sent(channel, receiver, "/it")
        assert answer.error == "127.0.0.1 answered 500: " + "ö" * EXCERPT_CHARACTERS

    async def test_an_error_is_one_line_without_control_characters(self, channel, receiver):
        receiver.on("/it", answering(500, "a\r\n\tb\x1b[31m\u202ec\x07  d\x85e".encode()))
        answer = await sent(channel, receiver, "/it")
        assert answer.error == "127.0.0.1 answered 500: a b [31m c d e"

    @pytest.mark.parametrize("body", [bytes(range(256)), b"\x00" * 10, b"\xff" * 50, b"a\x00b"])
    async def test_an_error_shows_nothing_of_a_binary_body(self, channel, receiver, body):
        receiver.on("/it", answering(500, body))
        assert (await sent(channel, receiver, "/it")).error == "127.0.0.1 answered 500"

    async def test_a_text_cut_within_a_character_still_counts_as_text(self, channel, receiver):
        receiver.on("/it", answering(500, b"x" + ("ö" * 100_000).encode()))
        answer = await sent(channel, receiver, "/it")
        assert answer.error.startswith("127.0.0.1 answered 500: xööö")

    async def test_a_callee_that_echoes_its_request_reveals_no_secret(self, channel, receiver):
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
    async def test_a_callee_that_echoes_a_secret_escaped_reveals_none_either(
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
    async def test_an_invalid_response_is_retried_and_the_service_counts_as_failing(
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

    async def test_a_refused_connection_is_retried(self, channel):
        endpoint = f"http://127.0.0.1:{servers.free_port()}/hook?token=hunter2"
        answer = await channel.send(task(), service(endpoint))
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert "127.0.0.1" in answer.error
        assert "hunter2" not in answer.error

    async def test_a_name_that_does_not_exist_is_retried(self):
        async def lookup(host, port):
            raise socket.gaierror(-2, "Name or service not known")

        channel = HttpChannel(Targets(lookup=lookup), now_ms_of(WallClock()))
        answer = await channel.send(task(), service("https://nobody.example/hook"))
        await channel.close()
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert "nobody.example" in answer.error

    async def test_a_service_that_was_down_is_called_when_it_is_back(self, channel, receiver):
        assert (await sent(channel, receiver)).event is Event.FINISH
        receiver.down()
        for _ in range(3):
            assert (await sent(channel, receiver)).healthy is False
        receiver.up()
        assert (await sent(channel, receiver)).event is Event.FINISH

    async def test_an_idle_connection_that_the_callee_closed_costs_no_attempt(
        self, channel, receiver
    ):
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

    async def test_slow_calls_delay_no_other(self, channel, receiver):
        slow = [asyncio.create_task(sent(channel, receiver, "/slow")) for _ in range(150)]
        await receiver.until(lambda: receiver.held == 150)
        assert (await sent(channel, receiver)).event is Event.FINISH
        receiver.release()
        answers = await asyncio.gather(*slow)
        assert {answer.event for answer in answers} == {Event.FINISH}

    @pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS])
    async def test_a_lack_of_resources_here_is_not_a_failure_of_the_service(
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
