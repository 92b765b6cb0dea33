"""The batch parser finds the same elements as a JSON decoder."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.web import batch_parser
from tickwheel.web.batch_parser import Malformed, NotAnArray, TooLong, elements, lines

TEXTS = st.text(alphabet='ab",[]{}\\\n\u00e9 \U0001f600')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 999) | st.floats(-1, 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)
LONE = [rb'"\ud83d"', rb'{"a": "\ud83d", "b": [1, {}]}', rb'["\\\ude00\"", "\u0041"]']


@pytest.fixture(params=["whole", "one by one"], autouse=True)
def way(request, monkeypatch):
    """Both ways to find elements; windows are small, so that they cut elements anywhere."""
    if request.param == "one by one":
        monkeypatch.setattr(batch_parser, "WHOLE_ARRAY_BYTES", -1)
        monkeypatch.setattr(batch_parser, "FIRST_WINDOW_BYTES", 2)
        monkeypatch.setattr(batch_parser, "WINDOW_GROWTH", 2)
        monkeypatch.setattr(batch_parser, "LINES_WINDOW_BYTES", 3)


def found(body, longest=10_000):
    return [bytes(one) for one in elements(body, longest)]


def wanted(body):
    return [bytes(one) for one in msgspec.json.decode(body, type=list[msgspec.Raw])]


@settings(max_examples=40)
@given(st.lists(VALUES, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_elements_are_those_of_a_decoder(values, indent, ascii_only):
    body = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()
    assert found(body) == wanted(body)
    assert found(bytearray(b"\r\n\t " + body + b" \n")) == wanted(body)


@settings(max_examples=40)
@given(st.lists(VALUES, max_size=5), st.sampled_from(LONE), st.data())
def test_an_element_with_a_lone_surrogate_leaves_the_others_as_they_are(values, lone, data):
    parts = [json.dumps(one).encode() for one in values]
    parts.insert(data.draw(st.integers(0, len(values))), lone)
    assert found(b"[" + b" , ".join(parts) + b"]") == parts


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"[", b"[1", b"[1,", b"[1,]", b"[,1]", b"[,]", b"[1,,2]", b"[1]]", b"[1] 2",
        b"[1}", b"[1][2]", b'["a]', rb'["a\"]', b"[1 2]", b"[tru, 1]", b"x", b"[" * 300_000,
    ],
)  # fmt: skip
def test_a_body_that_is_not_an_array_is_refused(body):
    with pytest.raises(Malformed) as raised:
        found(body)
    # Python 3.14 can parse the deepest one, and then it is too long.
    assert raised.type is Malformed or body.startswith(b"[[")


@pytest.mark.parametrize("body", [b"{}", b' {"service": "mail"}', b"1", b'"[]"', b"null"])
def test_json_of_another_type_is_not_an_array(body):
    with pytest.raises(NotAnArray):
        found(body)


def test_the_position_of_an_error_is_in_the_whole_body():
    with pytest.raises(Malformed, match=r"invalid character \(byte 7\)"):
        found(b"[1, 2, x]")


@pytest.mark.parametrize("text", [b'"%s"' % (b"x" * 400_000), b"[" + b"[]," * 99_999 + b"0]"])
def test_an_element_that_is_too_long_is_refused(text):
    with pytest.raises(TooLong):
        found(b"[1, %s, %s]" % (text, text), 200_000)


@pytest.mark.parametrize("part", LONE)
def test_finding_an_element_reads_few_bytes_after_it(part, monkeypatch):
    """Otherwise a batch of many small ones would take quadratic time."""
    looked = []
    replace = batch_parser.mask_escapes

    def counted(text):
        looked.append(len(text))
        return replace(text)

    monkeypatch.setattr(batch_parser, "mask_escapes", counted)
    monkeypatch.setattr(batch_parser, "FIRST_WINDOW_BYTES", 64)
    body = b"[" + b",".join([part] * 2_000) + b"]"
    assert found(body, len(body)) == [part] * 2_000
    assert sum(looked) <= 64 * 2_000


class TestLines:
    def test_lines_have_no_white_space_around_them(self):
        body = b"\n  \n a \r\nb\n\t\r\n\nc"
        assert list(lines(body, 100, 8)) == [b"", b"", b"a", b"b", b"", b"", b"c"]
        assert list(lines(b"", 100, 8)) == []
        assert list(lines(b"a\n", 100, 1)) == [b"a"]

    @settings(max_examples=40)
    @given(st.text("ab\n ", max_size=40).map(str.encode))
    def test_every_line_is_found_wherever_a_window_ends(self, body):
        whole = [line.strip() for line in body.removesuffix(b"\n").split(b"\n")] if body else []
        assert list(lines(body, 100, 40)) == whole
        assert list(lines(bytearray(body), 100, 40)) == whole

    def test_a_line_that_is_too_long_is_cut_after_one_byte_more(self):
        assert list(lines(b" " * 50 + b"x\ny", 10, 8)) == [b" " * 11, b"y"]

    def test_blank_lines_count_towards_the_limit(self):
        with pytest.raises(TooLong, match="over 8 lines"):
            list(lines(b"\n" * 9, 100, 8))
