"""The purgatory for threads: exactly once, none left behind, nothing kept, nobody stopped."""

import abc
import dataclasses
import gc
import logging
import math
import random
import resource
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

import tickwheel
from stage import LONG
from tickwheel import DelayedOperation, ManualClock, Purgatory, Timer, TimerClosed


class Op(DelayedOperation):
    """An operation that is complete when `ready`, and tells what happens to it."""

    def __init__(self, timeout=10.0, *, ready=False, name="op", story=None):
        super().__init__(timeout)
        self.ready = ready
        self.name = name
        self.looks = 0
        self.story = [] if story is None else story

    def try_complete(self):
        self.looks += 1
        return self.ready and self.force_complete()

    def on_complete(self):
        self.story.append((self.name, "complete"))

    def on_expiration(self):
        self.story.append((self.name, "expired"))

    @property
    def told(self):
        return [what for name, what in self.story if name == self.name]


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def timer(clock):
    with Timer(clock=clock) as timer:
        yield timer


@pytest.fixture
def purgatory(timer):
    return Purgatory("test", timer=timer)


def watch(purgatory, keys, **options):
    """An operation that is watched on `keys`."""
    op = Op(**options)
    assert purgatory.try_complete_else_watch(op, keys) is False
    return op


def counts(purgatory):
    return purgatory.watched, purgatory.delayed


def join(threads):
    """Wait for `threads`; one that does not end is a failure, not a hang."""
    for thread in threads:
        thread.join(LONG)
    assert not [thread for thread in threads if thread.is_alive()], "they wait for each other"


def together(*functions):
    """Run each on a thread of its own, a daemon, so that a deadlock does not outlive the test."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    join(threads)


@pytest.fixture
def fast_switches():
    """Threads that change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class TestTheVerbs:
    def test_an_operation_whose_condition_holds_completes_at_once(self, purgatory):
        op = Op(ready=True)
        assert purgatory.try_complete_else_watch(op, ["a", "b"]) is True
        assert (op.told, op.completed, op.looks) == (["complete"], True, 1)
        assert purgatory.stats() == {
            "watched": 0, "delayed": 0, "completed": 1, "expired": 0, "cancelled": 0,
        }  # fmt: skip

    def test_otherwise_it_is_watched_on_each_key_and_in_the_timer(self, purgatory, timer):
        op = watch(purgatory, ["a", "b", "a"])
        assert (op.told, op.completed, op.looks) == ([], False, 2)  # looked at, watched, looked at
        assert counts(purgatory) == (2, 1)
        assert len(timer) == 1

    def test_a_check_of_any_of_its_keys_completes_it(self, purgatory, timer):
        op = watch(purgatory, ["a", "b"])
        assert purgatory.check_and_complete("b") == 0
        op.ready = True
        assert purgatory.check_and_complete("c") == 0
        assert purgatory.check_and_complete("b") == 1
        assert (op.told, op.completed) == (["complete"], True)
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)
        assert purgatory.check_and_complete("a") == 0

    def test_a_check_says_how_many_it_completed(self, purgatory):
        ops = [watch(purgatory, ["a", number]) for number in range(10)]
        for op in ops[::2]:
            op.ready = True
        assert purgatory.check_and_complete("a") == 5
        assert purgatory.check_and_complete("a") == 0
        assert counts(purgatory) == (10, 5)

    def test_they_are_looked_at_in_the_order_in_which_they_came(self, purgatory):
        story = []
        ops = [watch(purgatory, ["a"], name=number, story=story) for number in range(20)]
        for op in ops:
            op.ready = True
        purgatory.check_and_complete("a")
        assert [name for name, _ in story] == list(range(20))

    def test_force_complete_has_one_winner(self, purgatory, timer):
        op = watch(purgatory, ["a"])
        assert [op.force_complete() for _ in range(3)] == [True, False, False]
        assert op.told == ["complete"]
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_force_complete_needs_no_purgatory(self):
        op = Op()
        assert op.force_complete()
        assert (op.told, op.completed) == (["complete"], True)

    def test_an_operation_that_has_completed_is_not_watched(self, purgatory, timer):
        op = Op()
        op.force_complete()
        assert purgatory.try_complete_else_watch(op, ["a"]) is False
        assert (counts(purgatory), len(timer), op.looks) == ((0, 0), 0, 0)

    def test_a_condition_that_comes_true_between_the_looks_is_seen_by_the_second(
        self, purgatory, timer
    ):
        class Late(Op):
            def try_complete(self):
                self.ready = self.looks == 1
                return super().try_complete()

        op = Late()
        assert purgatory.try_complete_else_watch(op, ["a"]) is True
        assert (op.told, counts(purgatory), len(timer)) == (["complete"], (0, 0), 0)

    def test_true_without_force_complete_completes_nothing(self, purgatory, clock):
        class Hasty(Op):
            def try_complete(self):
                return True

        op = Hasty(5)
        assert purgatory.try_complete_else_watch(op, ["a"]) is False
        assert purgatory.check_and_complete("a") == 0
        clock.advance(5)
        assert op.told == ["complete", "expired"]

    def test_the_same_operation_may_wait_for_many_keys_and_any_hashable_is_one(self, purgatory):
        keys = [None, 0, "", (), frozenset(), ("topic", 3), object, 1.5]
        op = watch(purgatory, iter(keys))
        assert purgatory.watched == len(keys)
        op.ready = True
        assert purgatory.check_and_complete(frozenset()) == 1

    def test_two_purgatories_share_a_timer_and_know_nothing_of_each_other(self, timer, clock):
        one, two = Purgatory("one", timer=timer), Purgatory("two", timer=timer)
        first, second = watch(one, ["a"], ready=False), watch(two, ["a"])
        first.ready = second.ready = True
        assert one.check_and_complete("a") == 1
        assert (first.completed, second.completed) == (True, False)
        assert (counts(one), counts(two), len(timer)) == ((0, 0), (1, 1), 1)
        clock.advance(10)
        assert second.told == ["complete"]

    def test_it_says_what_it_holds(self, purgatory):
        watch(purgatory, "ab")
        assert repr(purgatory) == "<Purgatory 'test' watched=2 delayed=1>"
        assert purgatory.name == "test"


class TestExpiry:
    def test_the_timeout_answer_is_on_complete_then_on_expiration(self, purgatory, clock, timer):
        op = watch(purgatory, ["a"], timeout=5)
        clock.advance(4.999)
        assert (op.told, op.looks) == ([], 2)
        clock.advance(0.001)
        assert op.told == ["complete", "expired"]
        assert op.completed
        assert op.looks == 3  # the condition once more
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)
        assert purgatory.stats()["expired"] == 1
        assert purgatory.stats()["completed"] == 0

    def test_a_condition_that_holds_at_the_deadline_is_the_normal_answer(self, purgatory, clock):
        op = watch(purgatory, ["a"], timeout=5)
        op.ready = True  # and nobody says so
        clock.advance(5)
        assert op.told == ["complete"]
        assert purgatory.stats()["completed"] == 1
        assert purgatory.stats()["expired"] == 0

    def test_a_timeout_of_zero_expires_at_the_same_moment(self, purgatory, clock):
        op = watch(purgatory, ["a"], timeout=0)
        clock.advance(0)
        assert op.told == ["complete", "expired"]

    def test_each_expires_at_its_own_time(self, purgatory, clock):
        class Stamped(Op):
            def on_expiration(self):
                self.at = clock.time()

        ops = [Stamped(timeout) for timeout in (0.5, 3, 1, 100, 0.001)]
        for op in ops:
            purgatory.try_complete_else_watch(op, ["a"])
        clock.advance(200)
        assert [op.at for op in ops] == [0.5, 3, 1, 100, 0.001]

    def test_at_the_deadline_the_counts_are_down_before_the_callbacks(self, purgatory, clock):
        seen = []

        class Looking(Op):
            def on_complete(self):
                seen.append((counts(purgatory), self.completed))

            on_expiration = on_complete

        purgatory.try_complete_else_watch(Looking(1), ["a", "b"])
        clock.advance(1)
        assert seen == [((0, 0), True)] * 2

    def test_on_a_real_timer_it_expires_by_itself(self):
        expired = threading.Event()

        class Real(Op):
            def on_expiration(self):
                expired.set()

        with Purgatory("real") as purgatory:
            purgatory.try_complete_else_watch(Real(0.02), ["a"])
            assert expired.wait(LONG)
            assert counts(purgatory) == (0, 0)


class TestCancel:
    def test_cancel_for_key_takes_off_all_of_a_key_and_completes_none(
        self, purgatory, timer, clock
    ):
        both, one = watch(purgatory, "ab"), watch(purgatory, "a")
        other = watch(purgatory, "b")
        assert purgatory.cancel_for_key("a") == [both, one]
        assert (counts(purgatory), len(timer)) == ((1, 1), 1)
        assert purgatory.cancel_for_key("a") == []
        both.ready = one.ready = True
        assert purgatory.check_and_complete("b") == 0
        clock.advance(100)
        assert (both.told, one.told, other.told) == ([], [], ["complete", "expired"])
        assert not both.completed
        assert purgatory.stats()["cancelled"] == 2

    def test_cancel_takes_off_one(self, purgatory, timer):
        op = watch(purgatory, "ab")
        assert [purgatory.cancel(op) for _ in range(2)] == [True, False]
        assert (counts(purgatory), len(timer), op.told) == ((0, 0), 0, [])

    def test_a_cancelled_operation_cannot_be_completed(self, purgatory):
        op = watch(purgatory, "a")
        purgatory.cancel(op)
        assert not op.force_complete()
        assert (op.told, op.completed) == ([], False)

    def test_an_operation_of_another_purgatory_is_left_alone(self, purgatory, timer):
        other = Purgatory("other", timer=timer)
        op = watch(other, "a")
        assert not purgatory.cancel(op)
        assert not purgatory.cancel(Op())
        assert counts(other) == (1, 1)

    def test_a_completed_operation_is_not_cancelled(self, purgatory):
        op = watch(purgatory, "a")
        op.force_complete()
        assert not purgatory.cancel(op)
        assert purgatory.stats()["cancelled"] == 0


class TestClose:
    def test_it_takes_every_operation_off_and_returns_it(self, purgatory, timer, clock):
        ops = [watch(purgatory, keys) for keys in ("a", "bc", "abc")]
        assert purgatory.close() == ops
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)
        clock.advance(100)
        assert [op.told for op in ops] == [[], [], []]
        assert purgatory.close() == []

    def test_a_given_timer_goes_on_and_an_own_one_ends(self, timer, clock):
        seen = []
        with Purgatory("shared", timer=timer):
            timer.call_later(1, seen.append, 1)
        clock.advance(1)
        assert seen == [1]
        with Purgatory("own") as purgatory:
            watch(purgatory, "a")
            own = purgatory._timer
        with pytest.raises(TimerClosed):
            own.call_later(1, seen.append, 2)

    def test_a_closed_one_takes_no_more(self, purgatory, timer):
        purgatory.close()
        op = Op()
        with pytest.raises(TimerClosed, match="'test' is closed"):
            purgatory.try_complete_else_watch(op, "a")
        assert (op.looks, counts(purgatory), len(timer)) == (0, (0, 0), 0)
        assert purgatory.check_and_complete("a") == 0
        assert purgatory.cancel_for_key("a") == []

    def test_one_that_is_closed_between_the_looks_takes_no_more_either(self, purgatory, timer):
        class Closing(Op):
            def try_complete(self):
                if not self.looks:
                    purgatory.close()
                return super().try_complete()

        op = Closing()
        with pytest.raises(TimerClosed):
            purgatory.try_complete_else_watch(op, "a")
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_a_shared_timer_that_was_closed_first_leaves_nothing_watched(self, timer):
        purgatory = Purgatory("late", timer=timer)
        timer.close()
        with pytest.raises(TimerClosed):
            purgatory.try_complete_else_watch(Op(), "ab")
        assert counts(purgatory) == (0, 0)

    def test_a_callback_may_close_it(self, purgatory, clock):
        class Closing(Op):
            def on_expiration(self):
                self.closed = purgatory.close()

        first, other = Closing(1), Op(2)
        purgatory.try_complete_else_watch(first, "a")
        purgatory.try_complete_else_watch(other, "a")
        clock.advance(5)
        assert first.closed == [other]
        assert counts(purgatory) == (0, 0)

    def test_closing_while_threads_add_leaves_none_behind(self, timer, fast_switches):
        for _ in range(20):
            purgatory = Purgatory("closing", timer=timer)
            ready = threading.Barrier(5, timeout=LONG)
            ended = []

            def add(purgatory=purgatory, ready=ready):
                ready.wait()
                try:
                    for number in range(100):
                        purgatory.try_complete_else_watch(Op(), [number % 3])
                except TimerClosed:
                    pass

            def close(purgatory=purgatory, ready=ready, ended=ended):
                ready.wait()
                ended.extend(purgatory.close())

            together(add, add, add, add, close)
            assert (counts(purgatory), len(timer)) == ((0, 0), 0)
            assert len(set(ended)) == len(ended)


class TestBadInput:
    @pytest.mark.parametrize("keys", [[], (), "", iter([]), {}])
    def test_no_keys_is_an_error(self, purgatory, keys):
        op = Op(ready=True)
        with pytest.raises(ValueError, match="keys must not be empty"):
            purgatory.try_complete_else_watch(op, keys)
        assert (op.looks, op.completed) == (0, False)

    def test_a_key_must_be_hashable_and_keys_iterable(self, purgatory):
        for keys in ([["a"]], 7, None):
            with pytest.raises(TypeError):
                purgatory.try_complete_else_watch(Op(), keys)
        with pytest.raises(TypeError):
            purgatory.check_and_complete([])
        with pytest.raises(TypeError):
            purgatory.cancel_for_key([])
        assert counts(purgatory) == (0, 0)

    def test_an_operation_is_watched_once_at_a_time(self, purgatory, timer):
        op = watch(purgatory, "a")
        for other in (purgatory, Purgatory("other", timer=timer)):
            with pytest.raises(ValueError, match="already watched"):
                other.try_complete_else_watch(op, "b")
        assert counts(purgatory) == (1, 1)

    @pytest.mark.parametrize("timeout", [-1, -0.001])
    def test_a_timeout_is_not_negative(self, timeout):
        with pytest.raises(ValueError, match="timeout must be 0 or more seconds"):
            Op(timeout)

    @pytest.mark.parametrize("timeout", [math.inf, math.nan, 1e10])
    def test_a_timeout_is_finite(self, timeout):
        with pytest.raises(tickwheel.OutOfRange, match="timeout must be a finite number"):
            Op(timeout)

    @pytest.mark.parametrize("timeout", ["1", None, True, [1]])
    def test_a_timeout_is_a_number(self, timeout):
        with pytest.raises(TypeError, match="timeout must be a number of seconds"):
            Op(timeout)

    @pytest.mark.parametrize("thing", [None, 7, object(), DelayedOperation])
    def test_what_is_no_operation_is_refused(self, purgatory, thing):
        for call in (
            lambda: purgatory.try_complete_else_watch(thing, "a"),
            lambda: purgatory.cancel(thing),
        ):
            with pytest.raises(TypeError, match="operation must be a DelayedOperation"):
                call()

    def test_an_operation_that_was_not_made_is_refused(self, purgatory):
        class Unmade(Op):
            def __init__(self):
                self.name = "without super().__init__()"

        op = Unmade()
        for call in (
            lambda: purgatory.try_complete_else_watch(op, "a"),
            lambda: purgatory.cancel(op),
            lambda: op.completed,
            op.force_complete,
        ):
            with pytest.raises(AttributeError):
                call()
        assert counts(purgatory) == (0, 0)

    def test_an_operation_that_is_watched_is_not_made_anew(self, purgatory):
        op = watch(purgatory, "ab")
        with pytest.raises(ValueError, match="already watched"):
            DelayedOperation.__init__(op, 5)
        assert counts(purgatory) == (2, 1)
        assert op.force_complete()

    def test_an_argument_may_be_named(self, purgatory):
        op = Op(timeout=3)
        assert not purgatory.try_complete_else_watch(keys="a", operation=op)
        assert purgatory.check_and_complete(key="a") == 0
        assert purgatory.cancel(operation=op)
        for call in (
            lambda: purgatory.check_and_complete(),
            lambda: purgatory.check_and_complete("a", "b"),
            lambda: purgatory.check_and_complete(lock="a"),
            lambda: purgatory.try_complete_else_watch(op),
            lambda: purgatory.cancel(),
            lambda: DelayedOperation(),
            lambda: DelayedOperation(1, 2),
        ):
            with pytest.raises(TypeError):
                call()

    def test_an_operation_without_a_condition_says_so(self, purgatory):
        with pytest.raises(NotImplementedError, match="DelayedOperation does not say"):
            purgatory.try_complete_else_watch(DelayedOperation(1), "a")
        assert counts(purgatory) == (0, 0)


class Failing(Op):
    """An operation that raises in one of its methods, from one look on."""

    def __init__(self, where, timeout=10.0, *, after=2, **options):
        super().__init__(timeout, **options)
        self.where = where
        self.after = after

    def try_complete(self):
        if self.where == "try_complete" and self.looks >= self.after:
            self.looks += 1
            raise RuntimeError("no condition")
        return super().try_complete()

    def on_complete(self):
        super().on_complete()
        if self.where == "on_complete":
            raise RuntimeError("no completion")

    def on_expiration(self):
        super().on_expiration()
        if self.where == "on_expiration":
            raise RuntimeError("no expiration")


WHERE = ["try_complete", "on_complete", "on_expiration"]


class TestOperationsThatRaise:
    @pytest.mark.parametrize("after", [0, 1])
    def test_in_the_call_that_watches_it_comes_back_and_nothing_stays(
        self, purgatory, timer, after
    ):
        op = Failing("try_complete", after=after)
        with pytest.raises(RuntimeError, match="no condition"):
            purgatory.try_complete_else_watch(op, "ab")
        assert (counts(purgatory), len(timer), op.completed) == ((0, 0), 0, False)

    @pytest.mark.parametrize("where", WHERE)
    def test_in_a_check_it_is_logged_and_stops_no_other(self, purgatory, caplog, where):
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
    def test_at_the_deadline_it_is_logged_and_the_rest_of_the_answer_is_given(
        self, purgatory, timer, clock, caplog, where
    ):
        ops = [Op(5), Failing(where, 5), Op(5)]
        for op in ops:
            assert not purgatory.try_complete_else_watch(op, "a")
        with caplog.at_level(logging.ERROR, "tickwheel"):
            clock.advance(5)
        assert [op.told for op in ops] == [["complete", "expired"]] * 3
        assert [record.getMessage().split(" of ")[0] for record in caplog.records] == [where]
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_one_that_completes_at_once_and_raises_then_is_complete(self, purgatory, caplog):
        op = Failing("on_complete", ready=True)
        assert purgatory.try_complete_else_watch(op, "a")
        assert (op.completed, len(caplog.records)) == (True, 1)

    def test_force_complete_does_not_raise_what_on_complete_raises(self, purgatory, caplog):
        op = Failing("on_complete")
        purgatory.try_complete_else_watch(op, "a")
        assert op.force_complete()
        assert (counts(purgatory), len(caplog.records)) == ((0, 0), 1)

    def test_the_lock_of_one_that_raises_is_free(self, purgatory, caplog):
        op = Failing("try_complete")
        purgatory.try_complete_else_watch(op, "a")
        purgatory.check_and_complete("a")
        op.where = None
        op.ready = True
        together(lambda: purgatory.check_and_complete("a"))
        assert op.completed


@dataclasses.dataclass
class Equal(DelayedOperation):
    """All of them are equal, and none has a hash."""

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
                self.ready = False  # before it is made
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
                """How much it needs."""

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
        assert op.told == ["complete", "expired"]

    def test_a_timeout_that_was_set_wrong_is_told_when_it_is_watched(self, purgatory, timer):
        for timeout, error in (
            (None, TypeError),
            (math.inf, tickwheel.OutOfRange),
        ):
            op = Op()
            op.timeout = timeout
            with pytest.raises(error, match="delay must be"):
                purgatory.try_complete_else_watch(op, "ab")
            assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_one_that_has_ended_in_one_purgatory_is_not_watched_in_another(self, purgatory, timer):
        other = Purgatory("other", timer=timer)
        completed, cancelled = watch(purgatory, "a"), watch(purgatory, "a")
        completed.force_complete()
        purgatory.cancel(cancelled)
        for op in (completed, cancelled):
            assert other.try_complete_else_watch(op, "a") is False
            assert not other.cancel(op)
        assert (counts(other), len(timer)) == ((0, 0), 0)

    def test_one_that_has_ended_and_is_made_anew_may_be_watched_anywhere(self, purgatory, timer):
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

    def test_a_slow_one_is_named_in_the_timers_warning(self, purgatory, clock, caplog):
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
    """An operation that is interrupted in one of its methods, from the third look on."""

    def __init__(self, where, **options):
        super().__init__(**options)
        self.where = where

    def interrupt(self, where):
        if self.where == where:
            self.where = None
            raise KeyboardInterrupt

    def try_complete(self):
        if self.looks >= 2:
            self.interrupt("try_complete")
        return super().try_complete()

    def on_complete(self):
        super().on_complete()
        self.interrupt("on_complete")


class TestInterrupts:
    @pytest.mark.parametrize("where", ["try_complete", "on_complete"])
    def test_one_comes_out_of_the_check_and_leaves_all_whole(self, purgatory, timer, where):
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
        assert (op.told, other.told) == (["complete"], ["complete"])
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_the_checks_behind_it_have_their_turn_first(self, purgatory):
        interrupted = watch_with(purgatory, Interrupting("try_complete"), ["one"])
        last = watch_with(purgatory, Op(), ["two"])
        interrupted.ready = last.ready = True
        first = Then(lambda: [purgatory.check_and_complete(key) for key in ("one", "two")])
        with pytest.raises(KeyboardInterrupt):
            first.force_complete()
        assert (first.completed, last.completed, interrupted.completed) == (True, True, False)
        assert purgatory.check_and_complete("one") == 1

    def test_one_that_meets_another_is_its_context(self, purgatory):
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
                if self.looks == 2:
                    self.looks += 1
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
        assert purgatory.check_and_complete("a") == 1  # and not put off: nothing is under way here


class OddKey:
    """A key that does something, or fails, when it is compared; all of them have one hash."""

    def __init__(self, name, then=lambda: None):
        self.name = name
        self.then = then

    def __eq__(self, other):
        self.then()
        return self.name == getattr(other, "name", None)

    def __hash__(self):
        return 7


class OddScript:
    """Random steps, with more of them inside wherever two keys are compared."""

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
    def test_equal_keys_are_one(self, purgatory):
        op = watch(purgatory, [OddKey("a"), OddKey("b"), OddKey("a")])
        assert purgatory.watched == 2
        assert purgatory.check_and_complete(OddKey("c")) == 0
        op.ready = True
        assert purgatory.check_and_complete(OddKey("b")) == 1
        purgatory._check()

    @changed_at_once
    def test_one_that_cannot_be_compared_leaves_nothing_watched(self, purgatory, timer):
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

    def test_one_that_cannot_be_hashed_is_told_before_anything_is_done(self, purgatory):
        class Unhashable:
            def __hash__(self):
                raise RuntimeError("no hash")

        op = Op(ready=True)
        with pytest.raises(RuntimeError, match="no hash"):
            purgatory.try_complete_else_watch(op, ["a", Unhashable()])
        assert (op.looks, op.completed) == (0, False)

    @changed_at_once
    @pytest.mark.parametrize("seed", range(10))
    def test_comparing_may_do_whatever_a_user_may(self, timer, seed):
        purgatory = Purgatory("odd", timer=timer)
        script = OddScript(purgatory, seed)
        for _ in range(400):
            script.step()
            purgatory._check()
        purgatory.close()
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)
        assert purgatory._lists == {}
        assert all(op.told in ([], ["complete"]) for op in script.ops)

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
    """Somebody else's timer: it has `call_later`, and nothing else; and it has no length."""

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
        assert two.told == ["complete", "expired"]
        purgatory.check_later("a")
        timer.handles[2].callback()
        assert counts(purgatory) == (0, 0)

    def test_one_whose_handles_cannot_be_cancelled_is_heard_of(self):
        purgatory = Purgatory("foreign", timer=ForeignTimer(broken=True))
        op = watch(purgatory, "ab")
        with pytest.raises(RuntimeError, match="cannot be cancelled"):
            op.force_complete()
        assert (op.completed, counts(purgatory)) == (True, (0, 0))
        purgatory._check()

    def test_an_operation_in_one_is_collected_with_it(self):
        timer = ForeignTimer()
        purgatory = Purgatory("foreign", timer=timer)
        gone = [weakref.ref(watch(purgatory, "a")), weakref.ref(purgatory), weakref.ref(timer)]
        del timer, purgatory
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3


class Then(Op):
    """An operation that does something when it completes."""

    def __init__(self, then, **options):
        super().__init__(**options)
        self.then = then

    def on_complete(self):
        super().on_complete()
        self.then()


class TestChecksInsideAnOperation:
    def test_a_check_in_a_callback_answers_0_and_comes_after_it(self, purgatory):
        story, answers = [], []
        second = watch(purgatory, "b", name="second", story=story)

        def then():
            second.ready = True
            answers.append(purgatory.check_and_complete("b"))
            story.append(("first", "over"))

        first = Then(then, name="first", story=story)
        purgatory.try_complete_else_watch(first, "a")
        first.ready = True
        assert purgatory.check_and_complete("a") == 1
        assert answers == [0]
        assert story == [("first", "complete"), ("first", "over"), ("second", "complete")]

    @pytest.mark.parametrize("where", WHERE)
    def test_wherever_it_is_made_it_is_put_off_and_not_lost(self, purgatory, clock, where):
        other = watch(purgatory, ["other"], timeout=1000)

        class Checking(Op):
            def check(self):
                if not other.completed:
                    other.ready = True
                    assert purgatory.check_and_complete("other") == 0
                    assert not other.completed

            def try_complete(self):
                if where == "try_complete":
                    self.check()
                return super().try_complete()

            def on_complete(self):
                if where == "on_complete":
                    self.check()

            def on_expiration(self):
                if where == "on_expiration":
                    self.check()

        assert not purgatory.try_complete_else_watch(Checking(5), "a")
        assert other.completed == (where == "try_complete")
        clock.advance(5)
        assert other.completed

    def test_in_one_that_completes_at_once_it_comes_before_the_call_returns(self, purgatory):
        other = watch(purgatory, ["other"])
        other.ready = True
        first = Then(lambda: purgatory.check_and_complete("other"), ready=True)
        assert purgatory.try_complete_else_watch(first, "a")
        assert other.completed

    def test_in_one_that_is_forced_too(self, purgatory):
        other = watch(purgatory, ["other"])
        other.ready = True
        Then(lambda: purgatory.check_and_complete("other")).force_complete()
        assert other.completed

    def test_in_one_of_another_purgatory_too(self, purgatory, timer):
        there = Purgatory("there", timer=timer)
        other = watch(there, ["other"])
        other.ready = True
        op = Then(lambda: there.check_and_complete("other"))
        purgatory.try_complete_else_watch(op, "a")
        op.force_complete()
        assert other.completed

    def test_an_operation_that_checks_its_own_key_is_no_endless_loop(self, purgatory):
        class Own(Op):
            def try_complete(self):
                if self.looks < 5:
                    purgatory.check_and_complete("a")
                return super().try_complete()

        op = Own()
        purgatory.try_complete_else_watch(op, "a")
        assert purgatory.check_and_complete("a") == 0
        assert op.looks >= 5

    def test_a_chain_of_completions_may_be_long(self, purgatory, timer):
        """Each completes the next one: that must not go deeper and deeper."""
        length = 5_000
        ops = []

        def following(number):
            def then():
                if number + 1 < length:
                    ops[number + 1].ready = True
                    purgatory.check_and_complete(number + 1)

            return then

        ops.extend(Then(following(number)) for number in range(length))
        for number, op in enumerate(ops):
            purgatory.try_complete_else_watch(op, [number])
        ops[0].ready = True
        assert purgatory.check_and_complete(0) == 1
        assert all(op.told == ["complete"] for op in ops)
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_a_check_of_what_is_no_key_is_refused_where_it_is_made(self, purgatory, caplog):
        op = Then(lambda: purgatory.check_and_complete([]))
        purgatory.try_complete_else_watch(op, "a")
        op.ready = True
        assert purgatory.check_and_complete("a") == 1
        assert "unhashable" in caplog.text

    def test_a_put_off_check_that_meets_one_that_raises_stops_no_other(self, purgatory, caplog):
        failing, last = Failing("try_complete"), Op()
        purgatory.try_complete_else_watch(failing, "b")
        purgatory.try_complete_else_watch(last, "c")
        last.ready = True
        Then(lambda: [purgatory.check_and_complete(key) for key in "bc"]).force_complete()
        assert last.completed
        assert len(caplog.records) == 1

    def test_an_operation_may_watch_another_from_its_callback(self, purgatory, clock):
        retries = []

        class Retry(Op):
            def on_expiration(self):
                if len(retries) < 3:
                    retries.append(Retry(1))
                    purgatory.try_complete_else_watch(retries[-1], "a")

        purgatory.try_complete_else_watch(Retry(1), "a")
        clock.advance(10)
        assert len(retries) == 3
        assert all(op.completed for op in retries)
        assert counts(purgatory) == (0, 0)


class TestDeadlocks:
    """What could wait for another for ever.

    Without the rules the first hangs in `try_complete`, and the one with a lock of the user's.
    """

    @pytest.mark.parametrize("where", ["try_complete", "on_complete"])
    def test_two_threads_inside_two_operations_check_each_others_keys(self, purgatory, where):
        inside = threading.Barrier(2, timeout=LONG)

        class Crossing(Op):
            crossed = False

            def cross(self):
                if self.ready and not self.crossed:
                    self.crossed = True
                    inside.wait()  # both threads are inside, each with its operation's lock
                    assert purgatory.check_and_complete("b" if self.name == "a" else "a") == 0

            def try_complete(self):
                if where == "try_complete":
                    self.cross()
                return super().try_complete()

            def on_complete(self):
                super().on_complete()
                if where == "on_complete":
                    self.cross()

        ops = [watch_with(purgatory, Crossing(name=name), [name]) for name in "ab"]
        bystander = watch(purgatory, "ab")
        for op in (*ops, bystander):
            op.ready = True
        together(*(lambda name=name: purgatory.check_and_complete(name) for name in "ab"))
        assert [op.told for op in (*ops, bystander)] == [["complete"]] * 3
        assert counts(purgatory) == (0, 0)

    def test_an_expiry_and_a_completion_check_each_others_keys(self):
        inside = threading.Barrier(2, timeout=LONG)

        class Crossing(Op):
            def on_complete(self):
                super().on_complete()
                inside.wait()
                purgatory.check_and_complete("b" if self.name == "a" else "a")

        with Purgatory("real") as purgatory:
            expiring, forced = Crossing(0.01, name="a"), Crossing(LONG, name="b")
            bystander = Op(LONG)
            for op, keys in ((expiring, "a"), (forced, "b"), (bystander, "ab")):
                purgatory.try_complete_else_watch(op, keys)
            bystander.ready = True
            together(forced.force_complete)  # it ends when the timer's thread is inside, too
            together(lambda: wait_for(lambda: bystander.completed))
            assert expiring.told[0] == "complete"

    def test_check_later_may_be_called_with_a_lock_that_the_operations_take(self):
        state = threading.Lock()
        inside = threading.Event()
        held = threading.Event()

        class Locking(Op):
            def try_complete(self):
                if self.looks == 2:
                    inside.set()
                    assert held.wait(LONG)  # the other thread has the lock now
                with state:
                    return super().try_complete()

        with Purgatory("real") as purgatory:
            op = watch_with(purgatory, Locking(3600))

            def holder():
                assert inside.wait(LONG)
                with state:
                    held.set()
                    op.ready = True
                    purgatory.check_later("a")  # check_and_complete would wait for the operation

            together(lambda: purgatory.check_and_complete("a"), holder)
            wait_for(lambda: op.completed)
            assert counts(purgatory) == (0, 0)

    def test_check_later_is_left_to_the_timer(self, purgatory, clock):
        op = watch(purgatory, "a")
        op.ready = True
        purgatory.check_later("a")
        assert not op.completed
        clock.advance(0)
        assert op.told == ["complete"]

    def test_check_blocks_and_never_skips(self, purgatory):
        """A check that finds another thread looking waits: its event may be the newer one."""
        looking, go_on = threading.Event(), threading.Event()

        class Slow(Op):
            def try_complete(self):
                seen = self.ready
                self.looks += 1
                if self.looks == 3:
                    looking.set()
                    assert go_on.wait(LONG)
                return seen and self.force_complete()

        op = Slow()
        purgatory.try_complete_else_watch(op, "a")
        first = threading.Thread(target=purgatory.check_and_complete, args="a", daemon=True)
        first.start()
        assert looking.wait(LONG)
        op.ready = True  # the first look has not seen it
        second = threading.Thread(target=purgatory.check_and_complete, args="a", daemon=True)
        second.start()
        go_on.set()
        join([first, second])
        assert op.told == ["complete"]

    def test_many_that_wait_for_one_operation_come_in_one_after_the_other(self, timer):
        """A look lets other threads run in the middle, so that they meet a lock that is held."""
        purgatory = Purgatory("queue", timer=timer)
        inside, most, looks = [0], [0], [0]

        class Sleeping(Op):
            def try_complete(self):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                looks[0] += 1
                time.sleep(0.0002)
                inside[0] -= 1
                return self.ready and self.force_complete()

        ops = [watch_with(purgatory, Sleeping()) for _ in range(3)]
        before = looks[0]
        together(*[lambda: [purgatory.check_and_complete("a") for _ in range(20)]] * 8)
        assert looks[0] - before == 8 * 20 * 3
        assert most[0] <= 3  # one per operation
        for op in ops:
            op.ready = True
        won = []
        together(*[lambda: won.append(purgatory.check_and_complete("a"))] * 8)
        assert sum(won) == 3
        assert [op.told for op in ops] == [["complete"]] * 3

    def test_try_complete_never_runs_twice_at_a_time(self, timer, fast_switches):
        purgatory = Purgatory("busy", timer=timer)
        inside, most = [0], [0]

        class Counting(Op):
            def try_complete(self):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                for _ in range(20):
                    pass
                inside[0] -= 1
                return False

        purgatory.try_complete_else_watch(Counting(), "a")
        together(*[lambda: [purgatory.check_and_complete("a") for _ in range(500)]] * 8)
        assert most == [1]

    def test_a_destructor_may_cancel_whatever_is_being_done(self, purgatory):
        """The collector may run it in the middle of a change of the lists."""
        ops = [watch(purgatory, "a") for _ in range(50)]

        class Cycle:
            def __init__(self, op):
                self.op = op
                self.self = self

            def __del__(self):
                purgatory.cancel(self.op)
                purgatory.check_and_complete("a")

        def churn():
            for op in ops:
                Cycle(op)
                for number in range(30):
                    watch(purgatory, ["a", ("b", number)]).force_complete()

        before = gc.get_threshold()
        gc.set_threshold(5)
        try:
            together(churn)
        finally:
            gc.set_threshold(*before)
        gc.collect()
        assert counts(purgatory) == (0, 0)


def watch_with(purgatory, op, keys="a"):
    assert purgatory.try_complete_else_watch(op, keys) is False
    return op


def wait_for(condition):
    """Wait for what another thread will do."""
    pause = threading.Event()
    for _ in range(int(LONG / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("it never came")


class Model:
    """What a purgatory is, said slowly: operations, their keys and their deadlines, in a list."""

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
    def test_at_every_step_of_a_random_script(self, seed):
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
        assert all(op.told in ([], ["complete"], ["complete", "expired"]) for op in ops)


class Raced(DelayedOperation):
    """Counts its events, and how it ended."""

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
    """Operations on shared keys, ended by events, deadlines and cancels from all threads."""
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
        # The last event of every operation that I made: after it none of them may be left.
        for count, op in enumerate(mine):
            op.last = True
            purgatory.check_and_complete(("own", number, count))

    with Purgatory("race") as purgatory:
        together(*(lambda number=number: work(number) for number in range(threads)))
        purgatory._check()
        everything = [op for mine in ops for op in mine]
        # No deadline is needed any more: what had its last event has ended by it.
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
    # One that was forced before it was watched is not in the purgatory's books.
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
            assert op.told == ["complete"]

    def test_one_that_is_completed_while_it_is_being_watched_stays_nowhere(
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
        assert all(op.told == ["complete"] for op in ops)

    def test_one_completed_in_the_middle_of_being_watched_stays_nowhere(self, purgatory, timer):
        """The same, at the one moment that matters: before the ticket is taken."""

        class Forced(Op):
            """Another thread has begun to complete it before it is watched, and goes on after."""

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


def resident():
    """Memory of this process now, in bytes."""
    pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    return int(pages) * resource.getpagesize()


class TestNothingIsKept:
    @pytest.fixture(autouse=True)
    def collector(self, young_heap):
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize("how", ["check", "force", "expire", "cancel", "cancel_for_key"])
    def test_an_operation_that_has_ended_is_let_go_of_at_once(self, purgatory, clock, how):
        op = watch(purgatory, ["quiet", "quieter"])
        watched = weakref.ref(op)
        if how == "check":
            op.ready = True
            purgatory.check_and_complete("quiet")
        elif how == "force":
            op.force_complete()
        elif how == "cancel":
            purgatory.cancel(op)
        elif how == "cancel_for_key":
            purgatory.cancel_for_key("quiet")
        else:
            clock.advance(10)
        del op
        assert watched() is None

    def test_so_are_its_keys(self, purgatory):
        class Key:
            """A key that can be watched as it goes."""

        key = Key()
        gone = weakref.ref(key)
        op = watch(purgatory, [key])
        del key
        assert gone() is not None
        op.force_complete()
        assert gone() is None

    def test_one_that_raises_in_the_first_call_is_let_go_of(self, purgatory):
        op = Failing("try_complete", after=1)
        gone = weakref.ref(op)
        with pytest.raises(RuntimeError) as caught:
            purgatory.try_complete_else_watch(op, "a")
        del op, caught
        gc.collect()
        assert gone() is None

    def test_ten_thousand_on_keys_that_see_no_further_event(self, purgatory, timer):
        gone = []
        for number in range(10_000):
            op = Op(60)
            purgatory.try_complete_else_watch(op, [("quiet", number), ("quiet", number + 1)])
            gone.append(weakref.ref(op))
            op.force_complete()
        del op
        assert not any(ref() for ref in gone)
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)
        assert purgatory._lists == {}

    @pytest.mark.soak
    def test_a_million_on_keys_that_see_no_further_event(self):
        def complete(many):
            for number in range(many):
                op = Op(3600)
                purgatory.try_complete_else_watch(op, [("a", number % 1000), ("b", number)])
                op.force_complete()

        with Purgatory("quiet") as purgatory:
            complete(50_000)  # what the allocator keeps for itself
            gc.collect()
            before = resident()
            complete(1_000_000)
            gc.collect()
            more = resident() - before
            assert counts(purgatory) == (0, 0)
        print(f"\n1,000,000 completed operations: {more / 1e6:+.1f} MB resident")
        assert more < 8_000_000

    @pytest.mark.soak
    def test_a_million_pending_at_once_then_completed(self):
        with Purgatory("full") as purgatory:
            before = resident()
            ops = [Op(3600) for _ in range(1_000_000)]
            for number, op in enumerate(ops):
                purgatory.try_complete_else_watch(op, [number])
            full = resident() - before
            gone = [weakref.ref(op) for op in ops[::1000]]
            for number, op in enumerate(ops):
                op.ready = True
                assert purgatory.check_and_complete(number) == 1
            ops.clear()
            del op
            assert not any(ref() for ref in gone)
            assert counts(purgatory) == (0, 0)
            back = resident() - before
        print(f"\n1,000,000 pending: {full / 1e6:.0f} MB; all completed: {back / 1e6:.0f} MB")
        assert back < full / 4

    @pytest.mark.parametrize("closed", [False, True])
    def test_cycles_through_operations_keys_and_timers_are_collected(self, closed):
        class Key:
            """A key that refers to what is watched on it."""

        clock = ManualClock()
        timer = Timer(clock=clock)
        purgatory = Purgatory("cycle", timer=timer)
        gone = [weakref.ref(purgatory), weakref.ref(timer)]
        for number in range(20):
            key, op = Key(), Op(60)
            op.purgatory, op.timer, op.key, key.op = purgatory, timer, key, op
            purgatory.try_complete_else_watch(op, [key, number % 3, *range(number)])
            if number % 5 == 0:
                op.force_complete()
            gone += [weakref.ref(op), weakref.ref(key)]
        if closed:
            purgatory.close()
            timer.close()
        del purgatory, timer, clock, key, op
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)

    def test_a_destructor_in_a_cycle_may_use_what_goes_with_it(self):
        story = []

        class Dying(Op):
            def __del__(self):
                story.append((self.purgatory.cancel(self), self.purgatory.check_and_complete("a")))
                story.append((self.force_complete(), counts(self.purgatory)))

        timer = Timer(clock=ManualClock())
        purgatory = Purgatory("dying", timer=timer)
        for _ in range(3):
            op = watch_with(purgatory, Dying(60))
            op.purgatory = purgatory
        del op, purgatory, timer
        gc.collect()
        assert story == [
            (True, 0), (False, (2, 2)), (True, 0), (False, (1, 1)), (True, 0), (False, (0, 0)),
        ]  # fmt: skip

    def test_nothing_refers_to_them_more_than_before(self, purgatory, timer, clock):
        class Key:
            """Something whose references are counted."""

        keys = [Key() for _ in range(5)]
        things = [purgatory, timer, Op, Op.try_complete, *keys]

        def everything():
            for number in range(300):
                op = Failing("on_complete" if number % 7 == 0 else "", 5 + number % 5, after=9)
                purgatory.try_complete_else_watch(op, [*keys[: 1 + number % 5], ("own", number)])
                how = number % 6
                op.ready = how == 0
                if how == 0:
                    purgatory.check_and_complete(keys[0])
                elif how == 1:
                    op.force_complete()
                elif how == 2:
                    purgatory.cancel(op)
                elif how == 3:
                    purgatory.cancel_for_key(("own", number))
                elif how == 4:
                    with pytest.raises(ValueError, match="already watched"):
                        purgatory.try_complete_else_watch(op, "z")
            clock.advance(100)
            del op

        logging.disable()
        try:
            everything()
            gc.collect()
            before = [sys.getrefcount(thing) for thing in things], len(gc.get_objects())
            for _ in range(3):
                everything()
            gc.collect()
            after = [sys.getrefcount(thing) for thing in things], len(gc.get_objects())
        finally:
            logging.disable(logging.NOTSET)
        for thing, was, now in zip(things, before[0], after[0], strict=True):
            assert abs(now - was) < 5, thing
        assert after[1] - before[1] < 50
        assert counts(purgatory) == (0, 0)

    def test_a_purgatory_in_a_cycle_is_collected(self, timer):
        purgatory = Purgatory("cycle", timer=timer)
        op = Op(60)
        op.purgatory = purgatory
        purgatory.try_complete_else_watch(op, [purgatory])
        gone = weakref.ref(purgatory)
        purgatory.close()
        del op, purgatory
        gc.collect()
        assert gone() is None
