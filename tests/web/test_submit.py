"""Submitting tasks over HTTP: one, with keys, in batches, and the limits of a request."""

import json
import re
import tracemalloc
from datetime import UTC, datetime, timedelta

import pytest

from tickwheel.web.app import Limits
from tickwheel.web.route import JSON, NDJSON
from web.serving import MOMENT, nested

FIELDS = [
    "id", "service", "payload", "key", "state", "due_at", "shard", "attempt", "failures",
    "max_attempts", "created_at", "updated_at", "result", "error", "priority", "timeout",
    "deadline", "tags", "replay_of", "replayed_as", "node", "epoch",
]  # fmt: skip

# JSON that would change if it were decoded and encoded again.
PAYLOADS = [
    b'{"a" : 1,\t"b":  [ 1 ,2 ] }',
    b"123456789012345678901234567890123456789012345678901234567890",
    b'{"a": 1, "a": 2}',
    rb'"\u0041\u00e9\/\ud83d\ude00"',
    '"é😀"'.encode(),
    b"1.10000000000000000000000000000000001",
    b"1E+2",
    b"-0",
    b"1e400",
    rb'"\u0000"',
    b'""',
    b"null",
    b"false",
    b"[]",
    b'{"z": 1, "a": 2, "m": {"y": 1, "b": 2}}',
    b"[" * 100 + b"]" * 100,
]


def moment(text):
    return datetime.fromisoformat(text)


def raw_payload(answer):
    """Return the payload's bytes within an answer."""
    return re.search(rb'"payload":(.*),"key":', answer.body, re.DOTALL)[1]


class TestSubmit:
    def test_the_answer_has_all_fields_in_order(self, mail):
        answer = mail.post("/v1/tasks", {"service": "mail", "payload": {"to": "a"}, "delay": 60})
        assert answer.status == 201
        task = answer.json
        assert [*task] == FIELDS
        assert answer.headers["location"] == f"/v1/tasks/{task['id']}"
        assert re.fullmatch("[0-9a-f]{32}", task["id"])
        assert (task["service"], task["payload"], task["state"]) == ("mail", {"to": "a"}, "delay")
        assert (task["attempt"], task["failures"], task["max_attempts"]) == (0, 0, 5)
        assert task["result"] is task["error"] is task["key"] is task["node"] is None
        for name in ("due_at", "created_at", "updated_at"):
            assert MOMENT.fullmatch(task[name])
        assert mail.get(answer.headers["location"], status=200).json == task

    def test_all_options_are_kept(self, either_api):
        either_api.service()
        wanted = {
            "service": "mail", "payload": [1], "key": "order:1", "max_attempts": 7, "priority": -3,
            "timeout": 12.5, "due_at": "2126-01-02T03:04:05.678Z",
            "deadline": "2126-02-02T03:04:05.000Z",
        }  # fmt: skip
        task = either_api.post("/v1/tasks", wanted, status=201).json
        assert wanted.items() <= task.items()
        assert either_api.get(f"/v1/tasks/{task['id']}").json == task

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_a_payload_is_returned_byte_for_byte(self, mail, payload):
        body = b'{"payload": ' + payload + b' , "service":"mail","delay":9}'
        answer = mail.post("/v1/tasks", body, status=201)
        assert raw_payload(answer) == payload
        assert raw_payload(mail.get(answer.headers["location"])) == payload
        assert payload in mail.get("/v1/tasks").body

    def test_payloads_of_a_batch_are_returned_byte_for_byte(self, either_api):
        either_api.service()
        head = b'{"service":"mail","delay":3600,"payload":'
        items = [head + payload + b"}" for payload in PAYLOADS]
        for body, media in (
            (b"[" + b" ,".join(items) + b"]", "application/json"),
            (b"\n".join(items), "application/x-ndjson"),
        ):
            answer = either_api.post("/v1/tasks/batch", body, media=media, status=200)
            assert answer.json["stored"] == len(PAYLOADS)
            for item, payload in zip(answer.json["items"], PAYLOADS, strict=True):
                assert raw_payload(either_api.get(f"/v1/tasks/{item['id']}")) == payload

    def test_the_callee_gets_the_payload_byte_for_byte(self, either_api, receiver):
        either_api.service(endpoint=receiver.url("/ok"))
        head = b'{"service":"mail","payload":'
        for payload in PAYLOADS:
            either_api.post("/v1/tasks", head + payload + b"}", status=201)
        either_api.until(lambda: len(receiver.requests) == len(PAYLOADS))
        assert sorted(one.body for one in receiver.requests) == sorted(PAYLOADS)

    def test_without_a_time_it_is_due_now(self, mail):
        task = mail.post("/v1/tasks", {"service": "mail"}, status=201).json
        assert task["payload"] is None
        assert moment(task["due_at"]) <= datetime.now(UTC)
        assert mail.get(f"/v1/tasks/{task['id']}").json["state"] == "ready"

    def test_a_delay_counts_from_now(self, mail):
        before = datetime.now(UTC)
        task = mail.submit(delay=90.5)
        assert before + timedelta(seconds=90) < moment(task["due_at"])
        assert moment(task["due_at"]) <= datetime.now(UTC) + timedelta(seconds=90.502)

    @pytest.mark.parametrize(
        ("given", "shown"),
        [
            ("2126-01-02T03:04:05Z", "2126-01-02T03:04:05.000Z"),
            ("2126-01-02T03:04:05+02:00", "2126-01-02T01:04:05.000Z"),
            ("2126-01-02T03:04:05.1234Z", "2126-01-02T03:04:05.124Z"),  # never early
            ("1999-01-01T00:00:00Z", "1999-01-01T00:00:00.000Z"),
        ],
    )
    def test_a_time_is_shown_in_utc_with_milliseconds(self, mail, given, shown):
        assert mail.submit(due_at=given)["due_at"] == shown

    def test_a_past_time_is_due_at_once(self, api, receiver):
        api.service(endpoint=receiver.url("/ok"))
        task = api.submit(due_at="2001-01-01T00:00:00Z")
        assert api.task_in(task["id"], "finished")["attempt"] == 1

    @pytest.mark.parametrize(
        "wrong",
        [
            {"delay": -1},
            {"delay": 1, "due_at": "2126-01-01T00:00:00Z"},
            {"delay": "1"},
            {"delay": True},
            {"delay": 4e9},
            {"due_at": "tomorrow"},
            {"due_at": "2126-01-01T00:00:00"},
            {"due_at": "2126-02-30T00:00:00Z"},
            {"due_at": 4_000_000_000},
            {"due_at": "9999-12-31T23:59:59.9999Z"},
            {"due_at": "9999-12-31T23:59:59-14:00"},
            {"key": ""},
            {"key": "x" * 201},
            {"key": 5},
            {"key": "a\0b"},
            {"key": " a"},
            {"on_conflict": "ignore"},
            {"max_attempts": 0},
            {"max_attempts": 1.5},
            {"max_attempts": 10_001},
            {"priority": 40_000},
            {"priority": None},
            {"timeout": 0},
            {"timeout": -1},
            {"timeout": 30.001},
            {"timeout": 86_401},
            {"timeout": 3e9},
            {"deadline": 60},
            {"service": ""},
            {"service": "a/b"},
            {"service": "a b"},
            {"service": "x" * 101},
            {"service": None},
            {"state": "running"},
            {"dealy": 5},
        ],
        ids=str,
    )
    def test_an_invalid_submit_is_422_with_a_reason(self, strict, wrong):
        answer = strict.post("/v1/tasks", {"service": "mail", **wrong})
        assert answer.status == 422
        assert answer.code in ("invalid", "out_of_range")
        name = next(iter(wrong))
        assert name in answer.detail or "at must be" in answer.detail
        assert strict.untouched()

    def test_a_timeout_above_the_services_is_refused_with_both_numbers(self, make_api):
        api = make_api()
        api.service(timeout=2.5)
        answer = api.post("/v1/tasks", {"service": "mail", "timeout": 3})
        detail = answer.refused(422, "invalid")["detail"]
        assert detail == "timeout must be at most the timeout of 'mail', 2.5 s, got 3 s"
        batch = api.post("/v1/tasks/batch", [{"service": "mail", "timeout": 3}]).json
        assert batch["items"][0]["problem"]["detail"] == detail
        answer = api.put(
            "/v1/schedules/nightly", {"service": "mail", "interval": 3600, "timeout": 3}
        )
        assert answer.refused(422, "invalid")["detail"] == detail
        api.post("/v1/tasks", {"service": "mail", "timeout": 2.5, "delay": 60}, status=201)

    def test_an_unknown_service_is_422(self, strict):
        answer = strict.post("/v1/tasks", {"service": "male"})
        assert "'male'" in answer.refused(422, "unknown_service")["detail"]

    @pytest.mark.parametrize(
        "body",
        [b"", b" ", b"{", b'{"service":"mail"', b'{"service":"mail"}}', b"\xff", b"nul",
         b'{"service":"mail","payload":NaN}', b'{"service":"mail","payload":Infinity}',
         b'{"service":"mail","payload":"\x01"}', b'{"service":"mail","payload":01}',
         b'{"service":"mail","payload":"\xc3"}', b'\xef\xbb\xbf{"service":"mail"}',
         b'{"service":"mail","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
        ids=lambda body: repr(body[:40]),
    )  # fmt: skip
    def test_a_body_that_is_not_json_is_400(self, strict, body):
        strict.post("/v1/tasks", body).refused(400, "bad_request")

    @pytest.mark.parametrize("body", [b"null", b"[]", b'"a"', b"5", b"true"])
    def test_a_body_that_is_not_an_object_is_422(self, strict, body):
        strict.post("/v1/tasks", body).refused(422, "invalid")

    @pytest.mark.parametrize(
        "media", ["text/plain", "application/x-www-form-urlencoded", "application/x-ndjson", None]
    )
    def test_another_media_type_is_415_and_names_the_accepted_one(self, strict, media):
        answer = strict.post("/v1/tasks", {"service": "mail"}, media=media)
        assert "application/json" in answer.refused(415, "unsupported_media_type")["detail"]

    def test_the_media_type_may_have_a_charset_and_any_case(self, mail):
        media = "Application/JSON; charset=utf-8"
        mail.post("/v1/tasks", {"service": "mail"}, media=media, status=201)

    def test_a_body_in_parts_is_one_body(self, mail):
        body = json.dumps({"service": "mail", "payload": "x" * 100}).encode()
        parts = [bytes([one]) for one in body]
        mail.post("/v1/tasks", body, parts=parts, status=201)

    def test_a_caller_who_leaves_in_the_middle_is_not_answered_and_stores_nothing(self, mail):
        sent = []

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/tasks", "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"),
                        (b"content-length", b"20")],
        }  # fmt: skip
        mail.run(mail.app(scope, receive, send))
        assert sent == []
        assert mail.get("/v1/tasks").json["items"] == []


class TestLimits:
    @pytest.fixture
    def small(self, make_api):
        api = make_api(limits=Limits(body=2_000, batch=3, payload=100))
        api.service(enabled=False)
        return api

    def test_a_payload_may_be_as_large_as_the_limit_and_no_larger(self, small):
        small.submit(payload="x" * 98)
        answer = small.post("/v1/tasks", {"service": "mail", "payload": "x" * 99})
        assert "100" in answer.refused(413, "too_large")["detail"]

    def test_a_payload_may_be_nested_as_deep_as_the_limit_and_no_deeper(self, mail):
        good, bad = nested(200), nested(201)
        for body in (b'{"service":"mail","payload":%s}', b'{"payload":%s,"service":"mail"}'):
            mail.post("/v1/tasks", body % good, status=201)
            answer = mail.post("/v1/tasks", body % bad)
            assert "200" in answer.refused(400, "bad_request")["detail"]
        items = [b'{"service":"mail","payload":%s}' % each for each in (good, bad, good)]
        found = mail.post("/v1/tasks/batch", b"[%s]" % b",".join(items), status=200).json
        assert [item["status"] for item in found["items"]] == [201, 400, 201]

    def test_a_body_that_is_too_large_is_413_by_its_length(self, small):
        answer = small.post("/v1/tasks", b"x", headers={"content-length": "2001"})
        assert "2000" in answer.refused(413, "too_large")["detail"]

    def test_a_chunked_body_that_is_too_large_is_413(self, small):
        answer = small.post("/v1/tasks", b"", parts=[b" " * 1_000] * 3)
        answer.refused(413, "too_large")

    def test_a_batch_with_too_many_tasks_is_413_and_stores_none(self, small):
        item = {"service": "mail", "delay": 9}
        assert small.post("/v1/tasks/batch", [item] * 3, status=200).json["stored"] == 3
        small.post("/v1/tasks/batch", [item] * 4).refused(413, "too_large")
        assert len(small.get("/v1/tasks").json["items"]) == 3

    @pytest.mark.parametrize(
        ("piece", "media"),
        [(b"0,", JSON), (b"{},", JSON), (b"0\n", NDJSON), (b"\n", NDJSON), (b"\r\n", NDJSON)],
    )
    def test_a_batch_of_millions_is_refused_before_they_are_made(self, make_api, piece, media):
        api = make_api(limits=Limits(body=8 << 20, batch=100))
        body = piece * ((8 << 20) // len(piece) - 2)
        if media == JSON:
            body = b"[" + body + b"0]"
        tracemalloc.start()
        try:
            api.post("/v1/tasks/batch", body, media=media).refused(413, "too_large")
            assert tracemalloc.get_traced_memory()[1] < 5 * len(body)
        finally:
            tracemalloc.stop()

    def test_a_too_large_payload_refuses_only_its_own_task(self, small):
        good, bad = {"service": "mail"}, {"service": "mail", "payload": "x" * 99}
        found = small.post("/v1/tasks/batch", [good, bad, good], status=200).json
        assert [item["status"] for item in found["items"]] == [201, 413, 201]


class TestKeys:
    def test_a_taken_key_is_409_with_its_holder(self, either_api):
        either_api.service()
        holder = either_api.submit(key="order:1")
        answer = either_api.post("/v1/tasks", {"service": "mail", "key": "order:1"})
        assert answer.refused(409, "key_taken")["holder"] == holder["id"]

    def test_keep_answers_200_with_the_holder(self, either_api):
        either_api.service()
        holder = either_api.submit(payload=1, key="order:1")
        body = {"service": "mail", "payload": 2, "key": "order:1", "on_conflict": "keep"}
        answer = either_api.post("/v1/tasks", body, status=200)
        assert answer.json == holder
        assert answer.headers["location"] == f"/v1/tasks/{holder['id']}"

    def test_keep_without_a_holder_is_201(self, mail):
        mail.submit(key="order:1", on_conflict="keep")

    def test_replace_changes_payload_and_time_of_the_same_task(self, either_api):
        either_api.service()
        holder = either_api.submit(payload=1, key="order:1")
        body = {"service": "mail", "payload": 2, "key": "order:1", "on_conflict": "replace",
                "due_at": "2126-01-01T00:00:00.000Z"}  # fmt: skip
        answer = either_api.post("/v1/tasks", body)
        assert answer.status in (200, 201)
        assert answer.json["id"] == holder["id"]
        found = either_api.get(f"/v1/tasks/{holder['id']}").json
        assert (found["payload"], found["due_at"]) == (2, "2126-01-01T00:00:00.000Z")

    def test_replace_of_a_running_task_is_409(self, api, receiver):
        api.service(endpoint=receiver.url("/slow"))
        task = api.submit(key="order:1", delay=0)
        api.task_in(task["id"], "running")
        body = {"service": "mail", "key": "order:1", "on_conflict": "replace"}
        assert api.post("/v1/tasks", body).refused(409, "key_taken")["holder"] == task["id"]
        receiver.release()
        api.task_in(task["id"], "finished")

    def test_of_concurrent_submits_with_one_key_one_is_stored(self, either_api):
        either_api.service()
        body = {"service": "mail", "key": "order:1", "delay": 60}
        answers = either_api.together(*[("POST", "/v1/tasks", body, {})] * 20)
        assert sorted(one.status for one in answers) == [201] + [409] * 19
        stored = next(one.json["id"] for one in answers if one.status == 201)
        assert {one.json["holder"] for one in answers if one.status == 409} == {stored}

    def test_the_same_key_of_another_service_is_free(self, mail):
        mail.service("other")
        assert mail.submit("mail", key="k")["id"] != mail.submit("other", key="k")["id"]


class TestBatch:
    def test_items_are_answered_in_order(self, either_api):
        either_api.service()
        held = either_api.submit(key="taken")
        items = [
            {"service": "mail", "delay": 60},
            {"service": "nobody"},
            {"service": "mail", "key": "taken"},
            {"service": "mail", "delay": -1},
            5,
            {"service": "mail", "key": "taken", "on_conflict": "keep"},
            {"service": "mail", "key": "new", "due_at": "2126-01-01T00:00:00.000Z"},
            {"service": "mail", "key": "new"},
            {"service": "mail", "unknown": 1},
        ]
        answer = either_api.post("/v1/tasks/batch", items, status=200).json
        found = answer["items"]
        assert [one["status"] for one in found] == [201, 422, 409, 422, 422, 200, 201, 409, 422]
        codes = [one.get("problem", {}).get("code") for one in found]
        assert codes == [
            None, "unknown_service", "key_taken", "invalid", "invalid", None, None, "key_taken",
            "invalid",
        ]  # fmt: skip
        assert (answer["stored"], answer["refused"]) == (3, 6)
        assert found[2]["problem"]["holder"] == held["id"] == found[5]["id"]
        assert found[7]["problem"]["holder"] == found[6]["id"]
        assert found[6]["due_at"] == "2126-01-01T00:00:00.000Z"
        assert found[0]["state"] == "delay"
        for one in found:
            assert ("id" in one) != ("problem" in one)

    def test_lines_of_json_are_accepted_and_a_bad_line_refuses_only_itself(self, mail):
        body = b'{"service":"mail"}\r\n\n{"service":\n5\n{"service":"mail","delay":5}'
        answer = mail.post("/v1/tasks/batch", body, media="application/x-ndjson", status=200)
        found = answer.json
        assert [one["status"] for one in found["items"]] == [201, 400, 422, 201]
        assert (found["stored"], found["refused"]) == (2, 2)

    def test_odd_white_space_inside_a_line_does_not_end_it(self, mail):
        line = '{"service":"mail","payload":"a\u2028b\u0085c"}'.encode()
        answer = mail.post("/v1/tasks/batch", line, media="application/x-ndjson", status=200)
        assert answer.json["stored"] == 1

    @pytest.mark.parametrize("body", [b"", b"[", b'[{"service":"mail"},', b"[\xff]", b'[{"a":]'])
    def test_an_array_that_is_not_json_is_400_for_all(self, strict, body):
        strict.post("/v1/tasks/batch", body).refused(400, "bad_request")
        assert strict.untouched()

    @pytest.mark.parametrize("body", [b"{}", b'{"service":"mail"}', b"null", b"5"])
    def test_a_batch_that_is_not_an_array_is_422(self, strict, body):
        strict.post("/v1/tasks/batch", body).refused(422, "invalid")

    def test_the_header_idempotency_key_is_refused(self, strict):
        headers = {"idempotency-key": "a"}
        strict.post("/v1/tasks/batch", [], headers=headers).refused(400, "bad_request")

    def test_lines_whose_ends_curl_has_removed_are_explained(self, mail):
        two = b'{"service": "mail"}' * 2
        answer = mail.post("/v1/tasks/batch", two, media=NDJSON, status=200).json
        [problem] = [one["problem"] for one in answer["items"]]
        assert "one task per line: with curl, --data-binary" in problem["detail"]
        assert "curl" not in mail.post("/v1/tasks/batch", two).json["detail"]

    @pytest.mark.parametrize("media", ["application/json", "application/x-ndjson"])
    def test_an_empty_batch_stores_nothing(self, mail, media):
        body = b"[]" if media == "application/json" else b"\n"
        found = mail.post("/v1/tasks/batch", body, media=media, status=200).json
        assert found == {"items": [], "stored": 0, "refused": 0}

    def test_ten_thousand_tasks_are_stored_and_one_more_is_413(self, mail):
        items = [{"service": "mail", "delay": 3600}] * 10_000
        answer = mail.post("/v1/tasks/batch", items, status=200).json
        assert answer["stored"] == 10_000
        assert len({one["id"] for one in answer["items"]}) == 10_000
        mail.post("/v1/tasks/batch", [*items, items[0]]).refused(413, "too_large")
