"""The ledgers of the soak: what they call a fault, and what they let pass."""

import json
import time
from typing import NamedTuple

import pytest

from soak.record import Once, Record, Runs, guarded

pytestmark = pytest.mark.asyncio


class Row(NamedTuple):
    attempt: int
    error: str | None = None


class Ended(NamedTuple):
    id: str = "id"
    state: str = "finished"
    attempt: int = 1
    error: str | None = None


@pytest.fixture
def record():
    return Record()


@pytest.fixture
def faults(record, capsys):
    """Return the faults that a report has."""

    def read():
        capsys.readouterr()
        record.report()
        return json.loads(capsys.readouterr().out)["faults"]

    return read


class TestOnce:
    async def test_what_happens_once_and_in_time_passes(self, record, faults):
        once = Once(record, lambda: 5.0)
        once.expect(1, 5.0)
        once.expect(2, 0)
        once.expect(3, 0)
        once.withdraw(3)
        once.happened(1)
        once.happened(2)
        await once.wait()
        assert faults() == []

    async def test_early_twice_and_after_a_cancel_are_faults(self, record, faults):
        once = Once(record, lambda: 5.0)
        for number in (1, 2, 3):
            once.expect(number, 5.5 if number == 1 else 5.0)
        once.withdraw(3)
        for number in (1, 2, 2, 3):
            once.happened(number)
        assert faults() == [
            "1 happened 0.500000 s early",
            "2 happened twice, or after its cancel",
            "3 happened twice, or after its cancel",
        ]


class TestRuns:
    async def test_a_task_that_ends_as_expected_passes(self, record, faults):
        runs = Runs(record)
        runs.open("a", time.time())
        runs.note("a", "id", 1, 0.0)
        runs.note("a", "id", 2, 0.0)
        await runs.reach("a", 2)
        runs.settle("a", Ended(attempt=2), [Row(1), Row(2)], calls=2)
        assert faults() == []

    async def test_an_early_call_and_one_attempt_twice_are_faults(self, record, faults):
        runs = Runs(record)
        runs.open("a", time.time() + 60)
        runs.note("a", "id", 1, 0.0)
        runs.note("a", "id", 1, 0.0)
        assert faults() == [
            "a: attempt 1 was called early",
            "a: an attempt was called twice: id/1",
            "a: attempt 1 was called early",
        ]

    async def test_a_call_after_the_end_is_a_fault(self, record, faults):
        runs = Runs(record)
        runs.open("a")
        runs.settle("a", Ended(state="cancelled", attempt=0), [], state="cancelled", calls=0)
        runs.note("a", "id", 1, 0.0)
        assert faults() == ["a was called after its end: id/1"]

    @pytest.mark.parametrize(
        ("calls", "ended", "log"),
        [
            ([1], Ended(state="failed"), [Row(1)]),
            ([1], Ended(attempt=2), [Row(1)]),
            ([], Ended(), [Row(1)]),
            ([1, 2], Ended(attempt=2), [Row(1), Row(2)]),
            ([2], Ended(), [Row(1)]),
        ],
    )
    async def test_an_end_other_than_expected_is_a_fault(self, record, faults, calls, ended, log):
        runs = Runs(record)
        runs.open("a")
        for attempt in calls:
            runs.note("a", "id", attempt, 0.0)
        runs.settle("a", ended, log)
        assert len(faults()) == 1

    async def test_a_second_call_is_allowed_where_the_log_has_the_reason(self, record, faults):
        runs = Runs(record)
        runs.open("a")
        runs.note("a", "id", 1, 0.0)
        runs.note("a", "id", 2, 0.0)
        runs.settle("a", Ended(attempt=2), [Row(1, "lost: its node is gone"), Row(2)])
        assert faults() == []

    async def test_two_firings_of_one_time_are_a_fault(self, record, faults):
        runs = Runs(record)
        for name, times in (("a", (1.0, 2.0)), ("b", (1.0, 1.0))):
            runs.open(name)
            for number, due_at in enumerate(times):
                runs.note(name, f"id-{number}", 1, due_at)
            runs.settle_firings(name)
        assert faults() == ["b has fired twice: [1.0, 1.0]"]


async def test_a_scene_that_fails_is_a_fault(record, faults):
    async def scene():
        raise ValueError("it is wrong")

    class Slot:
        def release(self):
            pass

    await guarded(record, scene, Slot())
    assert faults() == ["scene: ValueError('it is wrong')"]
