"""Timer with many threads: no callback is lost or runs twice, and no thread hangs."""

import contextlib
import random
import sys
import threading
import time
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest

from stage import LONG
from tickwheel import NATIVE, ManualClock, Timer, TimerClosed

DEADLOCK_SECONDS = 120.0  # a thread that takes longer counts as hung


@contextlib.contextmanager
def hurried():
    """Let threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(count, work):
    """Run `work(i)` in `count` threads, and raise their errors."""
    errors = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLOCK_SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def until(condition, seconds=LONG):
    """Wait until `condition()` is true; fail after LONG seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def storm(threads, steps, timer):
    """Schedule, cancel and reschedule at random from many threads; return handles and runs."""
    runs, records = Counter(), [[] for _ in range(threads)]

    def ran(key):
        runs[key] += 1  # on the driver's thread only

    def work(i):
        generator, mine = random.Random(i), records[i]
        for step in range(steps):
            choice = generator.random()
            if choice < 0.5 or not mine:
                delay = generator.random() * generator.choice([0.0, 0.002, 0.02, 0.2])
                key = (i, step)
                mine.append([key, timer.call_later(delay, ran, key), 0])
            else:
                victim = generator.choice(records[generator.randrange(threads)] or mine)
                if choice < 0.75:
                    victim[2] += victim[1].cancel()
                else:
                    victim[1].reschedule(generator.random() * 0.05)

    in_threads(threads, work)
    until(lambda: len(timer) == 0, DEADLOCK_SECONDS)
    until(lambda: all(record[1].state != "running" for mine in records for record in mine))
    return runs, [record for mine in records for record in mine]


def ends_exactly_once(threads, steps):
    with hurried(), Timer(tick=0.001) as timer:
        runs, records = storm(threads, steps, timer)
        stats = timer.stats()
    states = Counter(handle.state for _, handle, _ in records)
    assert set(states) <= {"done", "cancelled"}
    for key, handle, _ in records:
        assert runs[key] == (handle.state == "done"), (key, handle, runs[key])
    assert stats["fired"] == states["done"] == sum(runs.values())
    assert stats["cancelled"] == states["cancelled"]
    assert stats["fired"] + stats["cancelled"] == len(records)
    assert stats["pending"] == 0
    # `victim[2] += ...` is not atomic between threads: it can lose a count, never make one up
    assert all(times <= 1 for *_, times in records)
    print(f"{len(records):,} handles: {dict(states)}")


def test_every_handle_ends_once_as_done_or_cancelled_and_the_counts_add_up():
    ends_exactly_once(8, 5_000)


@pytest.mark.soak
def test_every_handle_ends_once_as_done_or_cancelled_100_000_times_in_8_threads():
    ends_exactly_once(8, 100_000)


def test_exactly_one_of_many_concurrent_cancels_returns_true():
    with hurried(), Timer() as timer:
        handles = [timer.call_later(60, int) for _ in range(2_000)]
        answers = [[] for _ in range(4)]
        in_threads(4, lambda i: answers[i].extend(handle.cancel() for handle in handles))
        assert [sum(row) for row in zip(*answers, strict=True)] == [1] * len(handles)
        assert timer.stats()["cancelled"] == len(handles)


def test_a_handle_never_fires_if_cancel_returned_true_and_fires_otherwise():
    with hurried(), Timer(tick=0.0001) as timer:
        fired, cancelled, handles = set(), set(), []
        for i in range(3_000):
            handles.append(timer.call_later(random.random() * 0.003, fired.add, i))
            if i > 20:
                victim = random.randrange(i - 20, i)
                if handles[victim].cancel():
                    cancelled.add(victim)
        until(lambda: len(timer) == 0)
        until(lambda: all(h.state in ("done", "cancelled") for h in handles))
    assert fired.isdisjoint(cancelled)
    assert fired | cancelled == set(range(3_000))


def test_callbacks_and_threads_that_call_everything_do_not_hang():
    with hurried(), Timer(tick=0.0005, on_error=lambda *_: None) as timer:
        handles = [timer.call_later(0.01, int) for _ in range(50)]
        left = [0]

        def anything(depth):
            generator = random.Random(depth)
            left[0] += 1
            handle = generator.choice(handles)
            handle.cancel()
            handle.reschedule(0.001)
            if depth:
                handles[generator.randrange(50)] = timer.call_later(
                    generator.random() * 0.002, anything, depth - 1
                )
            if generator.random() < 0.1:
                raise ValueError

        def work(i):
            for step in range(300):
                timer.call_later(random.random() * 0.002, anything, step % 4)
                timer.stats()
                timer.snapshot()
                len(timer)

        in_threads(6, work)
        until(lambda: len(timer) == 0)
        timer._check()
        assert left[0] > 0
        stats = timer.stats()
        assert stats["pending"] == 0


def test_a_new_earliest_deadline_from_another_thread_is_honoured_while_the_driver_sleeps():
    waits = []
    with Timer() as timer:
        timer.call_later(3_000, int)
        for _ in range(300):
            time.sleep(0.001)  # the driver sleeps by now, for most of an hour
            came = threading.Event()
            due = timer.call_later(
                0.001, lambda came=came: (waits.append(timer.time()), came.set())
            )
            assert came.wait(LONG), "a lost wake-up"
            waits[-1] -= due.when
    waits.sort()
    p99 = waits[int(len(waits) * 0.99)]
    print(f"a new earliest deadline: p50 {waits[150] * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms late")
    assert min(waits) >= 0
    assert p99 < 0.25


def test_no_wake_up_is_lost_when_earlier_deadlines_race_the_start_of_the_drivers_sleep():
    with hurried(), Timer(tick=0.0001) as timer:

        def work(i):
            for _ in range(300):
                came = threading.Event()
                timer.call_later(random.random() * 0.0005, came.set)
                assert came.wait(LONG), "a lost wake-up"

        in_threads(4, work)


def test_the_first_schedules_of_many_threads_start_one_driver():
    def drivers():
        return [thread for thread in threading.enumerate() if thread.name == "tickwheel"]

    for _ in range(20):
        before = drivers()
        with hurried(), Timer() as timer:
            seen, barrier = [], threading.Barrier(8)

            def work(i, timer=timer, seen=seen, barrier=barrier):
                barrier.wait(LONG)
                timer.call_later(0.0001 * i, seen.append, i)

            in_threads(8, work)
            until(lambda seen=seen: len(seen) == 8)
            assert set(drivers()) - set(before) == {timer._thread}
        assert sorted(seen) == list(range(8))


def test_close_while_others_schedule_loses_nothing():
    """Each handle was returned by close, or fired, or was refused: exactly one of these."""
    for _ in range(20):
        with hurried():
            timer, made, fired = Timer(), [[] for _ in range(4)], []

            def work(i, timer=timer, made=made, fired=fired):
                try:
                    while True:
                        made[i].append(timer.call_later(random.random() * 0.01, fired.append, 1))
                except TimerClosed:
                    return

            closed = []
            closer = threading.Timer(0.005, lambda c=closed, t=timer: c.extend(t.close()))
            closer.start()
            in_threads(4, work)
            closer.join(LONG)
        handles = [handle for mine in made for handle in mine]
        states = Counter(handle.state for handle in handles)
        assert states["done"] == len(fired)
        assert states["cancelled"] == len(closed) == len(set(closed))
        assert states["done"] + states["cancelled"] == len(handles)


class RecordingLock:
    """A lock for a driver to sleep on, which records the timeouts."""

    def __init__(self):
        self._lock = threading.Lock()
        self._lock.acquire()
        self.release = self._lock.release
        self.sleeps = []
        self.asleep = threading.Event()

    def acquire(self, timeout):
        self.sleeps.append(timeout)
        self.asleep.set()
        return self._lock.acquire(timeout=timeout)


@pytest.fixture
def starting(monkeypatch):
    """Call `before(thread)` and `after(thread)` around the start of a thread."""
    around = SimpleNamespace(before=id, after=id)

    class Thread(threading.Thread):
        ident = 1  # it is set a moment before the thread can be joined

        def start(self):
            around.before(self)
            super().start()
            around.after(self)

    monkeypatch.setattr(threading, "Thread", Thread)
    return around


def test_a_timer_whose_thread_cannot_start_raises_and_tries_again(starting):
    def fail(_):
        raise RuntimeError("can't start new thread")

    with Timer() as timer:
        starting.before = fail
        with pytest.raises(RuntimeError, match="can't start new thread"):
            timer.call_later(0, int)
        assert len(timer) == 0
        starting.before = id
        came = threading.Event()
        timer.call_later(0, came.set)
        assert came.wait(LONG)


def test_a_timer_closed_in_the_middle_of_a_schedule_is_not_kept_alive(monkeypatch):
    class KeptAlive(set):
        def add(self, timer):
            timer.close()  # as another thread may, just before
            super().add(timer)

    monkeypatch.setattr("tickwheel.timer.kept_alive", KeptAlive())
    timer = Timer()
    handle = timer.call_later(60, int)
    timer._thread.join(LONG)
    watch = weakref.ref(timer)
    assert handle.state == "cancelled"
    del timer, handle
    assert watch() is None


def test_a_timer_closed_before_its_thread_has_started_ends_it(starting):
    timer, closed = Timer(), []
    starting.before = lambda _: closed.extend(timer.close())
    handle = timer.call_later(60, int)
    assert closed == [handle]
    timer._thread.join(LONG)
    assert not timer._thread.is_alive()


@pytest.mark.skipif(not NATIVE, reason="the core in Python holds its lock until the start is over")
def test_a_timer_closed_while_its_thread_sleeps_but_start_has_not_returned_ends_it(starting):
    timer, closed, alive = Timer(), [], []
    timer._wake_lock = lock = RecordingLock()

    def close(thread):
        assert lock.asleep.wait(LONG)
        closed.extend(timer.close())
        alive.append(thread.is_alive())

    starting.after = close
    handle = timer.call_later(60, int)
    assert (closed, alive) == ([handle], [False])


def test_no_sleep_is_longer_than_a_lock_can_wait_on_any_system():
    windows = 4_294_967  # threading.TIMEOUT_MAX there: 49 days
    with Timer() as timer:
        timer._wake_lock = lock = RecordingLock()
        timer.call_later(100 * 24 * 3600, int)
        assert lock.asleep.wait(LONG)
        assert 0 < lock.sleeps[0] < windows


def test_one_of_many_concurrent_closes_gets_the_handles():
    for _ in range(20):
        timer = Timer()
        handles = [timer.call_later(60 + i, int) for i in range(50)]
        got = [None] * 4

        def work(i, timer=timer, got=got):
            got[i] = timer.close()

        in_threads(4, work)
        assert sorted(map(len, got)) == [0, 0, 0, 50]
        assert max(got, key=len) == handles


def test_close_from_a_callback_while_another_thread_closes_does_not_hang():
    for _ in range(50):
        with hurried():
            timer = Timer()
            timer.call_later(0, timer.close)
            timer.close()
            timer._thread.join(LONG)
            assert not timer._thread.is_alive()


def test_call_every_from_many_threads_while_it_closes_leaves_none_pending():
    for _ in range(20):
        with hurried():
            timer, made = Timer(), [[] for _ in range(4)]

            def work(i, timer=timer, made=made):
                try:
                    while True:
                        made[i].append(timer.call_every(60, int))
                except TimerClosed:
                    return

            closed = []
            closer = threading.Timer(0.003, lambda c=closed, t=timer: c.extend(t.close()))
            closer.start()
            in_threads(4, work)
            closer.join(LONG)
        everies = [every for mine in made for every in mine]
        assert {every.state for every in everies} <= {"cancelled"}
        assert set(everies) == set(closed)


def test_threads_on_a_manual_clock_lose_nothing():
    clock, fired = ManualClock(), Counter()
    with hurried(), Timer(clock=clock) as timer:
        over = threading.Event()

        def work(i):
            for step in range(1_000):
                handle = timer.call_later(random.random(), lambda k=(i, step): fired.update([k]))
                if step % 3 == 0:
                    fired.update([(i, step)] * handle.cancel())

        def turn():
            while not over.is_set():
                clock.advance(0.01)

        thread = threading.Thread(target=turn)
        thread.start()
        in_threads(4, work)
        over.set()
        thread.join(LONG)
        clock.advance(2)
        assert len(timer) == 0
    assert len(fired) == 4_000
    assert set(fired.values()) == {1}


@pytest.mark.soak
@pytest.mark.skipif(not NATIVE, reason="in Python they would take 10 GB")
def test_ten_million_pending_handles_are_kept_and_freed():
    with Timer() as timer:
        for i in range(10_000_000):
            timer.call_later(3_000 + i % 1_000_000, int)
        assert len(timer) == 10_000_000
        assert len(timer.close()) == 10_000_000
