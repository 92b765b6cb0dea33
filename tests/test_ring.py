"""The ring of the idle tracker in Python and the native one must behave identically."""

import random
import re

import pytest

import cores
from stage import HandClock
from tickwheel import OutOfRange
from tickwheel.ring import IdleRing as PureRing

pytestmark = pytest.mark.skipif(
    cores.PURE_ONLY, reason="TICKWHEEL_TEST_PURE_ONLY=1: there is no native ring to compare with"
)
CHECK_EVERY = 10  # steps; the answers of every step are compared
TIMES = [(30, 1), (30_000, 1000), (1, 1), (5, 7), (1000, 1), (64, 1), (100_000, 3)]


def ring_of(kind, timeout, tick, clock=None, *, by_hand=True):
    """A ring that counts its calls of `_arm`."""

    class Ring(kind):
        arms = 0

        def _arm(self):
            self.arms += 1
            self._set_armed(True)

    return Ring(timeout, tick, clock, by_hand)


def pair(*args, **options):
    from tickwheel._wheel import IdleRing as NativeRing

    return [ring_of(kind, *args, **options) for kind in (PureRing, NativeRing)]


def outcome(function, *args):
    """Return the value of a call, or the type and text of its exception."""
    try:
        return function(*args)
    except Exception as error:
        # From Python 3.14 a dict says more: "cannot use 'list' as a dict key (unhashable …)".
        return type(error), re.sub(r"^cannot use .* \((unhashable .*)\)$", r"\1", str(error))


class Pair:
    """Two rings that get the same calls and must return the same answers."""

    def __init__(self, *args, **options):
        self.rings = pair(*args, **options)

    def __getattr__(self, name):
        def call(*args):
            pure, native = (outcome(getattr(ring, name), *args) for ring in self.rings)
            if isinstance(native, list):  # late ticks share a batch, in any order
                pure, native = sorted(pure), sorted(native)
            assert pure == native, (name, args)
            return native

        return call

    def same(self, keys):
        """Compare everything that a ring shows."""
        pure, native = self.rings
        assert len(pure) == len(native)
        assert bool(pure) is bool(native) is True
        assert pure.arms == native.arms
        for key in keys:
            assert (key in pure) == (key in native)
            self._last_seen_ns(key)
        self._now_ns()


@pytest.mark.parametrize(("timeout", "tick"), TIMES)
@pytest.mark.parametrize("seed", range(3))
def test_by_hand_a_random_script_in_lockstep(timeout, tick, seed):
    chance = random.Random(seed)
    both, now, reported = Pair(timeout, tick), 0, 0
    keys = range(40)
    for number in range(1_000):
        step, key = chance.random(), chance.choice(keys)
        if step < 0.5:
            both.touch(key)
        elif step < 0.55:
            both.touch_many(chance.sample(keys, 5))
        elif step < 0.65:
            both.discard(key)
        elif step < 0.68:
            both._set_armed(chance.random() < 0.5)
        else:
            now += chance.choice((0, 1, tick, timeout // 3, timeout, 5 * timeout))
            now -= chance.random() < 0.05  # back, which is ignored
            reported += len(both._expire(max(0, now)))
        if number % CHECK_EVERY == 0:
            both.same(keys)
    assert reported


@pytest.mark.parametrize(("timeout", "tick"), TIMES)
@pytest.mark.parametrize("seed", range(2))
def test_on_a_clock_a_random_script_in_lockstep(timeout, tick, seed):
    chance = random.Random(seed)
    clock = HandClock(123.456789)
    both = Pair(timeout, tick, clock, by_hand=False)
    keys = range(30)
    for number in range(800):
        step, key = chance.random(), chance.choice(keys)
        if step < 0.5:
            both.touch(key)
        elif step < 0.6:
            both.discard(key)
        elif step < 0.65:
            both.touch_many(chance.sample(keys, 3))
        elif step < 0.8:
            both._expire(clock.time_ns())
        else:
            clock.now += chance.choice((0, 1, tick, timeout // 2, timeout * 3))
        if number % CHECK_EVERY == 0:
            both.same(keys)


def test_the_driver_wakes_no_later_than_the_next_key_is_due():
    for timeout, tick in TIMES:
        for ring in pair(timeout, tick):
            assert ring._wakeup_ns() is None
            now = 0
            for step in range(50):
                ring.touch(step)
                wakeup = ring._wakeup_ns()
                assert now <= wakeup <= -(-(now + timeout) // tick) * tick
                now += tick
                ring._expire(now)


def test_driving_by_wakeups_alone_reports_each_key_in_its_tick():
    for timeout, tick in TIMES:
        reports = []
        for ring in pair(timeout, tick):
            chance, now, due, seen = random.Random(7), 0, {}, []
            for key in range(100):
                now += chance.randrange(0, 3 * tick)
                while (wakeup := ring._wakeup_ns()) is not None and wakeup <= now:
                    seen += [(one, wakeup) for one in ring._expire(wakeup)]
                seen += [(one, now) for one in ring._expire(now)]
                ring.touch(key)
                due[key] = -(-(now + timeout) // tick) * tick
            while (wakeup := ring._wakeup_ns()) is not None:
                seen += [(one, wakeup) for one in ring._expire(wakeup)]
            assert dict(seen) == due
            assert len(seen) == 100
            reports.append(seen)
        assert reports[0] == reports[1]


def test_the_driver_is_armed_once():
    for ring in pair(30, 1):
        ring.touch_many(range(10))
        assert ring.arms == 1
        ring._set_armed(False)
        ring.touch(3)  # known: the driver will wake for it
        assert ring.arms == 1
        ring.touch("new")
        assert ring.arms == 2


def test_an_error_of_arming_is_raised_by_touch_and_the_key_is_known():
    for ring in pair(30, 1):
        type(ring)._arm = lambda self: 1 / 0
        with pytest.raises(ZeroDivisionError):
            ring.touch("u1")
        assert "u1" in ring
        assert ring._expire(30) == ["u1"]


class Broken:
    def time_ns(self):
        raise RuntimeError("no time")


def test_bad_keys_and_a_bad_clock_give_the_same_errors():
    both = Pair(30, 1)
    for key in ([], {}, set()):
        for name in ("touch", "discard", "_last_seen_ns", "__contains__"):
            assert getattr(both, name)(key)[0] is TypeError
    assert both.touch_many(5)[0] is TypeError
    assert both._last_seen_ns("nobody") == (KeyError, "'nobody'")
    assert both._last_seen_ns(("one",)) == (KeyError, "('one',)")  # a tuple is one key
    for kind in pair(30, 1):
        with pytest.raises(RuntimeError, match="no time"):
            type(kind)(30, 1, Broken(), False)


def test_a_touch_with_a_failing_clock_changes_nothing():
    clock = HandClock(5)
    for ring in pair(30, 1, clock, by_hand=False):
        clock.time_ns = lambda: clock.now
        ring.touch("u1")

        def fail():
            raise RuntimeError("no time")

        clock.time_ns = fail
        for call in (ring.touch, lambda key, ring=ring: ring.touch_many([key])):
            with pytest.raises(RuntimeError, match="no time"):
                call("u2")
        assert len(ring) == 1


def test_a_touch_near_the_largest_time():
    both = Pair(30, 1)
    both._expire(2**63 - 100)
    both.touch("u1")
    assert both._expire(2**63 - 71) == []
    assert both._expire(2**63 - 70) == ["u1"]
    both.same(["u1"])


def test_a_key_whose_deadline_is_past_the_largest_time_is_refused():
    for ring in pair(30, 1):
        ring._expire(2**63 - 10)
        for _ in range(2):
            with pytest.raises(OutOfRange, match="expiry must be from 0 to 9223372036854775807"):
                ring.touch("u1")
        assert (len(ring), "u1" in ring) == (0, False)


class Colliding:
    """A key with few different hashes, so that many collide."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return self.number % 3

    def __eq__(self, other):
        return isinstance(other, Colliding) and self.number == other.number

    def __lt__(self, other):
        return self.number < other.number


@pytest.mark.parametrize("seed", range(5))
def test_keys_with_equal_hashes_in_lockstep(seed):
    chance = random.Random(seed)
    both, now = Pair(30, 1), 0
    keys = [Colliding(number) for number in range(40)]
    for number in range(1_000):
        step, key = chance.random(), chance.choice(keys)
        if step < 0.5:
            both.touch(Colliding(key.number))
        elif step < 0.75:
            both.discard(key)
        else:
            now += chance.choice((0, 1, 10, 31))
            both._expire(now)
        if number % CHECK_EVERY == 0:
            both.same(keys)


@pytest.mark.parametrize("kind", [int, str])
def test_a_table_that_grows_and_shrinks_in_lockstep(kind):
    chance, both, now = random.Random(5), Pair(30, 1), 0
    for most in (3_000, 10, 5_000, 0):
        keys = [kind(number) for number in range(5_000)]
        chance.shuffle(keys)
        both.touch_many(keys[:most])
        for key in keys[most:]:
            both.discard(key)
        both.same(keys)
    both.touch_many([kind(number) for number in range(5_000)])
    now += 15
    both._expire(now)
    both.touch_many([kind(number) for number in range(0, 5_000, 2)])
    assert len(both._expire(now + 15)) == 2_500
    assert len(both._expire(now + 30)) == 2_500


@pytest.mark.parametrize("which", [0, 1], ids=["pure", "native"])
def test_an_older_touch_does_not_overwrite_a_newer_one(which):
    """`touch_many` reads the clock before its keys; one of them is touched in between."""
    clock = HandClock()
    ring = pair(30, 1, clock, by_hand=False)[which]
    ring.touch("key")

    def keys():
        clock.now += 20
        ring.touch("key")
        yield "key"

    ring.touch_many(keys())
    assert ring._last_seen_ns("key") == 20
    assert ring._expire(49) == []
    assert ring._expire(50) == ["key"]


def test_added_keys_are_counted():
    for ring in pair(30, 1):
        ring.touch_many([1, 2, 1])
        ring.touch(2)
        assert ring._added == 2
        ring.discard(1)
        ring.touch(1)
        assert ring._added == 3
