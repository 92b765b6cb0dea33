"""Merging figures of several nodes: the same shape as one, and the same whatever the order."""

import itertools

import msgspec
import pytest

from tickwheel.durable.histogram import Histogram, summary
from tickwheel.web.figures import Durations, Level, Stats, merge, merge_durations, merge_levels
from tickwheel.web.figures import stats_of as figures_of


def histogram(*durations):
    made = Histogram()
    for seconds in durations:
        made.observe(seconds)
    return made


def durations(*seconds):
    return msgspec.convert(summary(histogram(*seconds)), Durations)


def stats(node, number, **more):
    service = {
        "enabled": True, "breaker": "closed", "running": number, "limit": 10,
        "waiting": 2 * number, "latency": summary(histogram(number / 4)),
    }  # fmt: skip
    return figures_of({
        "node": node, "nodes": 3, "uptime": 5.0, "version": "1", "owned": number, "held": number,
        "waiting": 0, "running": 1, "submitted": 100 * number, "submitted_here": number, "sent": 7,
        "unready": [],
        "ended": {"finish": number, f"only-{node}": 1}, "lateness": summary(histogram(number)),
        "stalled": {"owner": float(number)}, "services": {"mail": service, f"mail-{node}": service},
        "wheel": [{"level": 1, "tick": 1, "size": 2, "pointer": number, "counts": [number, 1]}],
    } | more)  # fmt: skip


def test_counts_are_added_and_the_worst_state_is_shown():
    a, b = stats("a", 1), stats("b", 2, unready=["the store is away"])
    b.services["mail"].breaker, b.services["mail"].enabled = "half-open", False
    found = merge([a, b])
    assert (found.node, found.nodes, found.owned, found.submitted, found.sent) == (
        "a",
        3,
        3,
        300,
        14,
    )
    assert found.ended == {"finish": 3, "only-a": 1, "only-b": 1}
    assert (found.unready, found.stalled) == (["the store is away"], {"owner": 2.0})
    assert found.services.keys() == {"mail", "mail-a", "mail-b"}
    mail = found.services["mail"]
    assert (mail.enabled, mail.breaker, mail.running, mail.waiting) == (False, "half-open", 3, 6)
    assert (mail.limit, mail.latency.count) == (20, 2)
    assert [(row.name, row.owned, row.submitted) for row in found.by_node] == [
        ("a", 1, 100),
        ("b", 2, 200),
    ]


def test_merging_is_associative():
    parts = [stats(name, number) for number, name in enumerate("abc", 1)]
    whole = msgspec.to_builtins(merge(parts))
    assert msgspec.to_builtins(merge([merge(parts[:2]), parts[2]])) == whole
    assert msgspec.to_builtins(merge([parts[0], merge(parts[1:])])) == whole


def test_a_merged_answer_can_be_read_again():
    merged = merge([stats("a", 1), stats("b", 2)])
    assert msgspec.json.decode(msgspec.json.encode(merged), type=Stats) == merged


def test_histograms_are_those_of_all_durations():
    groups = [(), (0.002, 0.2), (0.0005, 400.0), (3.0,)]
    for order in itertools.permutations(groups):
        found = merge_durations([durations(*group) for group in order])
        assert found == durations(*itertools.chain(*order))
    assert merge_durations([durations(), durations()]).p99 is None


def test_histograms_with_other_bounds_are_refused():
    odd = msgspec.convert(summary(Histogram([1.0])), Durations)
    odd.count = 1
    with pytest.raises(ValueError, match="other bounds"):
        merge_durations([durations(1.0), odd])


def test_slots_of_equal_levels_are_added_and_other_levels_kept():
    a = [Level(1, 1, 3, 2, [1, 0, 0]), Level(2, 3, 3, 1, [5, 0, 0])]
    b = [Level(1, 1, 3, 0, [1, 2, 3]), Level(2, 4, 3, 1, [7, 0, 0])]
    assert merge_levels([a, b]) == [
        Level(1, 1, 3, 2, [2, 2, 3]),
        Level(2, 3, 3, 1, [5, 0, 0]),
        Level(2, 4, 3, 1, [7, 0, 0]),
    ]
