"""A node's share: as many as it has permits for, in each second; the rest is everybody's."""

from tickwheel.durable.permits.share import Share


def kept(share, service, due_at_ms, count, *, waiting=0, permits=3):
    return sum(share.keep(service, due_at_ms, waiting, permits) for _ in range(count))


def test_a_node_keeps_as_many_as_it_has_permits_for():
    share = Share()
    assert kept(share, "mail", 5_000, 10) == 3
    assert kept(share, "mail", 5_999, 10) == 0, "they are due in the same second"


def test_each_second_and_each_service_counts_separately():
    share = Share()
    assert kept(share, "mail", 5_000, 10) == 3
    assert kept(share, "mail", 6_000, 10) == 3
    assert kept(share, "sms", 5_000, 10) == 3


def test_waiting_tasks_count_as_kept():
    share = Share()
    assert kept(share, "mail", 5_000, 10, waiting=2) == 1
    assert kept(share, "mail", 6_000, 10, waiting=3) == 0


def test_only_tasks_that_are_due_are_forgotten():
    share = Share()
    for due_at_ms in (0, 4_000, 5_000, 6_000):
        assert kept(share, "mail", due_at_ms, 10) == 3
    share.forget_until(5_500)
    assert [kept(share, "mail", due_at_ms, 10) for due_at_ms in (0, 4_000, 5_000, 6_000)] == [
        3, 3, 3, 0,
    ]  # fmt: skip
