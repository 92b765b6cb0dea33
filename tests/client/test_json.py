"""Payloads that already are JSON."""

import copy
import json
import pickle

import pytest

from client.fake import TASK, Reply
from tickwheel.client import Json, State
from tickwheel.client.json import encode_object

ODD = [
    '{"amount": 12345678901234567.89, "rate": 1.10}',
    "1e400",
    "-0.0",
    '{"a":1, "a" : 2}',
    " [ ] \n",
    "9" * 10_000,
    '"\\ud83d"',
    '"é€😀"',
    "null",
]


@pytest.mark.parametrize("text", ODD)
def test_a_payload_is_sent_unchanged(client, server, text):
    server.say(Reply(201, TASK))
    client.submit("mail", Json(text), key="k")
    (asked,) = server.asked
    assert asked.body == b'{"service":"mail","key":"k","payload":' + text.encode() + b"}"


def test_payloads_of_a_batch_are_sent_unchanged(client, server):
    server.say(Reply(200, {"items": []}))
    client.submit_many([{"service": "mail", "payload": Json(text)} for text in ODD])
    for text in ODD:
        assert b'"payload":' + text.encode() + b"}" in server.asked[0].body


def test_results_and_payloads_of_schedules_are_sent_unchanged(client, server):
    server.say(Reply(200, {"won": True, "state": State.FINISHED}))
    client.feedback("x", "finished", attempt=1, result=Json("1.10"))
    assert server.asked[0].body.endswith(b'"result":1.10}')
    schedule = {"name": "s", "service": "mail", "payload": 1.1, "cron": "* * * * *"}
    moments = {"next_at": TASK["due_at"], "created_at": TASK["due_at"]}
    server.say(Reply(200, schedule | moments))
    client.put_schedule("s", "mail", Json("1.10"), cron="* * * * *")
    assert b'"payload":1.10' in server.asked[1].body


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value at line 1 column 1"),
        ("{", "not JSON: Expecting property name"),
        ("1 2", r"not JSON: Extra data at line 1 column 3 \(character 2\)"),
        ('1,"key":"k"', "not JSON: Extra data"),
        ("1}", "not JSON: Extra data"),
        ("NaN", "not JSON: NaN"),
        ("[-Infinity]", "not JSON: -Infinity"),
        ('"a\nb"', "not JSON: Invalid control character"),
        ('"\ud83d"', "lone surrogate"),
        ("\ufeff1", "not JSON"),
        ("[" * 200_000, "nested too deeply|not JSON"),
    ],
)
def test_a_text_that_is_not_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Json(text)


@pytest.mark.parametrize("value", [b"1", 1, None, {}])
def test_a_value_that_is_not_text_is_refused(value):
    with pytest.raises(TypeError, match="Json takes a str"):
        Json(value)


def test_json_is_a_hashable_value():
    assert Json("1") == Json("1") != Json("1 ")
    assert {Json("1"), Json("1")} == {Json("1")}
    assert pickle.loads(pickle.dumps(Json("[1]"))) == copy.deepcopy(Json("[1]")) == Json("[1]")
    assert len(repr(Json("9" * 1_000))) < 120


def test_an_object_of_json_values_only_is_encoded():
    assert encode_object({"a": Json("1.0")}) == b'{"a":1.0}'
    assert encode_object({"a": Json("1.0"), "b": 2, "c": Json("[]")}) == b'{"b":2,"a":1.0,"c":[]}'
    assert json.loads(encode_object({"b": 2})) == {"b": 2}
