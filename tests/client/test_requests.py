"""The client's parts without a network: retries and waits, Retry-After, URLs, batches."""

import traceback

import pytest

from tickwheel.client import errors, operations, task
from tickwheel.client.bulk import FULL_BATCH_BYTES, Batcher, split_batches
from tickwheel.client.requests import Answer, Request, is_loopback, parse_url, retry_after
from tickwheel.client.retries import Retries

SAFE = Request("GET", "/")
UNSAFE = Request("POST", "/", safe=False)
WALL = 1_794_744_000.0  # 2026-11-15 12:00:00 UTC


def busy(status=503, **headers):
    return Answer(status, {name.replace("_", "-"): text for name, text in headers.items()}, b"")


def waits(retries, request=SAFE):
    found = []
    retries.begin(0.0)
    while (wait := retries.after_failure(request, True, 0.0)) is not None:
        found.append(wait)
        retries.begin(0.0)
    return found


def test_waits_double_up_to_eight_seconds_with_jitter():
    found = waits(Retries(10, 1e6, 0.0))
    most = [0.25, 0.5, 1, 2, 4, 8, 8, 8, 8, 8]
    assert len(found) == len(most)
    for wait, limit in zip(found, most, strict=True):
        assert limit / 2 <= wait <= limit
    assert found != waits(Retries(10, 1e6, 0.0))


def test_five_retries_outlast_a_restart_of_some_seconds():
    assert min(sum(waits(Retries(5, 30, 0.0))) for _ in range(100)) > 3.8


def test_a_wait_beyond_the_timeout_ends_the_retries():
    retries = Retries(100, 10.0, now=100.0)
    retries.begin(100.0)
    assert retries.after_failure(SAFE, True, 109.99) is None
    assert retries.after_answer(SAFE, busy(retry_after="5"), 106.0, WALL) is None
    assert retries.after_answer(SAFE, busy(retry_after="5"), 104.0, WALL) == 5.0


def test_a_try_gets_the_remaining_time():
    retries = Retries(5, 10.0, now=100.0)
    assert retries.begin(100.0) == 10.0
    assert retries.begin(107.5) == 2.5
    assert 0 < retries.begin(200.0) < 0.01
    assert retries.tries == 3


def test_an_unsafe_request_is_retried_only_if_it_certainly_did_nothing():
    retries = Retries(100, 1e6, 0.0)
    retries.begin(0.0)
    assert retries.after_failure(UNSAFE, False, 0.0) is not None
    assert retries.after_failure(UNSAFE, True, 0.0) is None
    assert retries.after_answer(UNSAFE, busy(429), 0.0, WALL) is not None
    for status in (502, 503, 504):
        assert retries.after_answer(UNSAFE, busy(status), 0.0, WALL) is None
        assert retries.after_answer(SAFE, busy(status), 0.0, WALL) is not None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        (" 120 ", 120.0),
        ("Sun, 15 Nov 2026 12:00:30 GMT", 30.0),
        ("Sun, 15 Nov 2026 11:00:00 GMT", 0.0),
        ("Sunday, 15-Nov-26 12:00:30 GMT", 30.0),
        ("Sun Nov 15 12:00:30 2026", 30.0),
        ("", None),
        ("soon", None),
        ("-3", None),
        ("1.5", None),
        ("٣", None),
        ("9" * 30, None),
        ("0000000000007", 7.0),
        ("Sun, 99 Nov 2026 12:00:30 GMT", None),
        ("Sun, 15 Nov 99999999999999999999 12:00:30 GMT", None),
    ],
)
def test_retry_after_is_read_in_both_forms_and_garbage_ignored(text, seconds):
    assert retry_after(busy(retry_after=text), WALL) == seconds


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost.example", False),
        ("10.0.0.1", False),
        ("127.0.0.1.example", False),
    ],
)
def test_is_loopback(host, here):
    assert is_loopback(host) is here


@pytest.mark.parametrize("url", ["127.0.0.1:7399", "nowhere", "ftp://h/", "http:///"])
def test_an_invalid_url_is_shown_in_the_error(url):
    with pytest.raises(ValueError, match="http://HOST:PORT") as refused:
        parse_url(url)
    assert repr(url) in str(refused.value)


@pytest.mark.parametrize("url", ["u:hunter2@h", "ftp://u:hunter2@h", "h?token=hunter2"])
def test_an_invalid_url_that_may_be_a_password_is_not_shown(url):
    with pytest.raises(ValueError, match="http://HOST:PORT") as refused:
        parse_url(url)
    assert "hunter2" not in str(refused.value)


def test_an_invalid_url_is_not_shown_by_a_traceback():
    url = "http://u:hunter2"
    with pytest.raises(ValueError, match="this is not a URL") as refused:
        parse_url(url)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("call", [operations.tasks, operations.backlog, operations.replay_where])
def test_an_unknown_state_is_refused_with_the_known_ones(call):
    with pytest.raises(ValueError, match=r"'delay', .*'cancelled'.*, got 'done'"):
        call(state="done")


def test_replay_where_needs_a_filter():
    with pytest.raises(ValueError, match="give state, service, key or tag"):
        operations.replay_where(force=True)


def test_a_request_that_is_not_a_mapping_is_refused_with_its_number():
    with pytest.raises(TypeError, match="request 1 of submit_many must be a mapping") as raised:
        list(split_batches([{"service": "a"}, "expire"], Batcher(10)))
    assert "'expire'" in str(raised.value)


def test_batches_are_limited_by_count_and_bytes():
    light = [{"service": "a"}] * 25
    assert [len(batch) for batch in split_batches(light, Batcher(10))] == [10, 10, 5]
    assert list(split_batches([], Batcher(10))) == []
    alone = [
        {"service": "a"},
        {"service": "a", "payload": "x" * FULL_BATCH_BYTES},
        {"service": "a"},
    ]
    assert [len(batch) for batch in split_batches(alone, Batcher(10))] == [1, 1, 1]


def test_an_empty_problem_still_has_its_status():
    error = errors.error_of({}, 418)
    assert (error.code, str(error), error.status) == ("bad_answer", "HTTP status 418", 418)
    assert errors.problem_of(error) is None
    assert errors.problem_of(ValueError("x")) is None


@pytest.mark.parametrize("call", [operations.tasks, operations.backlog, operations.cancel_where])
def test_a_filter_by_a_tag_that_no_task_can_have_is_refused(call):
    with pytest.raises(ValueError, match=r"1 to 32 characters, .* got 'a b'"):
        call(tag="a b")


def test_each_tag_of_a_query_is_a_parameter():
    request = operations.tasks(tag=["a", "b:c"]).request
    assert "tag=a&tag=b%3Ac" in request.path
    assert "tag" not in operations.tasks(tag=()).request.path


@pytest.mark.parametrize(
    ("tags", "message"), [("abc", "a list of strings, got 'abc'"), (["a", "a"], "got 'a' twice")]
)
def test_bad_tags_are_refused_before_anything_is_sent(tags, message):
    with pytest.raises((TypeError, ValueError), match=message):
        task.submit("mail", tags=tags)


def test_a_submit_without_tags_sends_none():
    assert b"tags" not in task.submit("mail", tags=()).request.body
