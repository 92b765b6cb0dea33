"""Tasks over HTTP: submit, batch, look, list, cancel, reschedule, feedback."""

import json
import re
import tracemalloc
from datetime import UTC, datetime, timedelta

import pytest

from contracts.stores import claim, ending
from receivers import answering
from tickwheel.values.task import Event
from tickwheel.web.app import Limits
from tickwheel.web.route import JSON, NDJSON
from web.serving import MOMENT, UNKNOWN_ID, Api

FIELDS = [
    "id", "service", "payload", "key", "state", "due_at", "shard", "attempt", "failures",
    "max_attempts", "created_at", "updated_at", "result", "error", "priority", "timeout",
    "deadline", "replay_of", "replayed_as", "node", "epoch",
]  # fmt: skip

# JSON that a decoder and an encoder would not give back as it was.
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


def nested(depth):
    """So many arrays and objects within each other; brackets in strings are none."""
    both, one = divmod(depth, 2)
    return b'{"[":[' * both + b"[" * one + b'"]"' + b"]" * one + b"]}" * both


def raw_payload(answer):
    """The payload's bytes within an answer, as they stand there."""
    return re.search(rb'"payload":(.*),"key":', answer.body, re.DOTALL)[1]


@pytest.fixture
def mail(api):
    """The application, and a service `mail` that nobody answers for."""
    api.service("mail", enabled=False)
    return api


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """An application with one task, for requests that are refused and leave all as it is."""
    with Api(f"sqlite:///{tmp_path_factory.mktemp('strict')}/tasks.db") as api:
        api.service("mail", enabled=False)
        api.task = api.submit()
        api.untouched = lambda: api.get("/v1/tasks").json["items"] == [api.task]
        yield api


class TestSubmit:
    def test_a_task_is_answered_with_all_its_fields_in_order(self, mail):
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
    def test_a_payload_comes_back_byte_for_byte(self, mail, payload):
        body = b'{"payload": ' + payload + b' , "service":"mail","delay":9}'
        answer = mail.post("/v1/tasks", body, status=201)
        assert raw_payload(answer) == payload
        assert raw_payload(mail.get(answer.headers["location"])) == payload
        assert payload in mail.get("/v1/tasks").body

    def test_payloads_of_a_batch_come_back_byte_for_byte(self, either_api):
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
    def test_what_cannot_be_right_is_422_and_says_so(self, strict, wrong):
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
    def test_what_is_no_json_is_400(self, strict, body):
        strict.post("/v1/tasks", body).refused(400, "bad_request")

    @pytest.mark.parametrize("body", [b"null", b"[]", b'"a"', b"5", b"true"])
    def test_what_is_no_object_is_422(self, strict, body):
        strict.post("/v1/tasks", body).refused(422, "invalid")

    @pytest.mark.parametrize(
        "media", ["text/plain", "application/x-www-form-urlencoded", "application/x-ndjson", None]
    )
    def test_another_media_type_is_415_and_says_which_is_taken(self, strict, media):
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

    def test_a_body_that_turns_out_too_large_is_413(self, small):
        answer = small.post("/v1/tasks", b"", parts=[b" " * 1_000] * 3)
        answer.refused(413, "too_large")

    def test_a_batch_that_has_too_many_tasks_is_413_and_stores_none(self, small):
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

    def test_a_payload_of_a_batch_that_is_too_large_refuses_itself_only(self, small):
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

    def test_keep_that_finds_nobody_is_201(self, mail):
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

    def test_of_many_at_once_with_one_key_one_is_stored(self, either_api):
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
    def test_each_item_is_answered_in_its_place(self, either_api):
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

    def test_lines_of_json_are_taken_and_a_bad_line_refuses_itself_only(self, mail):
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
    def test_an_array_that_is_no_json_is_400_for_all(self, strict, body):
        strict.post("/v1/tasks/batch", body).refused(400, "bad_request")
        assert strict.untouched()

    @pytest.mark.parametrize("body", [b"{}", b'{"service":"mail"}', b"null", b"5"])
    def test_what_is_no_array_is_422(self, strict, body):
        strict.post("/v1/tasks/batch", body).refused(422, "invalid")

    def test_the_header_idempotency_key_is_refused(self, strict):
        headers = {"idempotency-key": "a"}
        strict.post("/v1/tasks/batch", [], headers=headers).refused(400, "bad_request")

    @pytest.mark.parametrize("media", ["application/json", "application/x-ndjson"])
    def test_an_empty_batch_stores_nothing(self, mail, media):
        body = b"[]" if media == "application/json" else b"\n"
        found = mail.post("/v1/tasks/batch", body, media=media, status=200).json
        assert found == {"items": [], "stored": 0, "refused": 0}

    def test_ten_thousand_are_stored_and_one_more_is_413(self, mail):
        items = [{"service": "mail", "delay": 3600}] * 10_000
        answer = mail.post("/v1/tasks/batch", items, status=200).json
        assert answer["stored"] == 10_000
        assert len({one["id"] for one in answer["items"]}) == 10_000
        mail.post("/v1/tasks/batch", [*items, items[0]]).refused(413, "too_large")


def tried(api, times, **fields):
    """A task of a service that is disabled, with attempts in its execution log; its id."""
    api.service("tried", enabled=False)
    task = api.run(api.scheduler.submit("tried", max_attempts=10_000))
    store = api.node.store

    async def fail():
        [running] = await claim(store, [task], api.node.coordinator.owned())
        assert await store.record([ending(running, Event.RETRY, **fields)]) == [True]

    api.until(lambda: task.shard in api.node.coordinator.owned())
    for _ in range(times):
        api.run(fail())
    return task.id


class TestLook:
    @pytest.mark.parametrize(
        "task_id", [UNKNOWN_ID, "x", UNKNOWN_ID[:-1], "G" * 32, "%00", "..", "a" * 5_000, "é"]
    )
    @pytest.mark.parametrize(
        ("method", "what", "body"),
        [
            ("GET", "", None),
            ("GET", "/attempts", None),
            ("POST", "/cancel", None),
            ("POST", "/reschedule", {"delay": 1}),
            ("POST", "/feedback", {"outcome": "finished", "attempt": 1}),
        ],
        ids=["get", "attempts", "cancel", "reschedule", "feedback"],
    )
    def test_an_unknown_id_is_404(self, strict, method, what, body, task_id):
        answer = strict.request(method, f"/v1/tasks/{task_id}{what}", body)
        answer.refused(404, "unknown_task")

    def test_the_attempts_tell_what_happened(self, either_api, receiver):
        either_api.service(
            endpoint=receiver.url("/broken"), max_attempts=2, backoff={"first": 0, "max": 0}
        )
        task = either_api.submit(delay=0)
        found = either_api.task_in(task["id"], "failed")
        assert (found["attempt"], found["failures"]) == (2, 2)
        assert "500" in found["error"]
        page = either_api.get(f"/v1/tasks/{task['id']}/attempts", status=200).json
        assert page["next_cursor"] is None
        assert [(one["attempt"], one["event"]) for one in page["items"]] == [
            (1, "retry"),
            (2, "fail"),
        ]
        for one in page["items"]:
            assert [*one] == [
                "attempt",
                "event",
                "node",
                "epoch",
                "started_at",
                "ended_at",
                "error",
            ]
            assert moment(one["started_at"]) <= moment(one["ended_at"])

    def test_the_attempts_of_a_task_that_had_none_are_an_empty_list(self, mail):
        task = mail.submit()
        found = mail.get(f"/v1/tasks/{task['id']}/attempts", status=200).json
        assert found == {"items": [], "next_cursor": None}

    def test_the_attempts_come_in_pages_as_tasks_do(self, either_api):
        task_id = tried(either_api, 7)
        path = f"/v1/tasks/{task_id}/attempts"
        found, cursor = [], ""
        for expected in (3, 3, 1):
            page = either_api.get(f"{path}?limit=3{cursor}", status=200).json
            assert len(page["items"]) == expected
            found += [one["attempt"] for one in page["items"]]
            cursor = f"&cursor={page['next_cursor']}"
        assert (found, page["next_cursor"]) == ([1, 2, 3, 4, 5, 6, 7], None)
        behind = either_api.get(f"{path}?cursor=7", status=200).json
        assert behind == {"items": [], "next_cursor": None}
        assert len(either_api.run(either_api.scheduler.attempts(task_id))) == 7

    def test_however_long_errors_are_a_page_of_attempts_is_bounded(self, either_api):
        error = "\x01" * 16_000  # six bytes each as JSON
        task_id = tried(either_api, 80, error=error)
        found, cursor, pages = [], 0, 0
        while cursor is not None:
            path = f"/v1/tasks/{task_id}/attempts?limit=1000&cursor={cursor}"
            answer = either_api.get(path, status=200)
            assert len(answer.body) < 4 << 20
            found += answer.json["items"]
            cursor, pages = answer.json["next_cursor"], pages + 1
        assert [one["attempt"] for one in found] == list(range(1, 81))
        assert {one["error"] for one in found} == {error}
        assert pages == 5
        rows = either_api.run(either_api.scheduler.attempts(task_id))
        assert [row.attempt for row in rows] == list(range(1, 81))

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=1001", "cursor=x", "cursor=-1", "cursor=2147483648", "after=1"]
    )
    def test_a_query_that_an_execution_log_has_not_is_422(self, mail, query):
        path = f"/v1/tasks/{mail.submit()['id']}/attempts?{query}"
        mail.get(path).refused(422, "invalid")

    def test_the_answer_of_the_callee_is_the_result_byte_for_byte(self, either_api, receiver):
        text = rb'{"n" : 12345678901234567890123, "a":1,"a":2, "e":"\u00e9"}'
        receiver.on("/result", answering(200, text, content_type="application/json"))
        either_api.service(endpoint=receiver.url("/result"))
        task = either_api.submit(delay=0)
        either_api.task_in(task["id"], "finished")
        assert text in either_api.get(f"/v1/tasks/{task['id']}").body


class TestList:
    def test_tasks_come_newest_first_and_a_cursor_goes_on(self, either_api):
        either_api.service()
        ids = [either_api.submit()["id"] for _ in range(7)]
        found, cursor, pages = [], "", 0
        while cursor is not None:
            after = f"&cursor={cursor}" if cursor else ""
            page = either_api.get(f"/v1/tasks?limit=3{after}", status=200).json
            assert len(page["items"]) <= 3
            found += [one["id"] for one in page["items"]]
            cursor, pages = page["next_cursor"], pages + 1
            assert pages <= 4
        assert sorted(found) == sorted(ids)
        assert found == sorted(found, reverse=True)

    def test_filters_hold_together(self, either_api):
        either_api.service("mail")
        either_api.service("print")
        one = either_api.submit("mail", key="a", due_at="2126-01-01T00:00:00Z")["id"]
        two = either_api.submit("mail", key="b", due_at="2127-01-01T00:00:00Z")["id"]
        three = either_api.submit("print", key="a", due_at="2127-01-01T00:00:00Z")["id"]
        either_api.post(f"/v1/tasks/{three}/cancel", status=200)

        def ids(query):
            items = either_api.get(f"/v1/tasks?{query}", status=200).json["items"]
            return {item["id"] for item in items}

        assert ids("") == {one, two, three}
        assert ids("service=mail") == {one, two}
        assert ids("key=a") == {one, three}
        assert ids("key=a&service=mail") == {one}
        assert ids("state=cancelled") == {three}
        assert ids("state=delay&due_before=2126-06-01T00:00:00Z") == {one}
        assert ids("due_before=2126-06-01T02:00:00%2B02:00&service=mail") == {one}
        assert ids("state=running") == set()
        assert ids("service=nobody") == set()

    @pytest.mark.parametrize(
        "query",
        ["limit=0", "limit=1001", "limit=-1", "limit=x", "limit=1.5", "limit=", "cursor=x",
         "cursor=", f"cursor={'0' * 31}", f"cursor={'G' * 32}", "state=odd", "state=", "service=",
         "service=a%2Fb", "key=", "due_before=x", "due_before=2126-01-01T00:00:00",
         "due_before=inf", "due_before=1e99", "odd=1", "Limit=5", "limit=5&odd"],
    )  # fmt: skip
    def test_a_wrong_query_is_422_and_says_which_part(self, strict, query):
        problem = strict.get(f"/v1/tasks?{query}").refused(422, "invalid")
        assert re.search(re.split("[=&]", query)[0] + "|odd", problem["detail"])

    @pytest.mark.parametrize("query", ["key=%ff", "%ff=1", "&".join(["limit=1"] * 60)])
    def test_a_query_that_cannot_be_read_is_400(self, strict, query):
        strict.get(f"/v1/tasks?{query}").refused(400, "bad_request")

    def test_a_route_without_a_query_takes_none(self, strict):
        strict.get("/v1/services?limit=5").refused(422, "invalid")


class TestCancel:
    def test_a_cancel_wins_once(self, either_api):
        either_api.service()
        task = either_api.submit()
        path = f"/v1/tasks/{task['id']}/cancel"
        assert either_api.post(path, status=200).json == {"won": True, "state": "cancelled"}
        assert either_api.post(path, status=200).json == {"won": False, "state": "cancelled"}
        assert either_api.get(f"/v1/tasks/{task['id']}").json["state"] == "cancelled"

    def test_a_cancel_takes_an_empty_body_too(self, mail):
        task = mail.submit()
        mail.post(f"/v1/tasks/{task['id']}/cancel", {}, status=200)

    def test_of_many_cancels_at_once_one_wins(self, either_api):
        either_api.service()
        path = f"/v1/tasks/{either_api.submit()['id']}/cancel"
        answers = either_api.together(*[("POST", path, None, {})] * 20)
        assert sorted(one.json["won"] for one in answers) == [False] * 19 + [True]

    def test_a_running_task_is_not_cancelled(self, api, receiver):
        api.service(endpoint=receiver.url("/slow"))
        task = api.submit(delay=0)
        api.task_in(task["id"], "running")
        answer = api.post(f"/v1/tasks/{task['id']}/cancel", status=200)
        assert answer.json == {"won": False, "state": "running"}
        receiver.release()
        api.task_in(task["id"], "finished")

    @pytest.mark.parametrize(
        ("where", "count"),
        [
            ({"key": "a"}, 2),
            ({"service": "mail"}, 2),
            ({"service": "mail", "key": "a"}, 1),
            ({"service": "mail", "due_before": "2126-06-01T00:00:00Z"}, 1),
            ({"service": "mail", "state": "ready"}, 0),
            ({"service": "nobody"}, 0),
        ],
        ids=str,
    )
    def test_many_are_cancelled_by_key_or_filter(self, mail, where, count):
        mail.service("print")
        mail.submit("mail", key="a", due_at="2126-01-01T00:00:00Z")
        mail.submit("mail", key="b", due_at="2127-01-01T00:00:00Z")
        mail.submit("print", key="a", due_at="2127-01-01T00:00:00Z")
        assert mail.post("/v1/tasks/cancel", where, status=200).json == {"cancelled": count}
        assert len(mail.get("/v1/tasks?state=cancelled").json["items"]) == count

    @pytest.mark.parametrize("where", [{}, {"state": "delay"}, {"key": ""}, {"id": "a"}], ids=str)
    def test_a_cancel_of_everything_is_refused(self, strict, where):
        strict.post("/v1/tasks/cancel", where).refused(422, "invalid")
        assert strict.untouched()


class TestReschedule:
    def test_it_moves_a_task(self, either_api):
        either_api.service()
        task = either_api.submit()
        path = f"/v1/tasks/{task['id']}"
        body = {"due_at": "2126-01-01T00:00:00Z"}
        answer = either_api.post(f"{path}/reschedule", body, status=200)
        assert answer.json == {"won": True, "state": "delay"}
        assert either_api.get(path).json["due_at"] == "2126-01-01T00:00:00.000Z"

    def test_to_now_it_runs(self, api, receiver):
        api.service(endpoint=receiver.url("/ok"))
        task = api.submit()
        api.post(f"/v1/tasks/{task['id']}/reschedule", {"delay": 0}, status=200)
        api.task_in(task["id"], "finished")

    def test_of_a_final_task_it_does_not_win(self, mail):
        task = mail.submit()
        mail.post(f"/v1/tasks/{task['id']}/cancel", status=200)
        answer = mail.post(f"/v1/tasks/{task['id']}/reschedule", {"delay": 0}, status=200)
        assert answer.json == {"won": False, "state": "cancelled"}

    @pytest.mark.parametrize(
        "body",
        [{}, {"delay": 1, "due_at": "2126-01-01T00:00:00Z"}, {"delay": -1}, {"delay": None},
         {"due_at": "x"}, {"at": 1}],
        ids=str,
    )  # fmt: skip
    def test_it_takes_one_time(self, strict, body):
        strict.post(f"/v1/tasks/{strict.task['id']}/reschedule", body).refused(422, "invalid")


class TestFeedback:
    @pytest.fixture
    def accepted(self, either_api, receiver):
        """An application on either store, and a task that its callee has accepted."""
        either_api.service(endpoint=receiver.url("/accepted"), max_attempts=3)
        task = either_api.submit(delay=0)
        either_api.until(lambda: receiver.requests and not either_api.node.dispatch.running)
        either_api.run(either_api.node.feedback.drain())
        return either_api, either_api.task_in(task["id"], "running")

    def test_finished_ends_it_with_a_result_byte_for_byte(self, accepted):
        api, task = accepted
        result = rb'{"n" : 1.50, "n":"\u0041"}'
        body = b'{"outcome":"finished","attempt":1,"result":' + result + b"}"
        answer = api.post(f"/v1/tasks/{task['id']}/feedback", body, status=200)
        assert answer.json == {"won": True, "state": "finished"}
        found = api.get(f"/v1/tasks/{task['id']}")
        assert found.json["state"] == "finished"
        assert result in found.body

    def test_a_result_that_is_nested_too_deep_is_400_and_changes_nothing(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}/feedback"
        body = b'{"outcome":"finished","attempt":1,"result":%s}'
        assert "200" in api.post(path, body % nested(201)).refused(400, "bad_request")["detail"]
        assert api.get(f"/v1/tasks/{task['id']}").json["state"] == "running"
        api.post(path, body % nested(200), status=200)

    def test_failed_is_tried_again(self, accepted):
        api, task = accepted
        body = {"outcome": "failed", "attempt": 1, "error": "no paper\0"}
        answer = api.post(f"/v1/tasks/{task['id']}/feedback", body, status=200)
        assert answer.json == {"won": True, "state": "delay"}
        found = api.get(f"/v1/tasks/{task['id']}").json
        assert found["failures"] == 1
        assert "no paper" in found["error"]

    def test_failed_without_retry_is_final(self, accepted):
        api, task = accepted
        body = {"outcome": "failed", "attempt": 1, "retry": False}
        answer = api.post(f"/v1/tasks/{task['id']}/feedback", body, status=200)
        assert answer.json == {"won": True, "state": "failed"}
        assert api.get(f"/v1/tasks/{task['id']}").json["error"]

    def test_progress_leaves_it_running(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}/feedback"
        for _ in range(2):
            answer = api.post(path, {"outcome": "progress", "attempt": 1}, status=200)
            assert answer.json == {"won": True, "state": "running"}
        api.post(path, {"outcome": "finished", "attempt": 1, "epoch": task["epoch"]}, status=200)

    def test_of_another_attempt_or_epoch_it_is_409_and_changes_nothing(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}"
        wrong = [
            {"attempt": 2},
            {"attempt": 1, "epoch": task["epoch"] + 1},
            {"attempt": 1, "epoch": task["epoch"] + 2**40},
        ]
        for one in wrong:
            answer = api.post(f"{path}/feedback", {"outcome": "finished", **one})
            answer.refused(409, "attempt_over")
        assert api.get(path).json == task

    def test_a_second_one_is_409(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}/feedback"
        api.post(path, {"outcome": "finished", "attempt": 1, "result": 1}, status=200)
        for outcome in ("finished", "failed", "progress"):
            body = {"outcome": outcome, "attempt": 1, "result": 2}
            api.post(path, body).refused(409, "attempt_over")
        assert api.get(f"/v1/tasks/{task['id']}").json["result"] == 1

    def test_of_many_at_once_one_wins(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}/feedback"
        requests = [
            ("POST", path, {"outcome": "finished", "attempt": 1, "result": n}, {})
            for n in range(10)
        ]
        answers = api.together(*requests)
        assert sorted(one.status for one in answers) == [200] + [409] * 9

    def test_of_a_task_that_is_not_running_it_is_409(self, mail):
        task = mail.submit()
        body = {"outcome": "finished", "attempt": 1}
        mail.post(f"/v1/tasks/{task['id']}/feedback", body).refused(409, "attempt_over")

    @pytest.mark.parametrize(
        "body",
        [{}, {"outcome": "finished"}, {"attempt": 1}, {"outcome": "done", "attempt": 1},
         {"outcome": "finished", "attempt": 0}, {"outcome": "finished", "attempt": "1"},
         {"outcome": "finished", "attempt": 2**40}, {"outcome": "failed", "attempt": 1, "error": 5},
         {"outcome": "failed", "attempt": 1, "error": "x" * 20_000},
         {"outcome": "finished", "attempt": 1, "epoch": -1},
         {"outcome": "failed", "attempt": 1, "retry": "no"}],
        ids=lambda body: str(body)[:60],
    )  # fmt: skip
    def test_what_cannot_be_right_is_422(self, strict, body):
        strict.post(f"/v1/tasks/{strict.task['id']}/feedback", body).refused(422, "invalid")


class TestRoutes:
    @pytest.mark.parametrize("path", ["/v1", "/v2/tasks", "/v1/task", "/v1/tasks/a/b/c", "/é"])
    def test_what_is_not_there_is_404(self, strict, path):
        strict.get(path).refused(404, "not_found")

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("DELETE", "/v1/tasks", "GET, HEAD, POST"),
            ("PATCH", "/v1/services/mail", "DELETE, GET, HEAD, PUT"),
            ("GET", "/v1/tasks/x/cancel", "POST"),
            ("POST", "/healthz", "GET, HEAD"),
            ("BREW", "/v1/wheel", "GET, HEAD"),
        ],
    )
    def test_another_method_is_405_and_says_which_are_taken(self, strict, method, path, allowed):
        answer = strict.request(method, path)
        answer.refused(405, "method_not_allowed")
        assert answer.headers["allow"] == allowed

    def test_a_sane_request_id_is_kept_and_another_is_replaced(self, api):
        def told(given):
            return api.get("/healthz", headers={"x-request-id": given}).headers["x-request-id"]

        assert told("abc-1.2:3_4") == "abc-1.2:3_4"
        for odd in ("", "a b", "x" * 101, "a\r\nset-cookie: a=b", "é", '"><script>'):
            assert re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", told(odd))

    def test_request_ids_differ(self, api):
        ids = {api.get("/healthz").headers["x-request-id"] for _ in range(100)}
        assert len(ids) == 100

    def test_the_service_tells_of_itself(self, either_api):
        api = either_api
        api.service()
        api.until(lambda: len(api.node.coordinator.owned()) == 64)
        api.submit(delay=30)
        api.until(lambda: len(api.node.horizon.entries) == 1)
        assert api.get("/healthz", status=200).json == {"status": "ok"}
        api.until(lambda: not api.node.health.unready())
        assert api.get("/readyz", status=200).json["status"] == "ready"
        nodes = api.get("/v1/nodes", status=200).json["items"]
        assert [one["this"] for one in nodes] == [True]
        shards = api.get("/v1/shards", status=200).json["items"]
        assert [one["shard"] for one in shards] == [*range(64)]
        assert {one["owner"] for one in shards} == {nodes[0]["name"]}
        wheel = api.get("/v1/wheel", status=200).json
        assert wheel["held"] == sum(sum(level["counts"]) for level in wheel["levels"]) == 1
        stats = api.get("/v1/stats", status=200).json
        assert (stats["submitted"], stats["held"], stats["owned"]) == (1, 1, 64)
        assert stats["services"]["mail"]["breaker"] == "closed"
        assert api.get("/", status=200).media == "text/html"

    def test_ready_is_503_while_it_stops(self, api):
        api.app.stopping = True
        assert api.get("/readyz", status=503).json["status"] == "stopping"
        api.get("/healthz", status=200)
