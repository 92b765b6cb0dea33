"""Frames, however they are cut: GOAWAY is taken out, the rest counted and taken in portions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.http.allowance import Allowance
from tickwheel.http.frames import MAX_HEAD, Frames, Goaway

ALL = 1 << 30


def frame(kind, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


def taken(data, most=ALL):
    """What is taken of the bytes."""
    frames = Frames()
    frames.feed(data)
    return frames.take(most)


def goaway(last, code=0, text=b""):
    return frame(7, last.to_bytes(4, "big") + code.to_bytes(4, "big") + text)


def test_what_is_no_goaway_passes_unchanged():
    data = frame(4, b"") + frame(0, b"\x07" * 100) + frame(1, b"x")
    assert taken(data) == [data]


def test_a_goaway_is_taken_out_and_the_order_is_kept():
    one, two = frame(4, b"a"), frame(0, b"b")
    assert taken(one + goaway(5, 2, b"bye") + two) == [one, Goaway(5, 2), two]


def test_the_reserved_bit_of_a_stream_s_number_is_ignored():
    assert taken(goaway(0x80000003)) == [Goaway(3, 0)]


@pytest.mark.parametrize("length", [0, 7])
def test_a_goaway_that_is_too_short_is_refused(length):
    with pytest.raises(ValueError, match=f"GOAWAY of {length}"):
        taken(frame(7, bytes(length)))


@pytest.mark.parametrize("kind", [0, 7, 80])
def test_a_frame_that_is_too_long_is_refused_by_its_head(kind):
    with pytest.raises(ValueError, match="frame of 16385 bytes"):
        taken(frame(kind, bytes((1 << 14) + 1))[:9])


@given(
    st.lists(st.tuples(st.integers(0, 12), st.binary(min_size=8, max_size=40)), max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.sampled_from([1, 3, ALL]),
)
def test_it_does_not_matter_how_the_bytes_are_cut(parts, cuts, most):
    data = b"".join(frame(kind, payload) for kind, payload in parts)
    rest = b"".join(frame(kind, payload) for kind, payload in parts if kind != 7)
    found, frames, turn = [], Frames(), 0
    while data:
        size = cuts[turn % len(cuts)]
        frames.feed(data[:size])
        data = data[size:]
        found += frames.take(most)
        while frames.more:
            found += frames.take(most)
        turn += 1
    assert b"".join(each for each in found if isinstance(each, bytes)) == rest
    assert sum(isinstance(each, Goaway) for each in found) == sum(kind == 7 for kind, _ in parts)


def test_a_portion_ends_after_so_many_frames():
    frames = Frames()
    ping = frame(6, bytes(8))
    frames.feed(ping * 10)
    assert [frames.take(4) for _ in range(4)] == [[ping * 4], [ping * 4], [ping * 2], []]
    assert not frames.more


def test_what_is_left_of_a_portion_comes_before_what_is_fed_later():
    frames = Frames()
    frames.feed(frame(4, b"") + frame(6, bytes(8)))
    assert frames.take(1) == [frame(4, b"")]
    assert frames.more
    frames.feed(goaway(3))
    assert frames.take(ALL) == [frame(6, bytes(8)), Goaway(3, 0)]


def test_a_frame_that_is_still_coming_is_not_more():
    frames = Frames()
    frames.feed(frame(0, b"abc")[:-1])
    assert frames.take(1) == [frame(0, b"abc")[:-1]]
    assert not frames.more
    frames.feed(b"c" + frame(0, b"")[:5])
    assert frames.take(1) == [b"c"]
    assert not frames.more


@pytest.mark.parametrize(
    ("kind", "length", "price"),
    [(1, 0, 1), (1, 2_560, 11), (9, 2_560, 11), (4, 0, 1), (4, 160, 11), (7, 8, 1), (250, 0, 1)],
)
def test_a_frame_has_a_price_by_its_kind_and_length(kind, length, price):
    frames = Frames()
    frames.feed(frame(kind, bytes(length)))
    frames.take(ALL)
    assert (frames.price, frames.data) == (price, 0)


def test_data_is_counted_apart():
    frames = Frames()
    frames.feed(frame(0, b"") * 3 + frame(0, bytes(10_000)))
    frames.take(ALL)
    assert (frames.price, frames.data) == (0, 4)


def test_a_head_that_is_too_long_in_all_is_refused():
    longest = frame(1, bytes(1 << 14)) + frame(9, bytes(1 << 14)) * (MAX_HEAD // (1 << 14) - 1)
    assert taken(longest + frame(1, b"x")) == [longest + frame(1, b"x")]
    with pytest.raises(ValueError, match="head of 65537 bytes"):
        taken(longest + frame(9, b"x"))


def test_an_allowance_is_used_up():
    allowance = Allowance(now=0.0)
    assert allowance.spend(Allowance.SPARE, now=0.0)
    assert not allowance.spend(1, now=0.0)


def test_time_makes_good_what_was_used_up_and_saves_nothing():
    allowance = Allowance(now=0.0)
    assert allowance.spend(Allowance.SPARE, now=0.0)
    assert allowance.spend(Allowance.PER_SECOND, now=1.0)
    assert not allowance.spend(1, now=1.0)
    assert not allowance.spend(Allowance.SPARE + 1, now=1e6)


def test_each_open_stream_has_an_allowance_of_its_own():
    allowance = Allowance(now=0.0)
    for _ in range(100):
        allowance.earn(Allowance.FOR_A_STREAM)
    assert allowance.spend(100 * Allowance.FOR_A_STREAM, now=0.0)
    for open_streams in range(99, -1, -1):
        allowance.settle(open_streams, fill=False)
    assert allowance.spend(Allowance.SPARE, now=0.0)
    assert not allowance.spend(1, now=0.0)


def test_what_a_stream_did_not_use_goes_with_it():
    allowance = Allowance(now=0.0)
    for _ in range(100):
        allowance.earn(Allowance.FOR_A_STREAM)
        allowance.settle(0, fill=False)
    assert not allowance.spend(Allowance.SPARE + 1, now=0.0)


def test_after_a_stream_that_was_broken_off_the_allowance_is_full():
    allowance = Allowance(now=0.0)
    allowance.spend(Allowance.SPARE, now=0.0)
    allowance.settle(1, fill=True)
    assert allowance.spend(Allowance.SPARE + Allowance.FOR_A_STREAM, now=0.0)
    assert not allowance.spend(1, now=0.0)
