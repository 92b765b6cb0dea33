"""GOAWAY frames, taken out of what comes in however it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.http.frames import Frames, Goaway


def frame(kind, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


def goaway(last, code=0, text=b""):
    return frame(7, last.to_bytes(4, "big") + code.to_bytes(4, "big") + text)


def test_what_is_no_goaway_passes_unchanged():
    data = frame(4, b"") + frame(0, b"\x07" * 100) + frame(1, b"x")
    assert Frames().feed(data) == [data]


def test_a_goaway_is_taken_out_and_the_order_is_kept():
    one, two = frame(4, b"a"), frame(0, b"b")
    assert Frames().feed(one + goaway(5, 2, b"bye") + two) == [one, Goaway(5, 2), two]


def test_the_reserved_bit_of_a_stream_s_number_is_ignored():
    assert Frames().feed(goaway(0x80000003)) == [Goaway(3, 0)]


@pytest.mark.parametrize("length", [0, 7])
def test_a_goaway_that_is_too_short_is_refused(length):
    with pytest.raises(ValueError, match=f"GOAWAY of {length}"):
        Frames().feed(frame(7, bytes(length)))


@pytest.mark.parametrize("kind", [0, 7, 80])
def test_a_frame_that_is_too_long_is_refused_by_its_head(kind):
    with pytest.raises(ValueError, match="frame of 16385 bytes"):
        Frames().feed(frame(kind, bytes((1 << 14) + 1))[:9])


@given(
    st.lists(st.tuples(st.integers(0, 12), st.binary(min_size=8, max_size=40)), max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_it_does_not_matter_how_the_bytes_are_cut(parts, cuts):
    data = b"".join(frame(kind, payload) for kind, payload in parts)
    rest = b"".join(frame(kind, payload) for kind, payload in parts if kind != 7)
    found, frames, turn = [], Frames(), 0
    while data:
        size = cuts[turn % len(cuts)]
        found += frames.feed(data[:size])
        data = data[size:]
        turn += 1
    assert b"".join(each for each in found if isinstance(each, bytes)) == rest
    assert sum(isinstance(each, Goaway) for each in found) == sum(kind == 7 for kind, _ in parts)
