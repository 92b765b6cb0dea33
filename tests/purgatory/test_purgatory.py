"""Purgatory: watching, checking, expiring, cancelling, closing, and invalid arguments."""

import math
import threading

import pytest

import tickwheel
from purgatory.operations import Op, counts, together, watch
from stage import LONG
from tickwheel import DelayedOperation, Purgatory, TimerClosed


class TestTheVerbs:
    def test_an_operation_whose_condition_holds_completes_at_once(self, purgatory):
        op = Op(ready=True)
        assert purgatory.try_complete_else_watch(op, ["a", "b"]) is True
        assert (op.calls, op.completed, op.evaluations) == (["complete"], True, 1)
        assert purgatory.stats() == {
            "watched": 0, "delayed": 0, "completed": 1, "expired": 0, "cancelled": 0,
        }  # fmt: skip

    def test_another_operation_is_watched_on_each_key_and_in_the_timer(self, purgatory, timer):
        op = watch(purgatory, ["a", "b", "a"])
        assert (op.calls, op.completed, op.evaluations) == (
            [],
            False,
            2,
        )  # before and after watching
        assert counts(purgatory) == (2, 1)
        assert len(timer) == 1

    def test_a_check_of_any_of_its_keys_completes_it(self, purgatory, timer):
        op = watch(purgatory, ["a", "b"])
        assert purgatory.check_and_complete("b") == 0
        op.ready = True
        assert purgatory.check_and_complete("c") == 0
        assert purgatory.check_and_complete("b") == 1
        assert (op.calls, op.completed) == (["complete"], True)
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)
        assert purgatory.check_and_complete("a") == 0

    def test_a_check_returns_the_number_of_completed_operations(self, purgatory):
        ops = [watch(purgatory, ["a", number]) for number in range(10)]
        for op in ops[::2]:
            op.ready = True
        assert purgatory.check_and_complete("a") == 5
        assert purgatory.check_and_complete("a") == 0
        assert counts(purgatory) == (10, 5)

    def test_operations_are_evaluated_in_the_order_of_arrival(self, purgatory):
        story = []
        ops = [watch(purgatory, ["a"], name=number, story=story) for number in range(20)]
        for op in ops:
            op.ready = True
        purgatory.check_and_complete("a")
        assert [name for name, _ in story] == list(range(20))

    def test_force_complete_has_one_winner(self, purgatory, timer):
        op = watch(purgatory, ["a"])
        assert [op.force_complete() for _ in range(3)] == [True, False, False]
        assert op.calls == ["complete"]
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_force_complete_needs_no_purgatory(self):
        op = Op()
        assert op.force_complete()
        assert (op.calls, op.completed) == (["complete"], True)

    def test_an_operation_that_has_completed_is_not_watched(self, purgatory, timer):
        op = Op()
        op.force_complete()
        assert purgatory.try_complete_else_watch(op, ["a"]) is False
        assert (counts(purgatory), len(timer), op.evaluations) == ((0, 0), 0, 0)

    def test_a_condition_that_becomes_true_between_the_evaluations_is_seen_by_the_second(
        self, purgatory, timer
    ):
        class Late(Op):
            def try_complete(self):
                self.ready = self.evaluations == 1
                return super().try_complete()

        op = Late()
        assert purgatory.try_complete_else_watch(op, ["a"]) is True
        assert (op.calls, counts(purgatory), len(timer)) == (["complete"], (0, 0), 0)

    def test_returning_true_without_force_complete_completes_nothing(self, purgatory, clock):
        class Hasty(Op):
            def try_complete(self):
                return True

        op = Hasty(5)
        assert purgatory.try_complete_else_watch(op, ["a"]) is False
        assert purgatory.check_and_complete("a") == 0
        clock.advance(5)
        assert op.calls == ["complete", "expired"]

    def test_an_operation_may_have_many_keys_of_any_hashable_type(self, purgatory):
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
        assert second.calls == ["complete"]

    def test_its_repr_and_stats_show_its_operations(self, purgatory):
        watch(purgatory, "ab")
        assert repr(purgatory) == "<Purgatory 'test' watched=2 delayed=1>"
        assert purgatory.name == "test"


class TestExpiry:
    def test_an_expiry_calls_on_complete_then_on_expiration(self, purgatory, clock, timer):
        op = watch(purgatory, ["a"], timeout=5)
        clock.advance(4.999)
        assert (op.calls, op.evaluations) == ([], 2)
        clock.advance(0.001)
        assert op.calls == ["complete", "expired"]
        assert op.completed
        assert op.evaluations == 3  # the condition once more
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)
        assert purgatory.stats()["expired"] == 1
        assert purgatory.stats()["completed"] == 0

    def test_a_condition_that_is_true_at_the_deadline_completes_the_operation(
        self, purgatory, clock
    ):
        op = watch(purgatory, ["a"], timeout=5)
        op.ready = True  # and no check follows
        clock.advance(5)
        assert op.calls == ["complete"]
        assert purgatory.stats()["completed"] == 1
        assert purgatory.stats()["expired"] == 0

    @pytest.mark.parametrize("timeout", [-1, -1e-6, -1e-10, 0])
    def test_an_operation_whose_deadline_has_passed_expires_at_once(
        self, purgatory, clock, timeout
    ):
        late, ready = Op(timeout), Op(timeout, ready=True)
        assert late.timeout == timeout
        assert purgatory.try_complete_else_watch(late, ["a"]) is False
        assert purgatory.try_complete_else_watch(ready, ["a"]) is True
        clock.advance(0.001)
        assert (late.calls, ready.calls) == (["complete", "expired"], ["complete"])
        assert counts(purgatory) == (0, 0)

    def test_a_timeout_of_zero_expires_at_the_same_moment(self, purgatory, clock):
        op = watch(purgatory, ["a"], timeout=0)
        clock.advance(0)
        assert op.calls == ["complete", "expired"]

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
    def test_cancel_for_key_removes_all_operations_of_a_key_and_completes_none(
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
        assert (both.calls, one.calls, other.calls) == ([], [], ["complete", "expired"])
        assert not both.completed
        assert purgatory.stats()["cancelled"] == 2

    def test_cancel_removes_one_operation(self, purgatory, timer):
        op = watch(purgatory, "ab")
        assert [purgatory.cancel(op) for _ in range(2)] == [True, False]
        assert (counts(purgatory), len(timer), op.calls) == ((0, 0), 0, [])

    def test_a_cancelled_operation_cannot_be_completed(self, purgatory):
        op = watch(purgatory, "a")
        purgatory.cancel(op)
        assert not op.force_complete()
        assert (op.calls, op.completed) == ([], False)

    def test_an_operation_of_another_purgatory_is_not_cancelled(self, purgatory, timer):
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
    def test_close_removes_all_operations_and_returns_them(self, purgatory, timer, clock):
        ops = [watch(purgatory, keys) for keys in ("a", "bc", "abc")]
        assert purgatory.close() == ops
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)
        clock.advance(100)
        assert [op.calls for op in ops] == [[], [], []]
        assert purgatory.close() == []

    def test_close_closes_its_own_timer_and_not_a_shared_one(self, timer, clock):
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

    def test_a_closed_purgatory_refuses_operations(self, purgatory, timer):
        purgatory.close()
        op = Op()
        with pytest.raises(TimerClosed, match="'test' is closed"):
            purgatory.try_complete_else_watch(op, "a")
        assert (op.evaluations, counts(purgatory), len(timer)) == (0, (0, 0), 0)
        assert purgatory.check_and_complete("a") == 0
        assert purgatory.cancel_for_key("a") == []

    def test_a_purgatory_that_is_closed_between_the_evaluations_refuses_the_operation(
        self, purgatory, timer
    ):
        class Closing(Op):
            def try_complete(self):
                if not self.evaluations:
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

    def test_closing_while_threads_add_leaves_no_operation(self, timer, fast_switches):
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
        assert (op.evaluations, op.completed) == (0, False)

    def test_a_key_must_be_hashable_and_keys_iterable(self, purgatory):
        for keys in ([["a"]], 7, None):
            with pytest.raises(TypeError):
                purgatory.try_complete_else_watch(Op(), keys)
        with pytest.raises(TypeError):
            purgatory.check_and_complete([])
        with pytest.raises(TypeError):
            purgatory.cancel_for_key([])
        assert counts(purgatory) == (0, 0)

    def test_an_operation_that_watches_itself_while_it_is_evaluated_is_refused(self, purgatory):
        class Selfish(Op):
            def try_complete(self):
                if not self.evaluations:
                    super().try_complete()
                    purgatory.try_complete_else_watch(self, "b")
                return super().try_complete()

        with pytest.raises(ValueError, match="already watched"):
            purgatory.try_complete_else_watch(Selfish(), "a")
        purgatory._check()
        assert counts(purgatory) == (0, 0)

    def test_an_operation_is_watched_once_at_a_time(self, purgatory, timer):
        op = watch(purgatory, "a")
        for other in (purgatory, Purgatory("other", timer=timer)):
            with pytest.raises(ValueError, match="already watched"):
                other.try_complete_else_watch(op, "b")
        assert counts(purgatory) == (1, 1)

    @pytest.mark.parametrize("timeout", [math.inf, math.nan, 1e10])
    def test_a_timeout_is_finite(self, timeout):
        with pytest.raises(tickwheel.OutOfRange, match="timeout must be a finite number"):
            Op(timeout)

    @pytest.mark.parametrize("timeout", ["1", None, True, [1]])
    def test_a_timeout_is_a_number(self, timeout):
        with pytest.raises(TypeError, match="timeout must be a number of seconds"):
            Op(timeout)

    @pytest.mark.parametrize("thing", [None, 7, object(), DelayedOperation])
    def test_a_value_that_is_not_an_operation_is_refused(self, purgatory, thing):
        for call in (
            lambda: purgatory.try_complete_else_watch(thing, "a"),
            lambda: purgatory.cancel(thing),
        ):
            with pytest.raises(TypeError, match="operation must be a DelayedOperation"):
                call()

    def test_an_operation_without_init_is_refused(self, purgatory):
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

    def test_a_watched_operation_cannot_be_initialized_again(self, purgatory):
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

    def test_an_operation_without_try_complete_raises(self, purgatory):
        with pytest.raises(NotImplementedError, match="must override try_complete"):
            purgatory.try_complete_else_watch(DelayedOperation(1), "a")
        assert counts(purgatory) == (0, 0)
