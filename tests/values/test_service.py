"""A service and its backoff: each form, its bounds, and what is refused."""

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.durable import Backoff
from tickwheel.errors import OutOfRange
from tickwheel.values.service import NO_TIMEOUT_MS, Breaker, Service, check_name


class TestBackoff:
    def test_it_grows_by_its_factor_up_to_its_maximum(self):
        backoff = Backoff(first=1, factor=3, max=20, jitter=0)
        assert [backoff.seconds(failures) for failures in range(1, 6)] == [1, 3, 9, 20, 20]

    def test_a_list_is_gone_through_and_its_last_one_repeats(self):
        backoff = Backoff.of([1, 5, timedelta(minutes=1)])
        assert [backoff.seconds(failures) for failures in range(1, 6)] == [1, 5, 60, 60, 60]

    @pytest.mark.parametrize("value", [2.5, timedelta(seconds=2.5), [2.5], (2.5,)])
    def test_one_number_is_always_the_same(self, value):
        backoff = Backoff.of(value)
        assert [backoff.seconds(failures) for failures in (1, 2, 50)] == [2.5, 2.5, 2.5]

    def test_a_backoff_stays_as_it_is(self):
        backoff = Backoff(first=2)
        assert Backoff.of(backoff) is backoff

    @given(
        failures=st.integers(1, 10_000),
        jitter=st.floats(0, 1),
        factor=st.floats(1, 1000),
    )
    def test_jitter_only_takes_off_and_never_more_than_its_part(self, failures, jitter, factor):
        plain = Backoff(first=1, factor=factor, max=3600, jitter=0).seconds(failures)
        got = Backoff(first=1, factor=factor, max=3600, jitter=jitter).seconds(failures)
        assert plain * (1 - jitter) <= got <= plain <= 3600

    def test_jitter_spreads_the_tries(self):
        backoff = Backoff(first=100, jitter=0.5)
        assert len({backoff.seconds(1) for _ in range(50)}) > 40

    def test_more_failures_than_a_float_can_hold_give_the_maximum(self):
        assert Backoff(factor=10, jitter=0).seconds(10_000) == 3600

    def test_no_wait_at_all_is_a_wait(self):
        assert Backoff.of(0).seconds(3) == 0

    @pytest.mark.parametrize("value", ["5", None, True, {}, [], (), [None], ["1"], object()])
    def test_something_else_is_refused(self, value):
        with pytest.raises(TypeError):
            Backoff.of(value)

    @pytest.mark.parametrize("value", [-1, [-1], [1, -0.5], timedelta(seconds=-1)])
    def test_a_negative_wait_is_refused(self, value):
        with pytest.raises(ValueError):
            Backoff.of(value)

    @pytest.mark.parametrize("value", [math.nan, math.inf, [1, math.nan], 1e12])
    def test_what_is_no_time_is_refused(self, value):
        with pytest.raises(OutOfRange):
            Backoff.of(value)

    @pytest.mark.parametrize("jitter", [-0.1, 1.1, math.nan])
    def test_jitter_is_a_part_of_one(self, jitter):
        with pytest.raises(ValueError):
            Backoff(jitter=jitter)


class TestService:
    def test_it_has_sensible_limits_when_nothing_is_said(self):
        service = Service("mail")
        assert (service.timeout, service.max_attempts, service.enabled) == (60, 5, True)

    @pytest.mark.parametrize(("timeout", "ms"), [(1.5, 1500), (0.0001, 1), (None, NO_TIMEOUT_MS)])
    def test_the_timeout_that_its_lease_is_reckoned_with(self, timeout, ms):
        assert Service("mail", timeout=timeout).timeout_ms == ms

    @pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf])
    def test_a_timeout_is_more_than_nothing(self, timeout):
        with pytest.raises(ValueError):
            Service("mail", timeout=timeout)

    @pytest.mark.parametrize("name", ["max_attempts", "concurrency"])
    @pytest.mark.parametrize("value", [0, -1, 10**9])
    def test_its_numbers_have_bounds(self, name, value):
        with pytest.raises(ValueError, match=name):
            Service("mail", **{name: value})

    @pytest.mark.parametrize("name", ["max_attempts", "concurrency"])
    @pytest.mark.parametrize("value", [1.0, "3", None, True])
    def test_its_numbers_are_whole(self, name, value):
        with pytest.raises(TypeError, match=name):
            Service("mail", **{name: value})

    @pytest.mark.parametrize("rate", [0, -1, 0.0009, 1_000_001, math.nan, math.inf])
    def test_a_rate_has_bounds(self, rate):
        with pytest.raises(ValueError, match="rate"):
            Service("mail", rate=rate)

    @pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
    def test_a_feedback_timeout_is_more_than_nothing(self, seconds):
        with pytest.raises(ValueError):
            Service("mail", feedback_timeout=seconds)

    def test_secrets_and_headers_are_not_in_what_it_shows_of_itself(self):
        service = Service("mail", secrets=("whsec_hush",), headers=(("a", "Bearer b"),))
        assert "hush" not in repr(service)
        assert "Bearer" not in f"{service}"


class TestBreaker:
    def test_it_has_sensible_limits_when_nothing_is_said(self):
        assert Breaker() == Breaker(failures=10, pause=5, max_pause=60, probes=1)

    @pytest.mark.parametrize("name", ["failures", "probes"])
    @pytest.mark.parametrize("value", [0, -1, 10**9])
    def test_its_numbers_have_bounds(self, name, value):
        with pytest.raises(ValueError, match=name):
            Breaker(**{name: value})

    @pytest.mark.parametrize("name", ["pause", "max_pause"])
    @pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
    def test_its_pauses_are_more_than_nothing(self, name, value):
        with pytest.raises(ValueError):
            Breaker(**{name: value})


class TestNames:
    @pytest.mark.parametrize("name", ["a", "close order", "mail.send", "größe ✓", "x" * 200])
    def test_what_can_be_printed_is_a_name(self, name):
        check_name("name", name)

    @pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "\0", "\ud800", "x" * 201, "\x1b[1m"])
    def test_what_cannot_be_read_in_a_list_is_none(self, name):
        with pytest.raises(ValueError, match="printable"):
            check_name("name", name)

    @pytest.mark.parametrize("name", [None, 1, b"mail"])
    def test_a_name_is_text(self, name):
        with pytest.raises(TypeError, match="str"):
            check_name("name", name)
