"""Purgatory: ended operations, their keys and whole purgatories are freed."""

import gc
import logging
import resource
import sys
import weakref
from pathlib import Path

import pytest

from purgatory.operations import Failing, Op, counts, watch, watch_with
from tickwheel import ManualClock, Purgatory, Timer


def resident():
    """Return the resident memory of this process, in bytes."""
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
    def test_an_ended_operation_is_freed_at_once(self, purgatory, clock, how):
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

    def test_the_keys_of_an_ended_operation_are_freed_at_once(self, purgatory):
        class Key:
            """A key that can be weakly referenced."""

        key = Key()
        gone = weakref.ref(key)
        op = watch(purgatory, [key])
        del key
        assert gone() is not None
        op.force_complete()
        assert gone() is None

    def test_an_operation_that_raises_in_the_first_call_is_freed(self, purgatory):
        op = Failing("try_complete", after=1)
        gone = weakref.ref(op)
        with pytest.raises(RuntimeError) as caught:
            purgatory.try_complete_else_watch(op, "a")
        del op, caught
        gc.collect()
        assert gone() is None

    def test_ten_thousand_operations_on_keys_without_further_checks(self, purgatory, timer):
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
    def test_a_million_operations_on_keys_without_further_checks(self):
        def complete(many):
            for number in range(many):
                op = Op(3600)
                purgatory.try_complete_else_watch(op, [("a", number % 1000), ("b", number)])
                op.force_complete()

        with Purgatory("quiet") as purgatory:
            complete(50_000)  # kept by the allocator
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
            """A key that refers to the operation watched on it."""

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

    def test_a_destructor_in_a_cycle_may_use_its_purgatory(self):
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

    def test_reference_counts_are_the_same_as_before(self, purgatory, timer, clock):
        class Key:
            """An object whose references are counted."""

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
