"""References: cycles are collected, cancelled items are freed at once, nothing leaks."""

import gc
import os
import random
import subprocess
import sys
import tracemalloc
import weakref

import pytest

from tickwheel import MemoryBuffer

KINDS = {
    "Wheel": lambda core: core.Wheel(size=20),
    "sizes": lambda core: core.Wheel(sizes=(8, 8, 64), pointers="pushed"),
    "buffer": lambda core: core.Wheel(sizes=(8, 8), overflow=MemoryBuffer()),
    "SimpleWheel": lambda core: core.SimpleWheel(size=600),
    "RoundsWheel": lambda core: core.RoundsWheel(size=20),
}
EXPIRIES = [0, 3, 25, 450]  # due, on level 1, on level 2, on level 3 or in the buffer
PLACES = [
    *[("Wheel", expiry) for expiry in EXPIRIES],
    *[("sizes", 25), ("buffer", 3), ("buffer", 450)],
    *[(kind, expiry) for kind in ("SimpleWheel", "RoundsWheel") for expiry in (0, 450)],
]
in_every_place = pytest.mark.parametrize(("make", "expiry"), PLACES, indirect=["make"])


class Item:
    """An item that can be weakly referenced."""


@pytest.fixture(params=KINDS)
def make(core, request):
    return lambda: KINDS[request.param](core)


@pytest.fixture(autouse=True)
def collector(young_heap):
    """Start without garbage, and run the collector only when a test calls it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class TestLettingGo:
    """None of these tests needs the collector, which is off."""

    @in_every_place
    def test_cancel_releases_the_item_at_once(self, make, expiry):
        wheel, item = make(), Item()
        watch = weakref.ref(item)
        entry = wheel.schedule(expiry, item)
        del item
        assert watch() is not None
        assert entry.cancel()
        assert watch() is None

    @in_every_place
    def test_cancel_many_releases_the_items_at_once(self, make, expiry):
        wheel, item = make(), Item()
        watch = weakref.ref(item)
        entries = wheel.schedule_many([expiry] * 3, [item] * 3)
        del item
        wheel.cancel_many(entries[:2])
        assert watch() is not None
        wheel.cancel_many(entries)
        assert watch() is None

    @in_every_place
    def test_a_fired_entry_releases_its_item(self, make, expiry):
        wheel, item = make(), Item()
        watch = weakref.ref(item)
        entry = wheel.schedule(expiry, item)
        del item
        fired = wheel.advance(500)
        assert fired[0] is watch()
        assert entry.item is None
        del fired
        assert watch() is None

    @in_every_place
    def test_a_cancelled_entry_without_a_reference_is_freed_at_once(self, make, expiry):
        wheel = make()
        entry = wheel.schedule(expiry, "a")
        watch = weakref.ref(entry)
        entry.cancel()
        del entry
        assert watch() is None
        assert wheel.advance(500) == []

    @in_every_place
    def test_a_fired_entry_without_a_reference_is_freed_at_once(self, make, expiry):
        wheel = make()
        watch = weakref.ref(wheel.schedule(expiry, "a"))
        assert watch().pending
        wheel.advance(500)
        assert watch() is None

    def test_reschedule_keeps_the_item_and_no_copy_of_it(self, make):
        wheel, item = make(), Item()
        before = sys.getrefcount(item)
        entry = wheel.schedule(3, item)
        for expiry in (0, 25, 450, 3, 450, 0):
            entry.reschedule(expiry)
            assert sys.getrefcount(item) == before + 1
        entry.cancel()
        assert sys.getrefcount(item) == before

    def test_freeing_the_wheel_releases_all_items_though_entries_survive(self, make):
        wheel = make()
        items = [Item() for _ in EXPIRIES]
        watches = [weakref.ref(item) for item in items]
        entries = wheel.schedule_many(EXPIRIES, items)
        wheel.advance(0, limit=1)
        del items
        del wheel
        assert [watch() for watch in watches] == [None] * 4
        assert [entry.item for entry in entries] == [None] * 4
        assert not any(entry.pending for entry in entries)

    def test_an_entry_does_not_keep_its_wheel_alive(self, make):
        wheel = make()
        entry = wheel.schedule(3, "a")
        watch = weakref.ref(wheel)
        del wheel
        assert watch() is None
        assert not entry.pending

    def test_a_refused_schedule_keeps_no_reference(self, make):
        wheel, item = make(), Item()
        before = sys.getrefcount(item)
        for call in (
            lambda: wheel.schedule(-1, item),
            lambda: wheel.schedule(1.5, item),
            lambda: wheel.schedule_many([5, None], [item, item]),
            lambda: wheel.schedule_many([5], [item, item]),
            lambda: wheel.schedule_many([5, 6, -1], [item] * 3),
        ):
            with pytest.raises((TypeError, ValueError)):
                call()
        assert sys.getrefcount(item) == before


class TestCycles:
    """A cycle through a wheel is garbage if nothing outside refers to it."""

    def collected(self, *watches):
        gc.collect()
        return [watch() for watch in watches] == [None] * len(watches)

    @in_every_place
    def test_an_item_that_holds_its_wheel(self, make, expiry):
        wheel, item = make(), Item()
        item.wheel = wheel
        wheel.schedule(expiry, item)
        watches = weakref.ref(wheel), weakref.ref(item)
        del wheel, item
        assert watches[0]() is not None
        assert self.collected(*watches)

    @in_every_place
    def test_an_item_that_holds_its_own_handle_and_the_wheel(self, make, expiry):
        wheel, item = make(), Item()
        item.wheel = wheel
        item.entry = wheel.schedule(expiry, item)
        watches = weakref.ref(wheel), weakref.ref(item), weakref.ref(item.entry)
        del wheel, item
        assert self.collected(*watches)

    def test_a_bound_method_of_an_object_that_owns_the_wheel(self, make):
        class Connection:
            def __init__(self, wheel):
                self.wheel = wheel
                self.entries = wheel.schedule_many(EXPIRIES, [self.expire] * len(EXPIRIES))

            def expire(self):
                return self

        watch = weakref.ref(Connection(make()))
        assert self.collected(watch)

    def test_a_cycle_of_two_wheels(self, make):
        one, two = make(), make()
        for expiry in EXPIRIES:
            one.schedule(expiry, two)
            two.schedule(expiry, one)
        watches = weakref.ref(one), weakref.ref(two)
        del one, two
        assert self.collected(*watches)

    def test_a_wheel_that_is_its_own_item(self, make):
        wheel = make()
        wheel.schedule_many(EXPIRIES, [wheel] * len(EXPIRIES))
        watch = weakref.ref(wheel)
        del wheel
        assert self.collected(watch)

    def test_an_entry_that_is_an_item(self, make):
        wheel, item = make(), Item()
        item.wheel = wheel
        entry = wheel.schedule(3, item)
        for expiry in EXPIRIES:
            entry = wheel.schedule(expiry, [entry, wheel])
        watches = weakref.ref(wheel), weakref.ref(item)
        del wheel, item, entry
        assert self.collected(*watches)

    def test_a_cycle_through_the_backlog_of_a_limited_advance(self, make):
        wheel = make()
        items = [Item() for _ in range(5)]
        for item in items:
            item.wheel = wheel
            wheel.schedule(3, item)
        assert len(wheel.advance(100, limit=2)) == 2
        watches = [weakref.ref(wheel), weakref.ref(items[4])]
        del wheel, item, items
        assert self.collected(*watches)

    def test_a_cycle_through_the_overflow_buffer(self, core):
        class Owned(MemoryBuffer):
            pass

        buffer = Owned()
        wheel = core.Wheel(sizes=(8, 8), overflow=buffer)
        buffer.wheel = wheel
        item = Item()
        item.entry, item.wheel = wheel.schedule(1000, item), wheel
        watches = [weakref.ref(wheel), weakref.ref(item), weakref.ref(item.entry)]
        watches.append(weakref.ref(buffer))
        del wheel, item, buffer
        assert self.collected(*watches)

    def test_an_item_referenced_from_outside_is_kept(self, make):
        wheel, item = make(), Item()
        item.wheel = wheel
        entries = wheel.schedule_many(EXPIRIES, [item] * 4)
        del item
        for _ in range(3):
            gc.collect()
        assert all(entry.pending for entry in entries)
        assert len(wheel.advance(500)) == 4

    def test_an_item_is_kept_while_only_the_wheel_holds_it(self, make):
        wheel, item = make(), Item()
        item.me = item
        watch = weakref.ref(item)
        wheel.schedule(25, item)
        del item
        gc.collect()
        assert watch() is not None
        assert wheel.advance(500) == [watch()]
        gc.collect()
        assert watch() is None

    def test_an_entry_that_only_its_item_holds_stays_pending(self, make):
        wheel, item = make(), Item()
        item.entry = wheel.schedule(25, item)
        watch = weakref.ref(item)
        del item
        gc.collect()
        assert watch().entry.pending
        assert wheel.advance(500) == [watch()]

    def test_an_entry_without_its_wheel_keeps_no_garbage(self, make):
        wheel, item = make(), Item()
        entry = item.entry = wheel.schedule(25, item)
        watch = weakref.ref(item)
        del wheel, item
        gc.collect()
        assert watch() is None
        assert not entry.pending


class TestTheCollectorsWork:
    def test_native_entries_are_not_tracked(self, core):
        if not core.native:
            return  # only native entries: the collector tracks Python's own objects
        for build in KINDS.values():
            wheel = build(core)
            entries = wheel.schedule_many(EXPIRIES, [[] for _ in EXPIRIES])
            assert not any(gc.is_tracked(entry) for entry in entries)
            assert gc.is_tracked(wheel)

    def test_the_collector_sees_the_items_through_the_wheel(self, core):
        if not core.native:
            return
        for build in KINDS.values():
            wheel = build(core)
            items = [Item() for _ in EXPIRIES]
            wheel.schedule_many(EXPIRIES, items)
            seen = gc.get_referents(wheel)
            for item in items:
                assert any(found is item for found in seen)


class TestSize:
    def test_getsizeof_grows_with_the_entries(self, core):
        if not core.native:
            return  # getsizeof of a Python object does not include its references
        for build in KINDS.values():
            wheel = build(core)
            empty = sys.getsizeof(wheel)
            wheel.schedule_many([number % 500 for number in range(10_000)], range(10_000))
            full = sys.getsizeof(wheel)
            assert full >= empty + 10_000 * 8


MAPPED = """
import os
from pathlib import Path
from tickwheel import Wheel

def mapped():
    pages = Path("/proc/self/statm").read_text("ascii").split()[0]
    return int(pages) * os.sysconf("SC_PAGESIZE")

wheel, count = Wheel(), 600_000
before = mapped()
entries = wheel.schedule_many([5] * count, [None] * count)
full = mapped()
wheel.cancel_many(entries)
del entries
print(full - before, mapped() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("TICKWHEEL_SANITIZE" in os.environ, reason="entries have no arenas there")
def test_the_memory_of_native_entries_is_returned_to_the_system(core):
    if not core.native:
        return  # Python's own allocator decides
    # In a new process: other tests leave memory and threads behind.
    ran = subprocess.run([sys.executable, "-c", MAPPED], capture_output=True, check=True, text=True)
    full, left = map(int, ran.stdout.split())
    assert full > 30 * 600_000  # of 64 bytes each
    assert left < full / 2


def operations(wheel, count, chance, item=None):
    """A mixed script that ends with an empty wheel."""
    entries = []
    done = 0
    while done < count:
        now = wheel.now
        entries += [wheel.schedule(now + chance.randrange(500), item) for _ in range(20)]
        entries += wheel.schedule_many(
            [now + chance.randrange(500) for _ in range(20)], [item] * 20
        )
        for _ in range(15):
            chance.choice(entries).cancel()
            chance.choice(entries).reschedule(now + chance.randrange(500))
        wheel.cancel_many(entries[::7])
        wheel.advance(now + chance.randrange(60), limit=chance.randrange(1, 50))
        wheel.advance(wheel.now + chance.randrange(60))
        wheel.next_expiry()
        wheel.next_wakeup()
        wheel.where(entries[0])
        repr(entries[-1])
        done += 80
        if len(entries) > 400:
            wheel.cancel_many(entries)
            entries.clear()
            wheel.snapshot()
            repr(wheel)
    wheel.advance(wheel.now + 1000)
    entries.clear()
    assert len(wheel) == 0


def mistakes(wheel, count):
    """Calls that fail: they must release what they have allocated."""
    foreign = type(wheel)().schedule(5, "foreign")
    entry = wheel.schedule(wheel.now + 5, "a")
    for _ in range(count):
        for call in (
            lambda: wheel.schedule(-1, Item()),
            lambda: wheel.schedule(1.5, Item()),
            lambda: wheel.schedule_many([wheel.now + 5, -1], [Item(), Item()]),
            lambda: wheel.schedule_many([wheel.now + 5], [Item(), Item()]),
            lambda: wheel.cancel_many([entry, foreign]),
            lambda: wheel.where(None),
            lambda: wheel.advance(wheel.now, limit=0),
            lambda: entry.reschedule(None),
            lambda: type(wheel)(tick=0),
            lambda: type(wheel)(size=1),
        ):
            try:
                call()
            except (TypeError, ValueError):
                continue
            raise AssertionError("a mistake went through")
    entry.cancel()


OPERATIONS = int(os.environ.get("TICKWHEEL_LEAK_OPERATIONS", "1000000"))


class TestLeaks:
    def test_a_million_operations_leak_no_memory(self, core):
        """Count references to the item and blocks of Python's allocator, for each kind of wheel.

        The first part fills every cache and free list; growth in the second part is a leak, and
        one lost block per operation would be thousands. (Under PYTHONMALLOC=malloc only the
        references are counted.)
        """
        total = OPERATIONS if core.native else OPERATIONS // 10
        slack = 100 if core.native else 1_000  # the pure wheel creates a bucket at its first use
        chance = random.Random(1)
        for build in KINDS.values():
            wheel, item = build(core), Item()
            operations(wheel, total // 50, chance)
            mistakes(wheel, 50)
            gc.collect()
            held, before = sys.getrefcount(item), sys.getallocatedblocks()
            operations(wheel, total // len(KINDS), chance, item)
            mistakes(wheel, 200)
            gc.collect()
            assert sys.getrefcount(item) == held
            assert sys.getallocatedblocks() - before < slack
            wheel._check()

    def test_wheels_created_and_dropped_leak_no_memory(self, core):
        def life(build, chance):
            wheel = build(core)
            entries = wheel.schedule_many([chance.randrange(500) for _ in range(50)], range(50))
            entries[7].cancel()
            wheel.advance(100, limit=20)
            wheel.snapshot()

        chance = random.Random(2)
        for build in KINDS.values():
            for _ in range(30):
                life(build, chance)
            gc.collect()
            before = sys.getallocatedblocks()
            for _ in range(400):
                life(build, chance)
            gc.collect()
            assert sys.getallocatedblocks() - before < 100

    def test_traced_memory_returns_to_its_start(self, core):
        """Compare tracemalloc's counts, which include the raw memory of a native module."""
        chance = random.Random(3)
        for build in KINDS.values():
            wheel = build(core)
            operations(wheel, 4_000, chance)
            gc.collect()
            tracemalloc.start()
            try:
                operations(wheel, 2_000, chance)
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
                operations(wheel, 20_000, chance)
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert after - before < 64 * 1024

    def test_reference_counts_return_to_their_start(self, make):
        wheel, item = make(), Item()
        sentinels = [item, None, type(wheel), wheel, 10**12]
        entry = wheel.schedule(450, item)
        entry.cancel()
        del entry
        gc.collect()

        def counts():
            return [sys.getrefcount(sentinel) for sentinel in sentinels]

        before = counts()
        for _ in range(2_000):
            now = wheel.now
            one, two, three = wheel.schedule_many([now, now + 7, now + 450], [item] * 3)
            wheel.schedule(now + 9, item).reschedule(now + 30)
            wheel.schedule(now + 450, None)
            two.cancel()
            wheel.where(three)
            wheel.advance(now + 1, limit=5)
            wheel.cancel_many([one, three])
            wheel.advance(now + 500)
            assert len(wheel) == 0
        del one, two, three
        gc.collect()
        after = counts()
        assert [new - old for new, old in zip(after, before, strict=True)] == pytest.approx(
            [0] * len(sentinels), abs=200
        )

    def test_a_class_is_counted_for_each_of_its_instances(self, core):
        """A type whose reference count drifts with each instance would overflow or be freed."""
        gc.collect()
        for kind in (core.Wheel, core.SimpleWheel, core.RoundsWheel, core.Entry):
            before = sys.getrefcount(kind)
            for _ in range(1_000):
                wheel = core.Wheel() if kind is core.Entry else kind()
                wheel.schedule(5, "a").cancel()
                wheel.schedule(6, "b")
                del wheel
            gc.collect()
            assert abs(sys.getrefcount(kind) - before) <= 5
