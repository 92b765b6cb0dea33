"""Errors of tasks in groups: those that differ in numbers only are the same."""

from contracts.stores import SqliteStore, task
from tickwheel.values.task import State
from tickwheel.web.error_groups import MAX_ERROR, MAX_GROUPS, grouped_errors


def failed(error, at_ms=1, state=State.FAILED):
    made = task(SqliteStore("unused"), due_at_ms=1)
    return made._replace(error=error, updated_at_ms=at_ms, state=state)


def test_errors_that_differ_in_numbers_are_one_group_shown_by_the_last():
    tasks = [failed("order 1 at 0xff", 5), failed("order 22 at 0xab", 9), failed("gone", 7)]
    tasks.append(failed("order 3 at 0x1", 6, State.DELAY))
    first, second = grouped_errors([*tasks, failed(None)])
    assert (first.count, first.retried, first.error) == (3, 1, "order 22 at 0xab")
    assert first.task == tasks[1].id
    assert (second.count, second.retried, second.error) == (1, 0, "gone")


def test_the_exception_of_a_traceback_decides():
    trace = 'Traceback (most recent call last):\n  File "shop.py", line 1, in mail\n'
    errors = [f"{trace}ValueError: x\na note", f"{trace * 99}ValueError: x", "ValueError: x"]
    groups = grouped_errors([failed(error) for error in errors])
    assert [one.count for one in groups] == [3]


def test_the_answer_is_bounded():
    names = [chr(97 + n // 26) + chr(97 + n % 26) for n in range(2 * MAX_GROUPS)]
    groups = grouped_errors([failed(name * MAX_ERROR) for name in names])
    assert len(groups) == MAX_GROUPS
    assert {len(one.error) for one in groups} == {MAX_ERROR}
