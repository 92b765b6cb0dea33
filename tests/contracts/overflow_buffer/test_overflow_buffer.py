"""The contract of an overflow buffer, by hand and on a wheel, and after a restart."""

import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest

from contracts.overflow_buffer.places import CLASSES, DURABLE, on_cores
from stage import LONG
from tickwheel import OverflowBuffer, Wheel

END_OF_TIME = 2**63 - 1


def put_all(buffer, made):
    for entry in made:
        buffer.put(entry)


class TestByHand:
    def test_it_takes_what_expires_before_and_keeps_the_rest(self, buffer, entries):
        made = entries(30, 10, 20, 10)
        put_all(buffer, made)
        assert len(buffer) == 4
        assert buffer.next_expiry() == 10
        assert list(buffer.take(10)) == []
        assert list(buffer.take(20)) == [made[1], made[3]]
        assert len(buffer) == 2
        assert buffer.next_expiry() == 20
        assert list(buffer.take(2**63)) == [made[2], made[0]]
        assert len(buffer) == 0
        assert buffer.next_expiry() is None
        assert list(buffer.take(2**63)) == []

    def test_it_takes_nothing_before_the_beginning(self, buffer, entries):
        put_all(buffer, made := entries(0, 1))
        assert list(buffer.take(0)) == []
        assert list(buffer.take(1)) == made[:1]

    def test_a_discarded_entry_is_gone(self, buffer, entries):
        first, second, third = entries(10, 10, 5)
        put_all(buffer, (first, second, third))
        buffer.discard(third)
        assert buffer.next_expiry() == 10
        buffer.discard(first)
        assert len(buffer) == 1
        assert list(buffer.take(11)) == [second]

    def test_an_unknown_entry_is_discarded_in_silence(self, buffer, entries):
        known, unknown = entries(10, 10)
        buffer.put(known)
        buffer.discard(unknown)
        buffer.discard(*entries(99))
        assert len(buffer) == 1
        buffer.discard(known)
        buffer.discard(known)
        assert len(buffer) == 0

    def test_put_twice_is_put_once(self, buffer, entries):
        (entry,) = entries(10)
        buffer.put(entry)
        buffer.put(entry)
        assert len(buffer) == 1
        assert list(buffer.take(11)) == [entry]
        assert list(buffer.take(11)) == []

    def test_put_again_after_a_discard_or_a_take(self, buffer, entries):
        (entry,) = entries(10)
        for _ in range(3):
            buffer.put(entry)
            buffer.discard(entry)
            buffer.put(entry)
            assert list(buffer.take(11)) == [entry]
        buffer.put(entry)
        assert len(buffer) == 1
        assert buffer.next_expiry() == 10

    def test_an_empty_one_is_still_true(self, buffer):
        assert buffer
        assert len(buffer) == 0

    def test_it_satisfies_the_protocol(self, buffer):
        typed: OverflowBuffer = buffer
        assert typed.next_expiry() is None

    def test_neighbours_at_the_end_of_time_are_told_apart(self, buffer, entries):
        end = [END_OF_TIME - 3, END_OF_TIME, END_OF_TIME - 1, END_OF_TIME - 2]
        put_all(buffer, entries(*end, 0, 2**53, 2**53 + 1))
        taken = []
        while (smallest := buffer.next_expiry()) is not None:
            (entry,) = buffer.take(smallest + 1)
            taken.append(entry.expiry)
        assert taken == [0, 2**53, 2**53 + 1, *sorted(end)]

    def test_it_behaves_as_a_sorted_list_does(self, buffer, entries):
        chance = random.Random(9)
        model = []
        for entry in entries(*(chance.randrange(50) for _ in range(300))):
            buffer.put(entry)
            model.append(entry)
            if chance.random() < 0.5:
                gone = model.pop(chance.randrange(len(model)))
                buffer.discard(gone)
            if chance.random() < 0.1:
                before = chance.randrange(15)
                fits = sorted((e for e in model if e.expiry < before), key=lambda e: e.expiry)
                assert list(buffer.take(before)) == fits
                model = [e for e in model if e.expiry >= before]
            assert len(buffer) == len(model)
            assert buffer.next_expiry() == min((e.expiry for e in model), default=None)

    def test_two_buffers_of_different_names_do_not_meet(self, place, entries):
        one, other = place.buffer("one"), place.buffer("other")
        mine, yours = entries(10, 20)
        one.put(mine)
        other.put(yours)
        assert (len(one), len(other)) == (1, 1)
        assert (one.next_expiry(), other.next_expiry()) == (10, 20)
        other.discard(mine)
        assert list(other.take(2**63)) == [yours]
        assert list(one.take(2**63)) == [mine]

    def test_two_buffers_of_one_name_hand_over_their_own_entries_only(self, place, entries):
        one, other = place.buffer(), place.buffer()
        mine, yours = entries(10, 10)
        one.put(mine)
        other.put(yours)
        assert list(one.take(11)) == [mine]
        assert list(other.take(11)) == [yours]


@on_cores("place", "memory", *DURABLE)
class TestOnAWheel:
    @pytest.fixture
    def wheel(self, core, buffer):
        return core.Wheel(sizes=(8, 8, 8), overflow=buffer)

    def test_the_worked_example(self, wheel, buffer):
        entry = wheel.schedule(600, "order 600")
        assert wheel.where(entry) == (0, 0)
        assert (len(wheel), len(buffer)) == (1, 1)
        assert wheel.next_wakeup() == 128
        assert wheel.advance(64) == []
        assert wheel.where(entry) == (0, 0)  # 536 left, it stays
        assert wheel.advance(128) == []
        assert wheel.where(entry) == (3, 1)  # 472 left
        assert (len(wheel), len(buffer)) == (1, 0)
        assert wheel.advance(576) == []
        assert wheel.where(entry) == (2, 3)
        assert wheel.advance(599) == []
        assert wheel.advance(600) == ["order 600"]
        wheel._check()

    def test_order_of_schedule_survives_the_buffer(self, wheel):
        expected = []
        for now in (0, 64, 100, 127, 128, 200, 575, 580, 599):
            wheel.advance(now)
            for _ in range(3):
                wheel.schedule(600, len(expected))
                expected.append(len(expected))
            wheel._check()
        assert wheel.advance(600) == expected

    def test_cancel_reaches_into_the_buffer(self, wheel, buffer):
        entry, other = wheel.schedule(600, "a"), wheel.schedule(600, "b")
        assert entry.cancel() is True
        assert (len(buffer), len(wheel)) == (1, 1)
        assert entry.cancel() is False
        assert wheel.cancel_many([other]) == 1
        assert wheel.next_wakeup() is None
        wheel._check()
        assert wheel.advance(1000) == []

    @pytest.mark.parametrize("expiry", [50, 512, 600])
    def test_reschedule_moves_in_out_and_within(self, core, place, expiry):
        for to in (0, 50, 511, 512, 5000):
            buffer = place.buffer()
            wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
            entry = wheel.schedule(expiry, "a")
            assert entry.reschedule(to) is True
            assert len(buffer) == (to >= 512)
            assert wheel.next_expiry() == to
            wheel._check()
            assert wheel.advance(max(to - 1, 0)) == ([] if to else ["a"])
            assert wheel.advance(max(to, 1)) == (["a"] if to else [])

    def test_the_end_of_time_waits_in_the_buffer(self, wheel, buffer):
        wheel.schedule_many([END_OF_TIME, END_OF_TIME - 1], ["last", "last but one"])
        assert len(buffer) == 2
        assert wheel.advance(END_OF_TIME - 2) == []
        assert wheel.advance(END_OF_TIME - 1) == ["last but one"]
        assert wheel.advance(END_OF_TIME) == ["last"]

    def test_a_jump_past_everything_gives_the_order_of_a_sort(self, wheel):
        chance = random.Random(4)
        script = [(chance.randrange(3000), number) for number in range(200)]
        for expiry, number in script:
            wheel.schedule(expiry, [expiry, number])
        assert wheel.advance(3000) == sorted(map(list, script))


def test_three_thousand_entries_come_out_in_order(buffer):
    chance = random.Random(7)
    wheel = Wheel(sizes=(8, 8, 8), overflow=buffer)
    expiries = [chance.randrange(512, 3_000) for _ in range(3_000)]
    entries = wheel.schedule_many(expiries, range(3_000))
    assert len(buffer) == 3_000
    assert wheel.cancel_many(entries[::100]) == 30
    expected = sorted((e, n) for n, e in enumerate(expiries) if n % 100)
    fired = []
    while (time := wheel.next_wakeup()) is not None:
        fired += wheel.advance(time)
    assert fired == [number for _, number in expected]
    assert len(buffer) == 0


class TestItems:
    @pytest.mark.parametrize(
        "odd", [object(), {1, object()}, float("nan")], ids=["object", "set", "nan"]
    )
    @on_cores("durable", *DURABLE)
    def test_one_that_is_not_json_is_refused_and_nothing_has_changed(self, durable, core, odd):
        buffer = durable.buffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        wheel.schedule(600, "a")
        near = wheel.schedule(5, odd)
        with pytest.raises((TypeError, ValueError)):
            wheel.schedule(600, odd)
        with pytest.raises((TypeError, ValueError)):
            wheel.schedule_many([600, 700], ["b", odd])
        with pytest.raises((TypeError, ValueError)):
            near.reschedule(600)
        assert near.expiry == 5
        assert durable.stored() == [(600, "a")]
        assert (len(wheel), len(buffer)) == (2, 1)
        wheel._check()

    @on_cores("place", "memory", *DURABLE)
    def test_what_comes_out_is_the_very_item_that_went_in(self, buffer, core):
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        item = {"order": [1, "Ω", None], "nul": "\0"}
        wheel.schedule(600, item)
        (found,) = wheel.advance(600)
        assert found is item

    @on_cores("durable", *DURABLE)
    def test_they_are_stored_as_json(self, durable, core):
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=durable.buffer())
        items = [None, "", "Ω\0😀", 2**70, [1.5, {"a": True}]]
        wheel.schedule_many(range(600, 605), items)
        assert durable.stored() == list(zip(range(600, 605), items, strict=True))


CHILD = """
import os, signal, sys
from tickwheel import Wheel
from tickwheel.durable import buffers
from tickwheel.overflow_buffers import rows

signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.alarm(60)
buffer = buffers.{kind}({where!r})
wheel = Wheel(sizes=(8, 8, 8), overflow=buffer)
"""


def killed(place, text):
    """Run `text` in a process that says "ready" and is killed then, or kills itself."""
    program = CHILD.format(kind=CLASSES[place.kind], where=place.where) + textwrap.dedent(text)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as child:
        said = child.stdout.readline()
        if said:
            assert said == "ready\n"
            child.kill()
        assert child.wait(LONG) == -signal.SIGKILL


class TestRestore:
    @on_cores("durable", *DURABLE)
    def test_after_a_kill_all_that_was_in_the_buffer_is_there_once(self, durable, core):
        killed(
            durable,
            """
            wheel.schedule_many([600, 700, 600, 2**63 - 1, 5], [["a"], {"b": 1}, "c", None, "near"])
            wheel.schedule(800, "cancelled").cancel()
            wheel.schedule(900, "moved").reschedule(650)
            print("ready", flush=True)
            sys.stdin.read()
            """,
        )
        buffer = durable.buffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        assert buffer.restore(wheel) == 5
        assert buffer.restore(wheel) == 0
        assert (len(wheel), len(buffer)) == (5, 5)
        assert len(durable.stored()) == 5
        wheel._check()
        assert wheel.advance(600) == [["a"], "c"]
        assert wheel.advance(700) == ["moved", {"b": 1}]
        assert wheel.advance(END_OF_TIME) == [None]
        assert durable.stored() == []

    @on_cores("durable", *DURABLE)
    def test_before_it_nothing_of_the_dead_is_touched(self, durable, core, entries):
        killed(durable, "wheel.schedule(600, 'a'); print('ready', flush=True); sys.stdin.read()")
        buffer = durable.buffer()
        (entry,) = entries(700)
        buffer.put(entry)
        assert len(buffer) == 1
        assert buffer.next_expiry() == 700
        assert list(buffer.take(2**63)) == [entry]
        assert durable.stored() == [(600, "a")]

    @on_cores("durable", *DURABLE)
    def test_what_is_due_or_near_by_now_goes_on_the_wheel_and_leaves_the_buffer(
        self, durable, core
    ):
        killed(
            durable,
            """
            wheel.schedule_many([600, 700, 5000], "abc")
            print("ready", flush=True)
            sys.stdin.read()
            """,
        )
        buffer = durable.buffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer, start=650)
        assert buffer.restore(wheel) == 3
        assert len(buffer) == 1
        assert durable.stored() == [(5000, "c")]
        assert wheel.advance(650) == ["a"]
        assert wheel.advance(5000) == ["b", "c"]

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("chunk", [1, 3])
    def test_killed_in_the_middle_of_it_none_is_lost_or_doubled(self, durable, chunk, when):
        killed(
            durable,
            """
            wheel.schedule_many(range(600, 608), "abcdefgh")
            print("ready", flush=True)
            sys.stdin.read()
            """,
        )
        killed(
            durable,
            f"""
            rows.RESTORE_ROWS = 3
            replace, calls = buffer._replace, []

            def fatal(gone, kept):
                calls.append(1)
                if len(calls) < {chunk}:
                    return replace(gone, kept)
                if {when!r} == "after":
                    replace(gone, kept)
                os.kill(os.getpid(), signal.SIGKILL)

            buffer._replace = fatal
            wheel.advance(93)  # 600 ... 604 fit on the wheel
            buffer.restore(wheel)
            os.kill(os.getpid(), signal.SIGKILL)
            """,
        )
        buffer = durable.buffer()
        wheel = Wheel(sizes=(8, 8, 8), overflow=buffer)
        fits = set("abcde")
        buffer.restore(wheel)
        back = wheel.advance(700)
        assert back == sorted(back)
        assert len(back) == len(set(back))
        # Entries on the levels of the dead wheel are lost once its restore is done, not before.
        done = (chunk, when) == (3, "after")
        assert set("abcdefgh") - set(back) == (fits if done else set())

    @on_cores("durable", *DURABLE)
    def test_a_name_restores_its_own(self, durable, core, entries):
        put_all(durable.buffer("one"), entries(600))
        put_all(durable.buffer("other"), entries(700))
        buffer = durable.buffer("one")
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        assert buffer.restore(wheel) == 1
        assert wheel.advance(1000) == ["item 600"]
        assert durable.stored("other") == [(700, "item 700")]

    @on_cores("durable", *DURABLE)
    def test_many_are_restored_in_order_with_few_statements(self, durable, core):
        lost = core.Wheel(sizes=(8, 8, 8), overflow=durable.buffer())
        lost.schedule_many([600 + n % 7 for n in range(1200)], range(1200))
        buffer = durable.buffer()
        replace, sizes = buffer._replace, []

        def counted(gone, kept):
            sizes.append((len(gone), len(kept)))
            replace(gone, kept)

        buffer._replace = counted
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        assert buffer.restore(wheel) == 1200
        assert [kept for _, kept in sizes] == [500, 500, 200]
        assert len(durable.stored()) == 1200
        assert wheel.advance(700) == sorted(range(1200), key=lambda n: n % 7)


class TestLife:
    def test_closed_it_refuses_and_its_rows_stay(self, durable, entries):
        buffer = durable.buffer()
        first, second = entries(10, 20)
        buffer.put(first)
        buffer.close()
        buffer.close()
        with pytest.raises(RuntimeError, match="closed"):
            buffer.put(second)
        assert "closed" in repr(buffer)
        assert durable.stored() == [(10, "item 10")]

    @pytest.mark.parametrize("name", ["", "a\0b", "x" * 201])
    def test_a_name_that_cannot_be_stored_is_refused(self, durable, name):
        with pytest.raises(ValueError, match="name must be"):
            durable.buffer(name)

    @pytest.mark.parametrize("name", ["Ω ' \" % {} :", "a}:items", "x" * 200])
    def test_any_other_name_will_do(self, durable, name, entries):
        (entry,) = entries(10)
        buffer = durable.buffer(name)
        buffer.put(entry)
        assert durable.stored(name) == [(10, "item 10")]
        assert list(buffer.take(11)) == [entry]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_in_the_child_of_a_fork_it_is_the_parents(self, durable):
        program = (
            CHILD.format(kind=CLASSES[durable.kind], where=durable.where)
            + """
wheel.schedule(600, "a")
child = os.fork()
if not child:
    try:
        wheel.schedule(700, "b")
    except RuntimeError as error:
        os._exit("before a fork" not in str(error))
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
wheel.schedule(800, "c")
assert wheel.advance(1000) == ["a", "c"]
buffer.close()
"""
        )
        ended = subprocess.run(
            [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program],
            capture_output=True, text=True, timeout=LONG, check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (0, "")

    def test_a_process_that_ends_without_closing_it_ends_well(self, durable):
        program = CHILD.format(kind=CLASSES[durable.kind], where=durable.where)
        program += 'wheel.schedule(600, "a")\n'
        ended = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, timeout=LONG, check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (0, "")
        assert durable.stored() == [(600, "a")]

    @on_cores("durable", *DURABLE)
    def test_an_interrupted_verb_leaves_nothing_in_doubt_for_long(self, durable, core):
        buffer = durable.buffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        kept = wheel.schedule(600, "kept")
        for name in ("_insert", "_remove", "_remove_until"):
            statement = getattr(buffer, name)

            def interrupted(*arguments, statement=statement):
                statement(*arguments)
                raise KeyboardInterrupt

            setattr(buffer, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            wheel.schedule(700, "refused")
        with pytest.raises(KeyboardInterrupt):
            kept.cancel()
        with pytest.raises(KeyboardInterrupt):
            wheel.advance(200)
        for name in ("_insert", "_remove", "_remove_until"):
            delattr(buffer, name)
        wheel.schedule(800, "probe").cancel()
        assert durable.stored() == [(600, "kept")]
        assert wheel.advance(1000) == ["kept"]
