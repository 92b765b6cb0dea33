"""Permits that services share: divided fairly, and with something left for who comes later."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.durable.permits.semaphore import RESERVED, Gate

MANY = 100_000


def fill(gate, held, name, services, choosers=1, tasks=MANY):
    """Let a service take permits until it gets no more, or has no more tasks."""
    while count := min(gate.offer(held.get(name, 0), choosers, services), tasks):
        gate.take(count)
        tasks -= count
        held[name] = held.get(name, 0) + count
    return held.get(name, 0)


def test_without_a_spare_all_permits_are_divided_among_those_who_choose():
    gate = Gate(32)
    for choosers in (4, 3, 2, 1):
        assert gate.offer(0, choosers, 10) == 8
        gate.take(8)
    assert gate.offer(8, 1, 10) == 0


def test_one_service_alone_leaves_more_than_it_takes():
    gate, held = Gate(1000, spare=True), {}
    assert 400 < fill(gate, held, "one", 1) < 500


def test_a_second_one_has_half_of_what_is_left_and_a_third_something_still():
    gate, held = Gate(1000, spare=True), {}
    counts = [fill(gate, held, name, 3) for name in ("one", "two", "three")]
    assert counts == sorted(counts, reverse=True)
    assert counts[2] >= 100
    assert gate.free >= 100


def test_the_only_permit_is_for_one_who_has_none():
    gate = Gate(1, spare=True)
    assert gate.offer(1, 1, 5) == 0
    assert gate.offer(0, 1, 5) == 1


@pytest.mark.parametrize("permits", [16, 51, 204, 10_000])
def test_each_service_has_its_part_of_the_reserve_whatever_the_others_hold(permits):
    gate, held = Gate(permits, spare=True), {}
    services = permits // RESERVED
    for number in range(services - 1):
        fill(gate, held, number, services)
    assert fill(gate, held, "last", services) >= 1
    assert gate.free >= 0


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300), st.integers(1, 10))),
)
def test_no_more_are_offered_than_are_free(permits, turns):
    gate, held = Gate(permits, spare=True), {}
    for name, tasks, choosers in turns:
        fill(gate, held, name, 10, choosers, tasks)
        assert gate.free == permits - sum(held.values()) >= 0
        if permits // RESERVED >= 10:
            assert all(gate.offer(held.get(one, 0), 1, 10) or held.get(one) for one in range(10))
