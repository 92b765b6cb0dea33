"""Requests are checked when they are created."""

import pytest

from tickwheel.http import Response
from tickwheel.http.message import (
    MAX_CACHED_NAME_BYTES,
    MAX_CACHED_NAMES,
    RESERVED,
    Request,
    _names,
    _received_names,
    decode_headers,
)
from tickwheel.http.url import parse

TARGET = parse("http://a.example/")


@pytest.mark.parametrize("method", ["", "GE T", "GET\r\n", "G\x00", "GÉT", "CONNECT", "connect"])
def test_an_invalid_method_is_refused(method):
    for _ in range(2):
        with pytest.raises(ValueError, match="method"):
            Request(method, TARGET, (), b"")


def test_a_cached_header_name_is_not_a_valid_method():
    Request("GET", TARGET, [("CONNECT", "1")], b"")
    with pytest.raises(ValueError, match="CONNECT"):
        Request("CONNECT", TARGET, (), b"")


@pytest.mark.parametrize("name", ["", "a b", "a:", "a\r\n", "ä", "(x)", "a\x00"])
def test_an_invalid_header_name_is_refused(name):
    for _ in range(2):
        with pytest.raises(ValueError, match="name"):
            Request("GET", TARGET, [(name, "1")], b"")


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_reserved_header_is_refused(name):
    for each in (name, name.title(), name.upper()):
        with pytest.raises(ValueError, match=name):
            Request("GET", TARGET, [(each, "1")], b"")


@pytest.mark.parametrize("value", ["a\r\nb", "\n", "\r", "\x00", "\x1f", "\x7f", "€", "\ud800"])
def test_an_invalid_header_value_is_refused(value):
    with pytest.raises(ValueError, match="x-bad") as caught:
        Request("GET", TARGET, [("x-good", "secret"), ("x-bad", value)], b"")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("body", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_a_body_may_be_any_bytes(body):
    assert Request("POST", TARGET, (), body).body == b"abc"


def test_the_caches_of_names_are_bounded():
    for number in range(MAX_CACHED_NAMES + 100):
        Request("GET", TARGET, [(f"x-{number}", "1")], b"")
        assert decode_headers([(b"X-%d" % number, b"1")]) == [(f"x-{number}", "1")]
    assert len(_names) <= MAX_CACHED_NAMES
    assert len(_received_names) <= MAX_CACHED_NAMES


def test_a_servers_odd_names_do_not_fill_the_cache():
    long = b"x" * (MAX_CACHED_NAME_BYTES + 1)
    assert decode_headers([(long, b"1")]) == [(long.decode(), "1")]
    for number in range(MAX_CACHED_NAMES * 2):
        decode_headers([(b"x-%d" % number, b"1")])
    decode_headers([(b"Content-Type", b"text/plain")])
    assert _received_names[b"Content-Type"] == "content-type"
    assert max(map(len, _received_names)) <= MAX_CACHED_NAME_BYTES


def test_a_responses_headers_are_found_in_any_case():
    response = Response(200, [("retry-after", "5"), ("retry-after", "6")], b"", True)
    assert response.header("Retry-After") == "5"
    assert response.header("x") is None
