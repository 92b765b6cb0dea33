"""The verdict of a soak, on series that are made up: noise, leaks, sawteeth, steps, spikes."""

import random

import pytest

from soak.verdict import MIB, judge

SECONDS = range(0, 1800, 5)
LEVEL = 40 * MIB


def series(value):
    """Return half an hour of samples of a function of time."""
    return [(second, value(second)) for second in SECONDS]


def noise(size, seed=1):
    chance = random.Random(seed)
    return lambda: chance.gauss(0, size)


def memory(value):
    return judge("memory", series(value))


def test_a_flat_series_with_noise_is_flat():
    for seed in range(20):
        noisy = noise(MIB, seed)
        assert memory(lambda second, noisy=noisy: LEVEL + noisy()).flat


def test_a_slow_leak_grows_in_spite_of_noise():
    for seed in range(20):
        noisy = noise(MIB, seed)
        found = memory(lambda second, noisy=noisy: LEVEL + second * 4_000 + noisy())
        assert found.fault.startswith("grows by ")
        assert found.per_hour == pytest.approx(3600 * 4_000, rel=0.3)


@pytest.mark.parametrize(
    ("level", "per_hour", "flat"),
    [(40, 12, False), (100, 12, False), (300, 12, True), (100, 4, True)],
)
def test_what_grows_slower_than_the_resolution_is_flat(level, per_hour, flat):
    for seed in range(20):
        noisy = noise(MIB / 2, seed)
        found = memory(lambda second, n=noisy: (level + per_hour * second / 3600) * MIB + n())
        assert found.flat == flat, seed


@pytest.mark.parametrize("period", [30, 200, 420, 550])
def test_the_sawtooth_of_an_allocator_is_flat(period):
    assert memory(lambda second: LEVEL + second % period / period * 20 * MIB).flat


def test_a_sawtooth_on_a_leak_grows():
    found = memory(lambda second: LEVEL + second * 4_000 + second % 200 / 200 * 10 * MIB)
    assert not found.flat


def test_growth_during_the_warm_up_is_not_counted():
    assert memory(lambda second: LEVEL + min(second, 590) * 50_000).flat


def test_one_step_and_a_few_spikes_are_not_growth():
    assert memory(lambda second: LEVEL + (second > 800) * 3 * MIB).flat
    assert memory(lambda second: LEVEL + (second % 300 == 0) * 90 * MIB).flat


@pytest.mark.parametrize(("measure", "per_minute"), [("descriptors", 0.3), ("threads", 0.2)])
def test_a_count_that_leaks_grows_before_it_reaches_its_peak(measure, per_minute):
    found = judge(measure, series(lambda second: 20 + int(second / 60 * per_minute)))
    assert found.fault.startswith("grows by ")


@pytest.mark.parametrize(("measure", "allowed"), [("descriptors", 16), ("threads", 4)])
def test_a_count_may_exceed_the_most_of_its_warm_up_by_a_few(measure, allowed):
    for more in (allowed, allowed + 1):
        found = judge(measure, series(lambda second, more=more: 20 + (second == 1500) * more))
        assert found.flat == (more == allowed)


def test_what_is_stored_may_vary_by_a_tenth():
    assert judge("rows", series(lambda second: 5_000 + second / 1800 * 400)).flat
    assert not judge("rows", series(lambda second: 5_000 + second)).flat


def test_lateness_is_shown_and_not_judged():
    found = judge("p99", series(lambda second: second))
    assert found.flat
    assert found.after > found.before


def test_a_short_run_has_no_verdict():
    assert judge("memory", [(second, second * MIB) for second in range(29)]) is None
