"""Purgatory: exact counts, and operations that end exactly once while threads race."""

import random
import threading

import pytest

from purgatory.operations import Op, counts, join, together, wait_for, watch
from stage import LONG
from tickwheel import DelayedOperation, ManualClock, Purgatory, Timer


class Model:
    """A simple model of a purgatory: a list of operations with their keys and deadlines."""

    def __init__(self):
        self.alive = []  # (op, keys, deadline)
        self.ended = {"completed": 0, "expired": 0, "cancelled": 0}

    def stats(self):
        pairs = sum(len(keys) for _, keys, _ in self.alive)
        return {"watched": pairs, "delayed": len(self.alive), **self.ended}

    def drop(self, ops, how):
        self.alive = [one for one in self.alive if one[0] not in ops]
        self.ended[how] += len(ops)

    def on(self, key):
        return [op for op, keys, _ in self.alive if key in keys]

    def advance(self, now):
        due = [op for op, _, deadline in self.alive if deadline <= now]
        self.drop([op for op in due if op.ready], "completed")
        self.drop([op for op in due if not op.ready], "expired")
        return due


class TestExactCounts:
    @pytest.mark.parametrize("seed", range(20))
    def test_the_counts_are_exact_at_every_step_of_a_random_script(self, seed):
        chance = random.Random(seed)
        clock, model = ManualClock(), Model()
        timer = Timer(tick=0.001, clock=clock)
        purgatory = Purgatory("model", timer=timer)
        ops = []
        for _ in range(600):
            step = chance.random()
            if step < 0.4:
                op = Op(chance.randrange(0, 20) * 0.5, ready=chance.random() < 0.1)
                keys = chance.choices(range(8), k=chance.randint(1, 4))
                ops.append(op)
                assert purgatory.try_complete_else_watch(op, keys) == op.ready
                if op.ready:
                    model.ended["completed"] += 1
                else:
                    deadline = clock.time() + op.timeout
                    model.alive.append((op, set(keys), deadline))
            elif step < 0.55 and model.alive:
                chance.choice(model.alive)[0].ready = True
            elif step < 0.75:
                key = chance.randrange(8)
                ready = [op for op in model.on(key) if op.ready]
                assert purgatory.check_and_complete(key) == len(ready)
                model.drop(ready, "completed")
            elif step < 0.8:
                key = chance.randrange(8)
                taken = model.on(key)
                assert purgatory.cancel_for_key(key) == taken
                model.drop(taken, "cancelled")
            elif step < 0.85 and model.alive:
                op = chance.choice(model.alive)[0]
                assert op.force_complete()
                model.drop([op], "completed")
            elif step < 0.88 and ops:
                op = chance.choice(ops)
                alive = any(op is one for one, _, _ in model.alive)
                assert purgatory.cancel(op) == alive
                model.drop([op] * alive, "cancelled")
            else:
                clock.advance(chance.randrange(0, 4) * 0.5)
                model.advance(clock.time())
            purgatory._check()
            assert purgatory.stats() == model.stats()
            assert counts(purgatory) == (model.stats()["watched"], len(model.alive))
            assert len(timer) == len(model.alive)
        clock.advance(100)
        model.advance(clock.time())
        assert purgatory.stats() == model.stats()
        assert counts(purgatory) == (0, 0)
        assert all(op.calls in ([], ["complete"], ["complete", "expired"]) for op in ops)


class Raced(DelayedOperation):
    """An operation that counts its events and its ends."""

    def __init__(self, timeout, needed, ends):
        super().__init__(timeout)
        self.needed = needed
        self.events = 0
        self.last = False
        self.completions = 0
        self.expirations = 0
        self.ends = ends

    def try_complete(self):
        return (self.last or self.events >= self.needed) and self.force_complete()

    def on_complete(self):
        self.completions += 1
        self.ends.append(self)

    def on_expiration(self):
        self.expirations += 1


def race(operations, threads=16):
    """End operations on shared keys by events, deadlines and cancels from all threads."""
    ends, ops = [], [[] for _ in range(threads)]
    cancelled = [[] for _ in range(threads)]
    start = threading.Barrier(threads, timeout=LONG)

    def work(number):
        chance = random.Random(number)
        start.wait()
        mine = ops[number]
        for count in range(operations // threads):
            timeout = chance.choice((0.0, 0.0005, 0.002, 0.01, 60.0, 60.0, 60.0, 60.0))
            op = Raced(timeout, chance.randint(0, 2), ends)
            keys = {chance.randrange(50), chance.randrange(50), ("own", number, count)}
            mine.append(op)
            purgatory.try_complete_else_watch(op, keys)
            other = chance.choice(ops[chance.randrange(threads)] or mine)
            other.events += chance.randint(0, 2)
            purgatory.check_and_complete(chance.randrange(50))
            if chance.random() < 0.05:
                cancelled[number].extend(purgatory.cancel_for_key(chance.randrange(50)))
            if chance.random() < 0.05:
                other.force_complete()
        # The last event of every operation of this thread: after it none may be left.
        for count, op in enumerate(mine):
            op.last = True
            purgatory.check_and_complete(("own", number, count))

    with Purgatory("race") as purgatory:
        together(*(lambda number=number: work(number) for number in range(threads)))
        purgatory._check()
        everything = [op for mine in ops for op in mine]
        # No deadline is needed any more: every operation has had its last event.
        wait_for(lambda: counts(purgatory) == (0, 0))
        pending = len(purgatory._timer)
        taken = [op for some in cancelled for op in some]
        wait_for(lambda: len(ends) + len(taken) == len(everything))
        stats = purgatory.stats()
    assert pending == 0
    assert len(everything) == operations // threads * threads
    gone = set(map(id, taken))
    assert len(gone) == len(taken)
    for op in everything:
        assert op.completions == (id(op) not in gone)
        assert op.completed == (id(op) not in gone)
        assert op.expirations <= op.completions
    assert stats["cancelled"] == len(taken)
    assert stats["expired"] == sum(op.expirations for op in everything)
    # An operation that was forced before it was watched is not counted.
    assert 0.9 * len(everything) < sum(stats.values()) <= len(everything)
    return stats


class TestExactlyOnce:
    def test_16_threads_race_completion_expiry_and_cancel(self, fast_switches):
        stats = race(10_000)
        assert min(stats["completed"], stats["expired"], stats["cancelled"]) > 0

    @pytest.mark.soak
    def test_16_threads_and_a_hundred_thousand_operations(self, fast_switches):
        print(f"\n100,000 operations, 16 threads: {race(100_000)}")

    def test_one_of_many_threads_completes_it(self, timer, fast_switches):
        purgatory = Purgatory("one", timer=timer)
        for _ in range(200):
            op = watch(purgatory, "a")
            won = []
            together(*[lambda op=op, won=won: won.append(op.force_complete())] * 8)
            assert sorted(won) == [False] * 7 + [True]
            assert op.calls == ["complete"]

    def test_an_operation_completed_while_it_is_being_watched_is_on_no_list(
        self, timer, fast_switches
    ):
        purgatory = Purgatory("meanwhile", timer=timer)
        todo, done = threading.Semaphore(0), threading.Semaphore(0)
        ops = [Op() for _ in range(5_000)]

        def complete():
            for op in ops:
                assert todo.acquire(timeout=LONG)
                op.force_complete()
                done.release()

        def add():
            for op in ops:
                todo.release()
                purgatory.try_complete_else_watch(op, "ab")
                assert done.acquire(timeout=LONG)
                assert (counts(purgatory), len(timer)) == ((0, 0), 0)

        together(complete, add)
        assert all(op.calls == ["complete"] for op in ops)

    def test_an_operation_completed_inside_of_watching_is_on_no_list(self, purgatory, timer):
        """The same, at the critical moment: before the ticket is taken."""

        class Forced(Op):
            """Another thread starts to complete it before it is watched, and continues after."""

            def _take_ticket(self):
                begun.set()
                assert go_on.wait(LONG)
                return super()._take_ticket()

        begun, go_on = threading.Event(), threading.Event()
        op = Forced()
        other = threading.Thread(target=op.force_complete, daemon=True)
        other.start()
        assert begun.wait(LONG)
        purgatory.try_complete_else_watch(op, "ab")
        go_on.set()
        join([other])
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_two_threads_cannot_watch_one_operation(self, purgatory, fast_switches):
        for _ in range(100):
            op, refused = Op(), []
            start = threading.Barrier(4, timeout=LONG)

            def add(op=op, refused=refused, start=start):
                start.wait()
                try:
                    purgatory.try_complete_else_watch(op, "ab")
                except ValueError:
                    refused.append(1)

            together(*[add] * 4)
            assert (len(refused), counts(purgatory)) == (3, (2, 1))
            op.force_complete()
            assert counts(purgatory) == (0, 0)
