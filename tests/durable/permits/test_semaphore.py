"""Permits that services share: divided fairly, and with something left for who comes later."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.durable.permits.semaphore import RESERVE_DIVISOR, Semaphore

MANY = 100_000


def fill(semaphore, held, name, services, choosers=1, tasks=MANY):
    """Let a service take permits until it gets no more, or has no more tasks."""
    while count := min(semaphore.offer(held.get(name, 0), choosers, services), tasks):
        semaphore.take(count)
        tasks -= count
        held[name] = held.get(name, 0) + count
    return held.get(name, 0)


def test_an_unfair_semaphore_divides_all_permits_among_the_choosers():
    semaphore = Semaphore(32)
    for choosers in (4, 3, 2, 1):
        assert semaphore.offer(0, choosers, 10) == 8
        semaphore.take(8)
    assert semaphore.offer(8, 1, 10) == 0


def test_a_single_service_leaves_more_than_it_takes():
    semaphore, held = Semaphore(1000, fair=True), {}
    assert 400 < fill(semaphore, held, "one", 1) < 500


def test_a_second_service_has_half_of_the_rest_and_a_third_still_some():
    semaphore, held = Semaphore(1000, fair=True), {}
    counts = [fill(semaphore, held, name, 3) for name in ("one", "two", "three")]
    assert counts == sorted(counts, reverse=True)
    assert counts[2] >= 100
    assert semaphore.free >= 100


def test_a_single_permit_goes_to_a_service_without_any():
    semaphore = Semaphore(1, fair=True)
    assert semaphore.offer(1, 1, 5) == 0
    assert semaphore.offer(0, 1, 5) == 1


@pytest.mark.parametrize("permits", [16, 51, 204, 10_000])
def test_each_service_has_its_part_of_the_reserve_whatever_the_others_hold(permits):
    semaphore, held = Semaphore(permits, fair=True), {}
    services = permits // RESERVE_DIVISOR
    for number in range(services - 1):
        fill(semaphore, held, number, services)
    assert fill(semaphore, held, "last", services) >= 1
    assert semaphore.free >= 0


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300), st.integers(1, 10))),
)
def test_offers_never_exceed_the_free_permits(permits, turns):
    semaphore, held = Semaphore(permits, fair=True), {}
    for name, tasks, choosers in turns:
        fill(semaphore, held, name, 10, choosers, tasks)
        assert semaphore.free == permits - sum(held.values()) >= 0
        if permits // RESERVE_DIVISOR >= 10:
            assert all(
                semaphore.offer(held.get(one, 0), 1, 10) or held.get(one) for one in range(10)
            )
