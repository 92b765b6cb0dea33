"""Purgatory: operations, keys and timers that raise, compare equal, interrupt or are foreign."""

import abc
import dataclasses
import gc
import logging
import math
import random
import signal
import threading
import time
import weakref

import pytest

import tickwheel
from purgatory.operations import (
    WHERE,
    Failing,
    Op,
    Then,
    counts,
    join,
    together,
    watch,
    watch_with,
)
from stage import LONG
from tickwheel import DelayedOperation, Purgatory


class TestOperationsThatRaise:
    @pytest.mark.parametrize("after", [0, 1])
    def test_an_error_in_the_call_that_watches_is_raised_and_nothing_is_watched(
        self, purgatory, timer, after
    ):
        op = Failing("try_complete", after=after)
        with pytest.raises(RuntimeError, match="no condition"):
            purgatory.try_complete_else_watch(op, "ab")
        assert (counts(purgatory), len(timer), op.completed) == ((0, 0), 0, False)

    @pytest.mark.parametrize("where", WHERE)
    def test_an_error_in_a_check_is_logged_and_affects_no_other(self, purgatory, caplog, where):
        ops = [Op(), Failing(where), Op()]
        for op in ops:
            assert not purgatory.try_complete_else_watch(op, "a")
        for op in ops:
            op.ready = True
        with caplog.at_level(logging.ERROR, "tickwheel"):
            done = purgatory.check_and_complete("a")
        failed = where != "on_expiration"
        assert done == (2 if where == "try_complete" else 3)
        assert ops[0].completed
        assert ops[2].completed
        assert len(caplog.records) == failed
        if failed:
            assert caplog.records[0].name == "tickwheel"
            assert caplog.records[0].getMessage().startswith(f"{where} of ")
            assert caplog.records[0].exc_info

    @pytest.mark.parametrize("where", WHERE)
    def test_an_error_at_the_deadline_is_logged_and_the_other_methods_run(
        self, purgatory, timer, clock, caplog, where
    ):
        ops = [Op(5), Failing(where, 5), Op(5)]
        for op in ops:
            assert not purgatory.try_complete_else_watch(op, "a")
        with caplog.at_level(logging.ERROR, "tickwheel"):
            clock.advance(5)
        assert [op.calls for op in ops] == [["complete", "expired"]] * 3
        assert [record.getMessage().split(" of ")[0] for record in caplog.records] == [where]
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_an_operation_that_completes_at_once_and_then_raises_is_completed(
        self, purgatory, caplog
    ):
        op = Failing("on_complete", ready=True)
        assert purgatory.try_complete_else_watch(op, "a")
        assert (op.completed, len(caplog.records)) == (True, 1)

    def test_force_complete_does_not_raise_what_on_complete_raises(self, purgatory, caplog):
        op = Failing("on_complete")
        purgatory.try_complete_else_watch(op, "a")
        assert op.force_complete()
        assert (counts(purgatory), len(caplog.records)) == ((0, 0), 1)

    def test_an_operation_that_raises_releases_its_lock(self, purgatory, caplog):
        op = Failing("try_complete")
        purgatory.try_complete_else_watch(op, "a")
        purgatory.check_and_complete("a")
        op.where = None
        op.ready = True
        together(lambda: purgatory.check_and_complete("a"))
        assert op.completed


@dataclasses.dataclass
class Equal(DelayedOperation):
    """All instances are equal, and none has a hash."""

    name: str = ""

    def __post_init__(self):
        super().__init__(10)

    def try_complete(self):
        return False


class TestOperationsAreThemselves:
    def test_one_with_slots(self, purgatory, clock):
        class Slotted(DelayedOperation):
            __slots__ = ("ready",)

            def __init__(self, timeout):
                self.ready = False  # before its __init__
                super().__init__(timeout)

            def try_complete(self):
                return self.ready and self.force_complete()

        one, two = Slotted(5), Slotted(5)
        for op in (one, two):
            assert not purgatory.try_complete_else_watch(op, "a")
        one.ready = True
        assert purgatory.check_and_complete("a") == 1
        clock.advance(5)
        assert (one.completed, two.completed, counts(purgatory)) == (True, True, (0, 0))

    def test_an_abstract_one_is_not_made(self):
        class Abstract(DelayedOperation, abc.ABC):
            @abc.abstractmethod
            def size(self):
                """A field of the instance."""

        with pytest.raises(TypeError, match="abstract"):
            Abstract(5)

    @pytest.mark.parametrize("how", ["set", "class", "property", "slot"])
    def test_its_timeout_is_an_attribute_like_any_other(self, purgatory, clock, how):
        class Classed(Op):
            timeout = 7

        class Computed(Op):
            @property
            def timeout(self):
                return 3

            @timeout.setter
            def timeout(self, value):
                self.given = value

        class Slotted(Op):
            __slots__ = ("timeout",)

        kind = {"set": Op, "class": Classed, "property": Computed, "slot": Slotted}[how]
        op = kind(5)
        assert op.timeout == (3 if how == "property" else 5)
        if how == "set":
            op.timeout = 3
        purgatory.try_complete_else_watch(op, "a")
        clock.advance(2.999)
        assert not op.completed
        clock.advance(0.001 if how in ("set", "property") else 2.001)
        assert op.calls == ["complete", "expired"]

    def test_an_invalid_timeout_attribute_raises_when_it_is_watched(self, purgatory, timer):
        for timeout, error in (
            (None, TypeError),
            (math.inf, tickwheel.OutOfRange),
        ):
            op = Op()
            op.timeout = timeout
            with pytest.raises(error, match="delay must be"):
                purgatory.try_complete_else_watch(op, "ab")
            assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_an_operation_that_has_ended_in_one_purgatory_is_not_watched_in_another(
        self, purgatory, timer
    ):
        other = Purgatory("other", timer=timer)
        completed, cancelled = watch(purgatory, "a"), watch(purgatory, "a")
        completed.force_complete()
        purgatory.cancel(cancelled)
        for op in (completed, cancelled):
            assert other.try_complete_else_watch(op, "a") is False
            assert not other.cancel(op)
        assert (counts(other), len(timer)) == ((0, 0), 0)

    def test_an_ended_operation_that_is_initialized_again_may_be_watched_anywhere(
        self, purgatory, timer
    ):
        other = Purgatory("other", timer=timer)
        op = watch(purgatory, "ab")
        op.force_complete()
        op.__init__(5)
        assert not op.completed
        assert not other.try_complete_else_watch(op, "c")
        assert (counts(purgatory), counts(other)) == ((0, 0), (1, 1))
        assert op.force_complete()

    def test_a_method_of_the_instance_counts(self, purgatory, clock):
        op, seen = Op(5), []
        op.on_expiration = lambda: seen.append("mine")
        op.try_complete = lambda: seen.append("look")
        purgatory.try_complete_else_watch(op, "a")
        clock.advance(5)
        assert seen == ["look", "look", "look", "mine"]

    def test_the_timers_warning_names_a_slow_operation(self, purgatory, clock, caplog):
        class Dawdling(Op):
            def on_expiration(self):
                time.sleep(0.11)

        purgatory.try_complete_else_watch(Dawdling(1), "a")
        clock.advance(1)
        (record,) = caplog.records
        assert "Dawdling" in record.getMessage()

    def test_operations_that_are_equal_are_still_two(self, purgatory, timer):
        one, two = Equal(), Equal()
        assert one == two
        for op in (one, two):
            assert not purgatory.try_complete_else_watch(op, "ab")
        assert counts(purgatory) == (4, 2)
        assert one.force_complete()
        assert (counts(purgatory), len(timer)) == ((2, 1), 1)
        (left,) = purgatory.cancel_for_key("a")
        assert left is two
        assert counts(purgatory) == (0, 0)


class Interrupting(Op):
    """An operation that is interrupted in one of its methods, after the second evaluation."""

    def __init__(self, where, **options):
        super().__init__(**options)
        self.where = where

    def interrupt(self, where):
        if self.where == where:
            self.where = None
            raise KeyboardInterrupt

    def try_complete(self):
        if self.evaluations >= 2:
            self.interrupt("try_complete")
        return super().try_complete()

    def on_complete(self):
        super().on_complete()
        self.interrupt("on_complete")


class TestInterrupts:
    @pytest.mark.parametrize("where", ["try_complete", "on_complete"])
    def test_an_interrupt_is_raised_by_the_check_and_leaves_the_lists_consistent(
        self, purgatory, timer, where
    ):
        op, other = Interrupting(where), Op()
        for one in (op, other):
            purgatory.try_complete_else_watch(one, "ab")
            one.ready = True
        with pytest.raises(KeyboardInterrupt):
            purgatory.check_and_complete("a")
        assert not other.completed
        assert op.completed == (where == "on_complete")
        purgatory._check()
        together(lambda: purgatory.check_and_complete("b"))  # the lock is free
        assert (op.calls, other.calls) == (["complete"], ["complete"])
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_the_remaining_checks_run_before_an_interrupt_is_raised(self, purgatory):
        interrupted = watch_with(purgatory, Interrupting("try_complete"), ["one"])
        last = watch_with(purgatory, Op(), ["two"])
        interrupted.ready = last.ready = True
        first = Then(lambda: [purgatory.check_and_complete(key) for key in ("one", "two")])
        with pytest.raises(KeyboardInterrupt):
            first.force_complete()
        assert (first.completed, last.completed, interrupted.completed) == (True, True, False)
        assert purgatory.check_and_complete("one") == 1

    def test_a_second_interrupt_has_the_first_as_its_context(self, purgatory):
        class Both(Op):
            def on_complete(self):
                purgatory.check_and_complete("one")
                raise SystemExit

        interrupted = watch_with(purgatory, Interrupting("try_complete"), ["one"])
        interrupted.ready = True
        with pytest.raises(KeyboardInterrupt) as caught:
            Both().force_complete()
        assert isinstance(caught.value.__context__, SystemExit)

    @pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no signal by a timer here")
    def test_a_thread_that_waits_for_an_operation_can_be_interrupted(self, purgatory):
        inside, go_on = threading.Event(), threading.Event()

        class Slow(Op):
            def try_complete(self):
                if self.evaluations == 2:
                    self.evaluations += 1
                    inside.set()
                    assert go_on.wait(LONG)
                return super().try_complete()

        def interrupt(*_):
            raise KeyboardInterrupt

        op = watch_with(purgatory, Slow())
        holder = threading.Thread(target=purgatory.check_and_complete, args="a", daemon=True)
        holder.start()
        assert inside.wait(LONG)
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(KeyboardInterrupt):
                purgatory.check_and_complete("a")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            go_on.set()
            join([holder])
        op.ready = True
        assert purgatory.check_and_complete("a") == 1  # not deferred: no operation runs


class OddKey:
    """A key that runs code, or fails, when it is compared; all have the same hash."""

    def __init__(self, name, then=lambda: None):
        self.name = name
        self.then = then

    def __eq__(self, other):
        self.then()
        return self.name == getattr(other, "name", None)

    def __hash__(self):
        return 7


class OddScript:
    """Random steps, with nested ones wherever two keys are compared."""

    def __init__(self, purgatory, seed):
        self.purgatory = purgatory
        self.chance = random.Random(seed)
        self.ops = []
        self.depth = 0

    def key(self):
        chance = self.chance
        return (
            OddKey(chance.randrange(6), self.inside) if chance.random() < 0.5 else chance.random()
        )

    def inside(self):
        if self.depth < 3 and self.chance.random() < 0.3:
            self.depth += 1
            self.step()
            self.depth -= 1

    def step(self):
        what = self.chance.random()
        if what < 0.5 or not self.ops:
            keys = [self.key() for _ in range(self.chance.randint(1, 4))]
            self.ops.append(Op(self.chance.random() * 100))
            self.purgatory.try_complete_else_watch(self.ops[-1], keys)
            return
        op = self.chance.choice(self.ops)
        if what < 0.6:
            op.ready = True
        elif what < 0.75:
            self.purgatory.check_and_complete(self.key())
        elif what < 0.8:
            self.purgatory.cancel_for_key(self.key())
        elif what < 0.9:
            op.force_complete()
        else:
            self.purgatory.cancel(op)


changed_at_once = pytest.mark.skipif(
    not tickwheel.NATIVE, reason="the lists in Python are changed key by key, under a lock"
)


class TestOddKeys:
    def test_equal_keys_are_the_same_key(self, purgatory):
        op = watch(purgatory, [OddKey("a"), OddKey("b"), OddKey("a")])
        assert purgatory.watched == 2
        assert purgatory.check_and_complete(OddKey("c")) == 0
        op.ready = True
        assert purgatory.check_and_complete(OddKey("b")) == 1
        purgatory._check()

    @changed_at_once
    def test_a_key_that_fails_in_a_comparison_leaves_nothing_watched(self, purgatory, timer):
        def fail():
            if failing:
                raise RuntimeError("no comparison")

        failing = []
        there = watch(purgatory, [OddKey("a", fail)])
        failing.append(1)
        with pytest.raises(RuntimeError, match="no comparison"):
            purgatory.try_complete_else_watch(Op(), ["c", "d", OddKey("b"), "e"])
        for call in (purgatory.check_and_complete, purgatory.cancel_for_key):
            with pytest.raises(RuntimeError, match="no comparison"):
                call(OddKey("b"))
        purgatory._check()
        assert (counts(purgatory), len(timer)) == ((1, 1), 1)
        assert purgatory.check_and_complete("c") == 0
        assert there.force_complete()

    def test_a_key_that_cannot_be_hashed_raises_before_anything_changes(self, purgatory):
        class Unhashable:
            def __hash__(self):
                raise RuntimeError("no hash")

        op = Op(ready=True)
        with pytest.raises(RuntimeError, match="no hash"):
            purgatory.try_complete_else_watch(op, ["a", Unhashable()])
        assert (op.evaluations, op.completed) == (0, False)

    @changed_at_once
    @pytest.mark.parametrize("seed", range(10))
    def test_comparing_keys_may_call_any_method(self, timer, seed):
        purgatory = Purgatory("odd", timer=timer)
        script = OddScript(purgatory, seed)
        for _ in range(400):
            script.step()
            purgatory._check()
        purgatory.close()
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)
        assert purgatory._lists == {}
        assert all(op.calls in ([], ["complete"]) for op in script.ops)

    def test_many_keys_and_many_operations_of_one(self, purgatory):
        ops = [
            watch(purgatory, [("own", number, n) for n in range(100)] + ["all"])
            for number in range(100)
        ]
        assert counts(purgatory) == (100 * 101, 100)
        purgatory._check()
        for op in ops[::3]:
            op.ready = True
        assert purgatory.check_and_complete("all") == 34
        purgatory._check()
        assert purgatory.cancel_for_key(("own", 1, 99)) == [ops[1]]
        assert purgatory.cancel_for_key("all") == [op for op in ops[2:] if not op.completed]
        assert counts(purgatory) == (0, 0)
        assert purgatory._lists == {}


class ForeignHandle:
    def __init__(self, callback, *, broken=False):
        self.callback = callback
        self.broken = broken
        self.cancels = 0

    def cancel(self):
        self.cancels += 1
        if self.broken:
            raise RuntimeError("cannot be cancelled")


class ForeignTimer:
    """A foreign timer: it has `call_later` and nothing else, not even a length."""

    def __init__(self, *, broken=False):
        self.handles = []
        self.broken = broken

    def __len__(self):
        return 0

    def call_later(self, delay, callback, *args):
        self.handles.append(ForeignHandle(lambda: callback(*args), broken=self.broken))
        return self.handles[-1]


class TestForeignTimers:
    def test_any_timer_will_do(self):
        timer = ForeignTimer()
        purgatory = Purgatory("foreign", timer=timer)
        one, two = watch(purgatory, "a"), watch(purgatory, "a")
        one.force_complete()
        assert [handle.cancels for handle in timer.handles] == [1, 0]
        timer.handles[1].callback()
        assert two.calls == ["complete", "expired"]
        purgatory.check_later("a")
        timer.handles[2].callback()
        assert counts(purgatory) == (0, 0)

    def test_an_error_in_cancelling_a_handle_reaches_the_caller(self):
        purgatory = Purgatory("foreign", timer=ForeignTimer(broken=True))
        op = watch(purgatory, "ab")
        with pytest.raises(RuntimeError, match="cannot be cancelled"):
            op.force_complete()
        assert (op.completed, counts(purgatory)) == (True, (0, 0))
        purgatory._check()

    def test_an_operation_in_a_foreign_timer_is_collected_with_it(self):
        timer = ForeignTimer()
        purgatory = Purgatory("foreign", timer=timer)
        gone = [weakref.ref(watch(purgatory, "a")), weakref.ref(purgatory), weakref.ref(timer)]
        del timer, purgatory
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3
