"""A histogram: every duration counts once, under the first bound that it does not exceed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.durable.histogram import BOUNDS, Histogram


def test_a_new_one_is_empty():
    histogram = Histogram()
    assert (histogram.count, histogram.sum, histogram.quantile(0.5)) == (0, 0.0, None)
    assert histogram.cumulative() == [(bound, 0) for bound in (*BOUNDS, math.inf)]


def test_a_duration_on_a_bound_counts_under_it_and_one_beyond_the_last_under_infinity():
    histogram = Histogram([1, 2, 4])
    for seconds in (0, 1, 1.5, 2, 2.5, 100):
        histogram.observe(seconds)
    assert histogram.cumulative() == [(1, 2), (2, 4), (4, 5), (math.inf, 6)]
    assert (histogram.count, histogram.sum) == (6, 107.0)


def test_a_duration_below_zero_counts_as_zero():
    histogram = Histogram([1])
    histogram.observe(-5)
    assert (histogram.sum, histogram.cumulative()) == (0.0, [(1, 1), (math.inf, 1)])


@given(st.lists(st.floats(0, 1000)))
def test_cumulative_counts_increase_up_to_the_total(durations):
    histogram = Histogram()
    for seconds in durations:
        histogram.observe(seconds)
    for bound, count in histogram.cumulative():
        assert count == sum(seconds <= bound for seconds in durations)
    assert histogram.count == len(durations)
    assert histogram.sum == pytest.approx(sum(durations))


def test_a_quantile_lies_within_its_bucket():
    histogram = Histogram([1, 2, 4])
    for seconds in [0.5] * 50 + [1.5] * 49 + [3]:
        histogram.observe(seconds)
    assert histogram.quantile(0.25) == 0.5
    assert histogram.quantile(0.5) == 1
    assert 1.9 < histogram.quantile(0.98) <= 2
    assert 2 < histogram.quantile(1) <= 4


def test_a_quantile_beyond_the_last_bound_is_that_bound():
    histogram = Histogram([1, 2])
    histogram.observe(50)
    assert histogram.quantile(0.5) == 2


@pytest.mark.parametrize("part", [-0.1, 1.1, math.nan])
def test_a_quantile_must_be_from_0_to_1(part):
    with pytest.raises(ValueError, match="from 0 to 1"):
        Histogram().quantile(part)


@pytest.mark.parametrize(
    "bounds", [[], [0], [2, 1], [1, 1], [-1, 1], [1, math.nan, 2], [1, math.inf]]
)
def test_bounds_that_do_not_increase_are_refused(bounds):
    with pytest.raises(ValueError, match="bounds must be"):
        Histogram(bounds)
