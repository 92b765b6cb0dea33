"""Payloads under way: a service may hold as many bytes as it leaves free."""

import pytest

from durable.stage import a_task
from tickwheel.durable.permits.payloads import CLAIM_BYTES, Payloads


def task(service, size):
    return a_task(id="0" * 32, service=service, body=bytes(size))


def filled(payloads, service, size):
    """The tasks of a service that are begun until no more is offered."""
    tasks = []
    while payloads.offer(service):
        tasks.append(task(service, size))
        payloads.take(tasks[-1])
    return tasks


class TestPayloads:
    def test_a_single_service_may_use_half(self):
        payloads = Payloads(1_000)
        assert len(filled(payloads, "a", 100)) == 5
        assert payloads.total == 500

    def test_each_service_leaves_as_much_as_it_uses(self):
        payloads = Payloads(1_000)
        for count in (5, 3, 1, 1, 1):
            assert len(filled(payloads, f"s{payloads.total}", 100)) == count

    def test_a_service_with_nothing_under_way_may_start_one_beyond_the_limit(self):
        payloads = Payloads(1_000)
        for number in range(50):
            filled(payloads, f"s{number}", 400)
        assert 2_000 <= payloads.total < 2_000 + 400
        assert payloads.offer("another") == 0

    def test_a_payload_larger_than_the_limit_may_start_alone(self):
        payloads = Payloads(1_000)
        assert len(filled(payloads, "a", 5_000)) == 1

    def test_a_call_that_ends_frees_its_bytes(self):
        payloads = Payloads(1_000)
        tasks = filled(payloads, "a", 100)
        payloads.give(tasks.pop())
        assert payloads.offer("a")
        for one in tasks:
            payloads.give(one)
        assert payloads.total == 0

    def test_empty_payloads_are_never_limited(self):
        payloads = Payloads(1_000)
        for _ in range(10_000):
            assert payloads.offer("a")
            payloads.take(task("a", 0))

    @pytest.mark.parametrize(("size", "count"), [(0, 2 * CLAIM_BYTES), (CLAIM_BYTES, 2)])
    def test_the_offer_follows_the_mean_size_of_payloads(self, size, count):
        payloads = Payloads()
        assert payloads.offer("a") > 1_000
        for _ in range(30):
            payloads.take(task("a", size))
        assert payloads.mean("a") == pytest.approx(size, rel=0.01)
        assert payloads.offer("a") == pytest.approx(count, abs=0.02 * count)
        payloads.forget("a")
        assert payloads.mean("a") == 0
