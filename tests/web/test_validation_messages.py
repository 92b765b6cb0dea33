"""The messages for invalid requests: the field, the expected type, and the value."""

import itertools
import json
import re

import msgspec
import msgspec.inspect
import pytest

from tickwheel.web import schemas
from tickwheel.web.app import ROUTES
from tickwheel.web.validation_messages import (
    IN_SECONDS,
    describe_bad_json,
    describe_error,
    lone_surrogate,
    union_members,
)

PUT = schemas.PutService
SUBMIT = schemas.SubmitTask
NAME = "1 to 100 of A-Z a-z 0-9 . _ : -, and not only dots"
MOMENT = "a time with its offset, such as 2030-01-31T12:00:00Z"


def message_of(type_, body):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(body, type=type_)
    return describe_error(refused.value, type_, body)


def asked(**query):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(query, schemas.ListTasks)
    return describe_error(refused.value, schemas.ListTasks, query, query=True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"timeout": 0},
         "timeout must be a number of seconds above 0, up to 86400, or null, got 0"),
        ({"timeout": "5"},
         'timeout must be a number of seconds above 0, up to 86400, or null, got "5"'),
        ({"feedback_timeout": None},
         "feedback_timeout must be a number of seconds above 0, up to 31622400, got null"),
        ({"backoff": {"first": "2s"}},
         'backoff.first must be a number of seconds, 0 to 3200000000, got "2s"'),
        ({"max_attempts": 0}, "max_attempts must be 1 to 10000, got 0"),
        ({"max_attempts": 1.5}, "max_attempts must be a whole number, 1 to 10000, got 1.5"),
        ({"concurrency": True}, "concurrency must be a whole number, 1 to 100000, got true"),
        ({"rate": 0}, "rate must be 0.001 to 1000000, or null, got 0"),
        ({"backoff": {"jitter": 3}}, "backoff.jitter must be 0 to 1, got 3"),
        ({"backoff": [1]}, "backoff must be an object, got an array of 1"),
        ({"backoff": {"frist": 1}},
         "there is no field 'backoff.frist'; there are first, factor, max, jitter, delays"),
        ({"backoff": {"delays": 5}}, "backoff.delays must be an array of up to 10000, got 5"),
        ({"backoff": {"delays": [5, "x"]}},
         "backoff.delays[1] must be a number, 0 to 3200000000, got \"x\""),
        ({"breaker": 5}, "breaker must be an object, or null, got 5"),
        ({"enabled": "yes"}, 'enabled must be true or false, got "yes"'),
        ({"protocol": ""}, 'protocol must be text of 1 to 50 characters, got ""'),
        ({"endpoint": ""}, "endpoint must be text of 1 to 2048 characters"),
    ],
    ids=str,
)  # fmt: skip
def test_a_field_of_a_service(wrong, words):
    assert message_of(PUT, json.dumps({"endpoint": "http://h/", **wrong}).encode()) == words


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"service": "a b"}, f'service must be {NAME}, got "a b"'),
        ({"service": ".."}, f'service must be {NAME}, got ".."'),
        ({"service": "a" * 101}, f"service must be {NAME}, got 101 characters"),
        ({"due_at": "2030-01-01T00:00:00"},
         f'due_at must be {MOMENT}, or null, got "2030-01-01T00:00:00"'),
        ({"due_at": 5}, f"due_at must be {MOMENT}, or null, got 5"),
        ({"on_conflict": "x"}, 'on_conflict must be keep or reject or replace, got "x"'),
        ({"delay": -1}, "delay must be 0 to 3200000000 seconds, or null, got -1"),
        ({"priority": 99_999}, "priority must be -32768 to 32767, got 99999"),
        ({"key": "k" * 201},
         "key must be text of 1 to 200 characters, or null, got 201 characters"),
    ],
    ids=lambda one: str(one)[:40],
)  # fmt: skip
def test_a_field_of_a_task(wrong, words):
    assert message_of(SUBMIT, json.dumps({"service": "mail", **wrong}).encode()) == words


def test_each_number_of_a_request_that_may_have_a_fraction_is_a_duration_or_listed_here():
    names = {
        field.encode_name
        for kind in schemas.Input.__subclasses__()
        for field in msgspec.inspect.type_info(kind).fields
        for one in union_members(field.type)
        if isinstance(one, msgspec.inspect.FloatType)
    }
    assert names == IN_SECONDS | {"factor", "jitter", "rate"}


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"limit": 0}, "limit must be 1 to 1000, got 0"),
        ({"limit": "x"}, 'limit must be a whole number, 1 to 1000, got "x"'),
        ({"cursor": "foo"}, 'cursor must be 32 hexadecimal digits, lower case, got "foo"'),
        ({"due_before": "noon"}, f'due_before must be {MOMENT}, got "noon"'),
    ],
    ids=str,
)
def test_a_parameter_of_a_query(query, words):
    assert asked(**query) == words


def test_an_unknown_field_is_named_with_the_known_ones():
    assert asked(nope="1") == (
        "there is no parameter 'nope'; there are state, service, key, due_before, due_after,"
        " tag, cursor, limit, truncate"
    )
    words = message_of(SUBMIT, b'{"service": "mail", "dealy": 1}')
    assert words.startswith("there is no field 'dealy'; there are service, payload, delay, due_at,")


def test_a_missing_field_and_a_body_of_another_type():
    assert message_of(PUT, b"{}") == "endpoint is missing"
    assert message_of(PUT, b"[]") == "the body must be an object, got an array of 0"
    assert message_of(PUT, b'"whsec_hush"') == "the body must be an object"


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": ["whsec_hush", 5]},
        {"secret": {"is": "whsec_hush"}},
        {"secret": ["whsec_hush"] * 6},
        {"secret": "whsec_hush" * 100},
        {"headers": {"authorization": "whsec_hush" * 500}},
        {"headers": {"authorization": ["whsec_hush"]}},
        {"headers": "whsec_hush"},
        {"endpoint": "http://h/?key=whsec_hush" + "x" * 2_048},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_values_that_may_be_secret_are_never_shown(wrong):
    words = message_of(PUT, json.dumps({"endpoint": "http://h/", **wrong}).encode())
    assert "hush" not in words
    assert next(iter(wrong)) in words


def test_a_value_in_a_large_body_is_not_decoded():
    body = json.dumps({"service": "mail", "payload": "x" * 100_000, "priority": "high"}).encode()
    assert message_of(SUBMIT, body) == "priority must be a whole number, -32768 to 32767"


def test_a_value_that_looks_like_a_message_changes_nothing():
    odd = "x - at `$.secret`"
    assert asked(state=odd).startswith("state must be cancelled or delay or")
    assert json.dumps(odd) in asked(state=odd)


def test_every_type_of_a_route_has_a_description():
    """Every pattern of a type must have a description."""
    patterns = re.findall(r"pattern='([^']*)'", repr([
        msgspec.inspect.type_info(type_)
        for route in ROUTES for type_ in (route.takes, route.query) if type_ is not None
    ]))  # fmt: skip
    assert {one.replace("\\\\", "\\") for one in patterns} <= set(schemas.PATTERNS)


def test_no_pattern_accepts_a_final_line_feed():
    for pattern in schemas.PATTERNS:
        good = next(one for one in ("mail", "0" * 32) if re.search(pattern, one))
        assert not re.search(pattern, f"{good}\n")


def found(text):
    """Return the lone surrogate at which the decoder stops."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        return lone_surrogate(error, text)
    return None


class TestLoneSurrogates:
    """A lone surrogate is valid JSON, but cannot be encoded as UTF-8."""

    @pytest.mark.parametrize(
        ("text", "surrogate"),
        [
            (rb'"a\ud83d"', r"\ud83d"),
            (rb'"\ud83d\ud83d\ude00"', r"\ud83d"),
            (rb'"\uDE00"', r"\uDE00"),
            (rb'"\\\ud83dx"', r"\ud83d"),
            (rb'"\ud83d\ude00"', None),
            (rb'"\\ud83d"', None),
            (rb'"\\\\ud83d"', None),
            (rb'"\u00e9 \ufffd"', None),
        ],
    )
    def test_one_is_found(self, text, surrogate):
        assert found(text) == surrogate

    def test_the_first_is_found_at_any_position(self):
        parts = [
            rb"\ud83d",
            rb"\uDE00",
            rb"\u0041",
            rb"\\",
            rb"\"",
            b"x",
            b"xxxxxx",
            rb"\ud83d\ude00",
        ]
        for chosen in itertools.product([b"", *parts], repeat=3):
            text = b'"%s"' % b"".join(chosen)
            left = re.sub(rb"\\\\|\\ud83d\\u(?i:de00)", b"", text)  # without valid pairs
            surrogates = re.findall(rb"\\u[dD][89a-fA-F]..", left)
            assert found(text) == (surrogates[0].decode() if surrogates else None), text

    def test_it_has_a_message(self):
        truncated = msgspec.DecodeError("Input data was truncated")
        assert describe_bad_json(truncated, rb'"a\ud83d"') == (
            "invalid", r"a string has a lone surrogate, \ud83d",
        )  # fmt: skip
        assert describe_bad_json(msgspec.DecodeError("JSON is malformed: x (byte 3)"), b"{x") == (
            "bad_request", "it is not JSON: x (byte 3)",
        )  # fmt: skip

    def test_a_submit_with_one_is_422(self, api):
        api.service(enabled=False)
        for body in (rb'{"service": "mail", "payload": "a\ud83d"}', rb'{"service": "a\ud83d"}'):
            assert "lone surrogate" in api.post("/v1/tasks", body).refused(422, "invalid")["detail"]

    @pytest.mark.parametrize("media", ["application/json", "application/x-ndjson"])
    def test_in_a_batch_it_refuses_only_its_own_task(self, api, media):
        api.service(enabled=False)
        items = [
            rb'{"service":"mail","payload":"\ufffd"}', rb'{"service":"mail","payload":"a\ud83d"}',
            rb'{"service":"mail","payload":"\ud83d\ude00"}',
        ]  # fmt: skip
        body = b"[" + b", ".join(items) + b"]" if media == "application/json" else b"\n".join(items)
        answer = api.post("/v1/tasks/batch", body, media=media, status=200).json
        assert [item["status"] for item in answer["items"]] == [201, 422, 201]
        for item, payload in zip(answer["items"][::2], ("\ufffd", "\U0001f600"), strict=True):
            assert api.get(f"/v1/tasks/{item['id']}").json["payload"] == payload
