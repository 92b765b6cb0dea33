"""Purgatory: checks made inside of operations, and why they cause no deadlock."""

import gc
import threading
import time

import pytest

from purgatory.operations import (
    WHERE,
    Failing,
    Op,
    Then,
    counts,
    join,
    together,
    wait_for,
    watch,
    watch_with,
)
from stage import LONG
from tickwheel import Purgatory


class TestChecksInsideAnOperation:
    def test_a_check_in_a_callback_returns_0_and_runs_after_it(self, purgatory):
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
    def test_a_check_in_any_method_is_deferred_and_not_lost(self, purgatory, clock, where):
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

    def test_a_check_in_an_operation_that_completes_at_once_runs_before_the_call_returns(
        self, purgatory
    ):
        other = watch(purgatory, ["other"])
        other.ready = True
        first = Then(lambda: purgatory.check_and_complete("other"), ready=True)
        assert purgatory.try_complete_else_watch(first, "a")
        assert other.completed

    def test_a_check_in_a_forced_completion_is_deferred_too(self, purgatory):
        other = watch(purgatory, ["other"])
        other.ready = True
        Then(lambda: purgatory.check_and_complete("other")).force_complete()
        assert other.completed

    def test_a_check_of_another_purgatory_is_deferred_too(self, purgatory, timer):
        there = Purgatory("there", timer=timer)
        other = watch(there, ["other"])
        other.ready = True
        op = Then(lambda: there.check_and_complete("other"))
        purgatory.try_complete_else_watch(op, "a")
        op.force_complete()
        assert other.completed

    def test_an_operation_that_checks_its_own_key_does_not_loop_forever(self, purgatory):
        class Own(Op):
            def try_complete(self):
                if self.evaluations < 5:
                    purgatory.check_and_complete("a")
                return super().try_complete()

        op = Own()
        purgatory.try_complete_else_watch(op, "a")
        assert purgatory.check_and_complete("a") == 0
        assert op.evaluations >= 5

    def test_a_chain_of_completions_may_be_long(self, purgatory, timer):
        """Each one completes the next, without recursion."""
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
        assert all(op.calls == ["complete"] for op in ops)
        assert (counts(purgatory), len(timer)) == ((0, 0), 0)

    def test_a_deferred_check_of_an_unhashable_key_raises_at_once(self, purgatory, caplog):
        op = Then(lambda: purgatory.check_and_complete([]))
        purgatory.try_complete_else_watch(op, "a")
        op.ready = True
        assert purgatory.check_and_complete("a") == 1
        assert "unhashable" in caplog.text

    def test_a_deferred_check_of_an_operation_that_raises_affects_no_other(self, purgatory, caplog):
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
    """Threads that could wait for each other forever.

    Without the rules the first test would hang, and so would the one with a user's lock.
    """

    @pytest.mark.parametrize("where", ["try_complete", "on_complete"])
    def test_two_threads_inside_two_operations_check_each_others_keys(self, purgatory, where):
        inside = threading.Barrier(2, timeout=LONG)

        class Crossing(Op):
            crossed = False

            def cross(self):
                if self.ready and not self.crossed:
                    self.crossed = True
                    inside.wait()  # both threads hold the lock of their operation
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
        assert [op.calls for op in (*ops, bystander)] == [["complete"]] * 3
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
            together(forced.force_complete)  # it ends when the timer's thread has the lock, too
            together(lambda: wait_for(lambda: bystander.completed))
            assert expiring.calls[0] == "complete"

    def test_check_later_may_be_called_with_a_lock_that_the_operations_take(self):
        state = threading.Lock()
        inside = threading.Event()
        held = threading.Event()

        class Locking(Op):
            def try_complete(self):
                if self.evaluations == 2:
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

    def test_check_later_runs_on_the_timer(self, purgatory, clock):
        op = watch(purgatory, "a")
        op.ready = True
        purgatory.check_later("a")
        assert not op.completed
        clock.advance(0)
        assert op.calls == ["complete"]

    def test_check_blocks_and_never_skips(self, purgatory):
        """A check waits for another thread's evaluation: its own event may be newer."""
        looking, go_on = threading.Event(), threading.Event()

        class Slow(Op):
            def try_complete(self):
                seen = self.ready
                self.evaluations += 1
                if self.evaluations == 3:
                    looking.set()
                    assert go_on.wait(LONG)
                return seen and self.force_complete()

        op = Slow()
        purgatory.try_complete_else_watch(op, "a")
        first = threading.Thread(target=purgatory.check_and_complete, args="a", daemon=True)
        first.start()
        assert looking.wait(LONG)
        op.ready = True  # the first evaluation has not seen it
        second = threading.Thread(target=purgatory.check_and_complete, args="a", daemon=True)
        second.start()
        go_on.set()
        join([first, second])
        assert op.calls == ["complete"]

    def test_many_threads_that_wait_for_one_operation_enter_one_after_the_other(self, timer):
        """An evaluation that lets other threads run, so that they find the lock held."""
        purgatory = Purgatory("queue", timer=timer)
        inside, most, evaluations = [0], [0], [0]

        class Sleeping(Op):
            def try_complete(self):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                evaluations[0] += 1
                time.sleep(0.0002)
                inside[0] -= 1
                return self.ready and self.force_complete()

        ops = [watch_with(purgatory, Sleeping()) for _ in range(3)]
        before = evaluations[0]
        together(*[lambda: [purgatory.check_and_complete("a") for _ in range(20)]] * 8)
        assert evaluations[0] - before == 8 * 20 * 3
        assert most[0] <= 3  # one per operation
        for op in ops:
            op.ready = True
        won = []
        together(*[lambda: won.append(purgatory.check_and_complete("a"))] * 8)
        assert sum(won) == 3
        assert [op.calls for op in ops] == [["complete"]] * 3

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

    def test_a_destructor_may_cancel_operations_at_any_moment(self, purgatory):
        """The collector may run a destructor in the middle of a change of the lists."""
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
