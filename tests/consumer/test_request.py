"""From messages to requests: what a message may have, and the key of each."""

from datetime import UTC, datetime

import pytest

from tickwheel.consumer.request import FIELDS, message_key, payload_request, task_request
from tickwheel.consumer.source import Message
from tickwheel.web.schemas import BatchTask


def test_a_task_has_the_fields_of_the_http_api():
    assert set(BatchTask.__struct_fields__) == FIELDS


def test_times_become_datetimes_and_null_is_nothing():
    request = task_request(
        b'{"service": "work", "due_at": "2030-01-02T03:04:05Z", "deadline": null, "key": null}'
    )
    assert request == {"service": "work", "at": datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not JSON"),
        (b"\xff", "invalid UTF-8"),
        (b"[]", "must be a JSON object"),
        (b"{}", "the service of a task must be a str, got None"),
        (b'{"service": "work", "at": 1}', "has no field 'at'"),
        (b'{"service": "work", "due_at": "tomorrow"}', "due_at must be an RFC 3339 time"),
        (b'{"service": "work", "due_at": "2030-01-02T03:04:05"}', "with a zone"),
        (b'{"service": "work", "deadline": 5}', "deadline must be an RFC 3339 time"),
    ],
)
def test_a_wrong_task_is_an_error_that_says_what_is_wrong(body, why):
    with pytest.raises((TypeError, ValueError), match=why):
        task_request(body)


def test_a_payload_may_be_any_json():
    assert payload_request(b"[1]", "work", None) == {"service": "work", "payload": [1]}
    assert payload_request(b"null", "work", 5)["delay"] == 5


def test_keys_are_equal_for_the_same_source_and_id_only():
    keys = {
        message_key(source, Message(b"", name))
        for source, name in [("a", "1"), ("a", "2"), ("b", "1"), ("a1", ""), ("", "a1"), ("1", "a")]
    }
    assert len(keys) == 6
    assert message_key("a", Message(b"1", "1")) == message_key("a", Message(b"2", "1"))
    assert message_key("a", Message(b"1", None)) is None
