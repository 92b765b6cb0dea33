"""The flow: how many calls of a service may begin; concurrency, rate, pauses and the breaker."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.durable.permits.flow import BURST_SECONDS, BreakerState, Flow
from tickwheel.values.service import Breaker, Service

BREAKER = Breaker(failures=3, pause=5, max_pause=30, probes=1)


def service(**fields):
    """A service that is called over a network, with a breaker."""
    given = {"protocol": "http", "endpoint": "https://a.example/", "breaker": BREAKER}
    return Service("s", **{**given, **fields})


def call(flow, healthy, now):
    """One call, from its beginning to its end."""
    assert flow.free(now) >= 1
    turn = flow.take(1, now)
    flow.record(healthy, now, turn)
    flow.give(turn)


def end(flow, count):
    """So many calls are over."""
    for _ in range(count):
        flow.give(flow._round)


def opened(now=0.0, **fields):
    """A flow whose breaker has just opened."""
    flow = Flow(service(**fields), now)
    for _ in range(flow.service.breaker.failures):
        call(flow, False, now)
    assert flow.state is BreakerState.OPEN
    return flow


class TestConcurrency:
    def test_as_many_calls_start_as_the_service_allows(self):
        flow = Flow(service(concurrency=3), 0)
        assert flow.free(0) == 3
        flow.take(2, 0)
        assert (flow.free(0), flow.under_way) == (1, 2)
        flow.take(1, 0)
        assert flow.free(0) == 0
        end(flow, 3)
        assert (flow.free(0), flow.under_way) == (3, 0)

    @pytest.mark.parametrize(
        ("concurrency", "nodes", "share"),
        [(10, 1, 10), (10, 2, 5), (10, 3, 3), (2, 5, 1), (1, 9, 1)],
    )
    def test_live_nodes_divide_the_concurrency_and_each_has_at_least_one(
        self, concurrency, nodes, share
    ):
        assert Flow(service(concurrency=concurrency), 0, nodes).free(0) == share

    @given(st.integers(1, 100_000), st.integers(1, 1_000))
    def test_all_nodes_together_keep_to_the_concurrency_unless_each_has_one(self, all_of, nodes):
        share = Flow(service(concurrency=all_of), 0, nodes).free(0)
        assert share >= 1
        assert share * nodes <= max(all_of, nodes)

    def test_a_new_share_applies_at_once_and_calls_under_way_continue(self):
        flow = Flow(service(concurrency=10), 0)
        flow.take(8, 0)
        flow.update(flow.service, 2, 0)
        assert (flow.free(0), flow.under_way) == (0, 8)
        end(flow, 4)
        assert flow.free(0) == 1
        flow.update(flow.service, 1, 0)
        assert flow.free(0) == 6

    def test_a_new_configuration_applies_at_once(self):
        flow = Flow(service(concurrency=1), 0)
        flow.take(1, 0)
        flow.update(service(concurrency=4), 1, 0)
        assert flow.free(0) == 3

    def test_time_alone_does_not_free_a_permit(self):
        flow = Flow(service(concurrency=1), 0)
        flow.take(1, 0)
        assert flow.next_at(0) is None


class TestRate:
    def test_calls_start_at_the_rate(self):
        flow = Flow(service(rate=2), 0)
        begun = []
        now = 0.0
        while now <= 3:
            if flow.free(now):
                flow.take(1, now)
                begun.append(now)
            now = flow.next_at(now)
        assert begun == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5, 3])

    def test_the_calls_of_a_tenth_of_a_second_may_start_at_once(self):
        flow = Flow(service(rate=1_000, concurrency=500), 0)
        assert flow.free(0) == 1_000 * BURST_SECONDS == 100
        flow.take(100, 0)
        assert flow.free(0) == 0
        assert flow.free(0.05) == 50
        assert flow.free(3_600) == 100, "what was not used does not add up"

    def test_a_slow_rate_allows_one_at_once(self):
        flow = Flow(service(rate=0.001), 0)
        assert flow.free(0) == 1
        flow.take(1, 0)
        assert flow.next_at(0) == pytest.approx(1_000)
        assert flow.free(999) == 0
        assert flow.free(1_000) == 1

    @pytest.mark.parametrize("breaker", [None, Breaker()])
    def test_a_node_that_joins_ends_no_pause(self, breaker):
        given = service(breaker=breaker)
        flow = Flow(given, 0)
        flow.hold(3600)
        flow.update(given, 2, 10)
        assert flow.free(10) == 0
        flow.update(given, 1, 20)
        assert flow.free(3600) == 1  # and it begins slowly

    def test_removing_the_breaker_ends_its_pause(self):
        flow = Flow(service(breaker=Breaker(failures=1)), 0)
        flow.record(False, 0, flow.take(1, 0))
        assert flow.free(0) == 0
        flow.update(service(breaker=None), 1, 0)
        assert flow.free(0) > 0

    def test_live_nodes_divide_the_rate(self):
        flow = Flow(service(rate=10), 0, nodes=5)
        flow.take(1, 0)
        assert flow.free(0.499) == 0
        assert flow.free(0.5) == 1

    def test_undoing_a_call_gives_its_token_back(self):
        flow = Flow(service(rate=1), 0)
        flow.undo(flow.take(1, 0))
        assert (flow.free(0), flow.under_way) == (1, 0)

    def test_undoing_never_exceeds_the_burst(self):
        flow = Flow(service(rate=10, concurrency=50), 0)
        turn = flow.take(1, 0)
        assert flow.free(5) == 1
        flow.undo(turn)
        assert flow.free(5) == 1

    def test_a_call_that_ended_gives_no_token_back(self):
        flow = Flow(service(rate=1), 0)
        call(flow, True, 0)
        assert flow.free(0.5) == 0

    def test_a_changed_rate_applies_at_once(self):
        flow = Flow(service(rate=1), 0)
        flow.take(1, 0)
        flow.update(service(rate=10), 1, 0.5)
        assert flow.free(0.5) == 0
        assert flow.free(0.55) == 1

    def test_a_rate_may_be_added_and_removed(self):
        flow = Flow(service(rate=1), 0)
        flow.take(1, 0)
        flow.update(service(), 1, 0)
        assert flow.free(0) == 99
        flow.take(50, 0)
        flow.update(service(rate=1), 1, 100)
        assert flow.free(100) <= 1

    def test_a_clock_that_is_set_back_gives_no_tokens(self):
        flow = Flow(service(rate=1), 100)
        flow.take(1, 100)
        assert flow.free(50) == 0
        assert flow.free(50.5) == 0
        assert flow.free(51) == 1

    @given(
        rate=st.floats(0.01, 2_000),
        nodes=st.integers(1, 7),
        steps=st.lists(
            st.tuples(
                st.floats(0, 30, allow_subnormal=False),
                st.integers(0, 300),
                st.integers(0, 3),
                st.booleans(),
            ),
            max_size=60,
        ),
    )
    def test_no_interval_has_more_calls_than_the_rate_and_one_burst(self, rate, nodes, steps):
        flow = Flow(service(rate=rate, concurrency=100_000), 0, nodes)
        burst = max(1.0, rate / nodes * BURST_SECONDS)
        begun = []  # when, how many
        now = 0.0
        for pause, wanted, undone, exactly in steps:
            later = flow.next_at(now)
            now = later if exactly and later is not None else now + pause
            count = min(wanted, flow.free(now))
            turn = flow.take(count, now)
            for _ in range(min(undone, count)):
                flow.undo(turn)
            begun.append((now, count - min(undone, count)))
        for first in range(len(begun)):
            calls = 0
            for at, count in begun[first:]:
                calls += count
                assert calls <= burst + (at - begun[first][0]) * rate / nodes + 1e-6

    @given(rate=st.floats(0.01, 1_000), seconds=st.floats(0, 100))
    def test_a_call_may_start_at_the_time_that_next_at_returns(self, rate, seconds):
        flow = Flow(service(rate=rate, concurrency=1_000), 0)
        flow.take(flow.free(seconds), seconds)
        at = flow.next_at(seconds)
        assert flow.free(seconds) == 0
        assert at > seconds
        assert flow.free(at + 1e-6) >= 1


class TestHold:
    def test_during_a_hold_nothing_starts_and_after_it_one_call(self):
        flow = Flow(service(concurrency=10), 0)
        flow.hold(30)
        assert flow.free(0) == flow.free(29.999) == 0
        assert flow.is_blocked(29.999)
        assert flow.next_at(0) == 30
        assert not flow.is_blocked(30)
        assert flow.free(30) == 1

    def test_the_later_end_counts(self):
        flow = Flow(service(), 0)
        flow.hold(30)
        flow.hold(10)
        assert flow.next_at(0) == 30
        flow.hold(40)
        assert flow.next_at(0) == 40

    @pytest.mark.parametrize("breaker", [BREAKER, None], ids=["breaker", "no breaker"])
    def test_after_a_hold_each_success_allows_one_more_call(self, breaker):
        flow = Flow(service(concurrency=5, breaker=breaker), 0)
        flow.hold(30)
        limits = []
        for _ in range(6):
            limits.append(flow.limit)
            call(flow, True, 30)
        assert limits == [1, 2, 3, 4, 5, 5]

    def test_calls_under_way_end_as_usual_during_a_hold(self):
        flow = Flow(service(concurrency=5), 0)
        turn = flow.take(5, 0)
        flow.hold(30)
        flow.record(True, 1, turn)
        end(flow, 5)
        assert (flow.under_way, flow.free(1)) == (0, 0)

    def test_a_clock_that_is_set_far_forward_ends_a_hold(self):
        flow = Flow(service(), 0)
        flow.hold(86_400)
        assert flow.free(1e9) == 1


class TestBreaker:
    def test_the_breaker_opens_after_its_number_of_failures_in_a_row(self):
        flow = Flow(service(), 0)
        for _ in range(2):
            call(flow, False, 0)
        assert (flow.state, flow.free(0)) == (BreakerState.CLOSED, 100)
        call(flow, False, 0)
        assert (flow.state, flow.free(0)) == (BreakerState.OPEN, 0)
        assert flow.is_blocked(0)

    def test_a_success_resets_the_count_of_failures(self):
        flow = Flow(service(), 0)
        for healthy in [False, False, True] * 10:
            call(flow, healthy, 0)
        assert flow.state is BreakerState.CLOSED

    def test_an_answer_without_a_verdict_on_the_service_does_not_count(self):
        flow = Flow(service(), 0)
        for healthy in [False, None, False, None]:
            call(flow, healthy, 0)
        assert flow.state is BreakerState.CLOSED
        call(flow, False, 0)
        assert flow.state is BreakerState.OPEN

    def test_without_a_breaker_failures_stop_nothing(self):
        flow = Flow(service(breaker=None, concurrency=7), 0)
        for _ in range(1_000):
            call(flow, False, 0)
        assert (flow.state, flow.free(0)) == (BreakerState.CLOSED, 7)

    def test_the_breaker_stays_open_for_its_pause_and_then_allows_a_probe(self):
        flow = opened()
        assert flow.next_at(0) == 5
        assert flow.free(4.999) == 0
        assert flow.free(5) == 1
        flow.take(1, 5)
        assert flow.state is BreakerState.HALF_OPEN
        assert flow.free(5) == flow.free(1_000) == 0, "one probe at a time"

    def test_the_number_of_concurrent_probes_is_limited(self):
        flow = opened(breaker=replace(BREAKER, probes=4), concurrency=10)
        assert flow.free(5) == 4
        flow.take(3, 5)
        assert flow.free(5) == 1

    def test_probes_keep_to_the_concurrency(self):
        flow = opened(breaker=replace(BREAKER, probes=4), concurrency=2)
        assert flow.free(5) == 2

    def test_a_probe_without_a_verdict_is_followed_by_another(self):
        flow = opened()
        call(flow, None, 5)
        assert flow.state is BreakerState.HALF_OPEN
        assert flow.free(5) == 1

    def test_a_probe_that_was_undone_is_followed_by_another(self):
        flow = opened()
        flow.undo(flow.take(1, 5))
        assert flow.free(5) == 1

    def test_each_failed_probe_doubles_the_pause_up_to_its_maximum(self):
        flow = opened()
        now, pauses = 5.0, []
        for _ in range(5):
            call(flow, False, now)
            assert flow.state is BreakerState.OPEN
            pauses.append(flow.next_at(now) - now)
            now = flow.next_at(now)
        assert pauses == [10, 20, 30, 30, 30]

    def test_after_the_breaker_closes_its_pause_is_the_first_again(self):
        flow = opened()
        call(flow, False, 5)
        call(flow, True, 15)
        assert flow.state is BreakerState.CLOSED
        for _ in range(3):
            call(flow, False, 15)
        assert flow.next_at(15) == 20

    def test_after_the_breaker_closes_it_opens_after_as_many_failures_again(self):
        flow = opened()
        call(flow, True, 5)
        call(flow, False, 5)
        call(flow, False, 5)
        assert flow.state is BreakerState.CLOSED

    def test_a_service_recovers_slowly_each_success_allows_one_more_call(self):
        flow = opened(concurrency=6)
        limits = []
        for _ in range(7):
            call(flow, True, 5)
            limits.append(flow.limit)
        assert limits == [2, 3, 4, 5, 6, 6, 6]

    def test_failures_of_earlier_calls_do_not_extend_the_pause(self):
        flow = Flow(service(concurrency=50), 0)
        turn = flow.take(50, 0)
        for _ in range(50):
            flow.record(False, 1, turn)
            flow.give(turn)
        assert flow.next_at(1) == 6

    def test_a_success_of_an_earlier_call_does_not_end_the_pause(self):
        flow = Flow(service(), 0)
        turn = flow.take(4, 0)
        for healthy in [False, False, False, True]:
            flow.record(healthy, 1, turn)
            flow.give(turn)
        assert (flow.state, flow.free(1)) == (BreakerState.OPEN, 0)

    @pytest.mark.parametrize("healthy", [True, False, None])
    def test_an_answer_to_an_earlier_call_does_not_count_as_a_probe(self, healthy):
        flow = Flow(service(), 0)
        before = flow.take(4, 0)
        for _ in range(3):
            flow.record(False, 1, before)
        probe = flow.take(1, 6)
        flow.record(healthy, 7, before)
        assert (flow.state, flow.free(7)) == (BreakerState.HALF_OPEN, 0)
        flow.record(True, 8, probe)
        assert flow.state is BreakerState.CLOSED
        end(flow, 5)

    def test_a_probe_that_fails_after_another_closed_the_breaker_is_one_failure(self):
        flow = opened(breaker=replace(BREAKER, probes=2))
        turn = flow.take(2, 5)
        flow.record(True, 6, turn)
        flow.record(False, 6, turn)
        assert flow.state is BreakerState.CLOSED

    def test_an_open_breaker_and_a_hold_wait_for_the_later_end(self):
        flow = opened()
        flow.hold(60)
        assert flow.free(59) == 0
        assert flow.next_at(0) == 60
        assert flow.free(60) == 1

    @pytest.mark.parametrize(
        "other", [{"endpoint": "https://b.example/"}, {"breaker": None}], ids=["moved", "without"]
    )
    def test_a_changed_service_is_called_at_once(self, other):
        flow = opened()
        flow.update(service(**other), 1, 1)
        assert (flow.state, flow.free(1)) == (BreakerState.CLOSED, 100)

    def test_a_service_that_is_enabled_again_is_called_at_once(self):
        flow = opened()
        flow.update(service(enabled=False), 1, 1)
        flow.update(service(enabled=True), 1, 1)
        assert (flow.state, flow.free(1)) == (BreakerState.CLOSED, 100)

    def test_an_unrelated_change_leaves_the_breaker_open(self):
        flow = opened()
        flow.update(service(concurrency=5, timeout=3), 1, 1)
        assert (flow.state, flow.next_at(1)) == (BreakerState.OPEN, 5)

    @given(
        breaker=st.builds(
            Breaker,
            failures=st.integers(1, 5),
            pause=st.just(2.0),
            max_pause=st.just(9.0),
            probes=st.integers(1, 3),
        ),
        concurrency=st.integers(1, 8),
        steps=st.lists(
            st.tuples(st.sampled_from(["take", "good", "bad", "none", "wait", "undo"]),
                      st.integers(0, 9)),
            max_size=80,
        ),
    )  # fmt: skip
    def test_random_calls_keep_to_all_limits(self, breaker, concurrency, steps):
        """Against a model that knows the rules and nothing of the code.

        Calls end in any order, those of before a pause included.
        """
        flow = Flow(service(breaker=breaker, concurrency=concurrency), 0)
        now, turns = 0.0, []
        for what, number in steps:
            if what == "wait":
                now += number
            elif what == "take":
                before = flow.state
                count = min(number, flow.free(now))
                turns += [flow.take(count, now)] * count
                if before is not BreakerState.CLOSED:
                    assert count <= breaker.probes
            elif turns:
                turn = turns.pop(number % len(turns))
                if what == "undo":
                    flow.undo(turn)
                else:
                    flow.record({"good": True, "bad": False, "none": None}[what], now, turn)
                    flow.give(turn)
            under_way = len(turns)
            assert flow.under_way == under_way
            assert 0 <= flow.free(now) <= max(0, concurrency - under_way)
            later = flow.next_at(now)
            assert later is None or now < later <= now + breaker.max_pause
            if flow.is_blocked(now):
                assert flow.free(now) == 0
                assert later is not None
                assert flow.free(later) == min(breaker.probes, max(0, concurrency - under_way)), (
                    "it is tried again, whatever was before"
                )
            elif not under_way:
                assert flow.free(now) >= 1, "nothing is stuck"

    def test_a_service_that_is_not_stored_has_no_breaker(self):
        assert Flow(Service("function"), 0).limit == 100
        assert Service("function").breaker is None
        assert Flow(Service("function"), 0).next_at(0) is None
        assert not math.isinf(Flow(Service("function"), 0).free(0))
