"""The wall clock of a running scheduler is set forward and back: no task is lost, doubled or early.

A worker runs under libfaketime, which shows it another time of day while its monotonic clock goes
on; a file says which. Times are chosen so that nothing but the steps brings most tasks due. After
each step the test waits for the tasks that must have run, and never for a time.
"""

import random
import time

import pytest

from durable.ledger import Audit, Ledger, Tables
from durable.worker import Worker
from false_clock import FalseClock

HOUR = 3600.0

pytestmark = pytest.mark.usefixtures("watched")


@pytest.fixture
def clock(tmp_path):
    return FalseClock(tmp_path)


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def worker(tmp_path, clock, ledger):
    url = f"sqlite:///{tmp_path}/tasks.db"
    options = {"timeout": 30, "lease": 30}  # nothing is lost here: no lease shall end
    with Worker(url, ledger, environment=clock.environment, **options) as worker:
        worker.url = url
        yield worker


def goes_on(worker, ledger):
    """The scheduler works at the time that it is now: what is due at once runs."""
    (task_id,) = worker.ask("submit", delays=[0])
    ledger.wait(lambda: ledger.done[task_id], "a task that is due at once has run")


def due_have_run(clock, ledger):
    """All that is due by the worker's clock has run."""
    now_ms = clock.time() * 1000
    due = [task_id for task_id, note in ledger.stored.items() if note["due_at_ms"] <= now_ms]
    ledger.wait(lambda: all(ledger.done[task_id] for task_id in due), f"{len(due)} due have run")
    return len(due)


def proved(worker, ledger):
    """Everything has run once, at the first attempt, and was claimed when it was due."""
    worker.ask("drain")
    worker.stop()
    tables = Tables(worker.url)
    figures = Audit(ledger, tables, stepped=True).run()
    assert figures["runs"] == figures["acknowledged"] == figures["finished"]
    for task_id, row in tables.final.items():
        (log,) = tables.log[task_id]
        assert log.started_at_ms >= row.due_at_ms, f"claimed early: {row}, {log}"
    return figures


def test_the_worker_sees_the_false_time_and_a_true_monotonic_clock(clock, worker):
    clock.set(HOUR)
    before = time.monotonic()
    seen = worker.ask("stats")["wall"]
    assert seen >= time.time() + HOUR - (time.monotonic() - before) - 1


def test_steps_of_an_hour_forward_and_back_lose_and_double_nothing(clock, worker, ledger):
    chance = random.Random(5)
    delays = [chance.uniform(0, 1) for _ in range(50)]
    delays += [chance.uniform(60, 4 * HOUR) for _ in range(150)]
    worker.ask("submit", delays=delays)
    for ahead in (HOUR, 0, HOUR, 2 * HOUR, HOUR, 0, 3 * HOUR, 2 * HOUR, 0):
        clock.set(ahead)
        goes_on(worker, ledger)
        due_have_run(clock, ledger)
    assert sum(map(bool, ledger.done.values())) < len(ledger.stored), "some are still to come"
    clock.set(5 * HOUR)
    assert due_have_run(clock, ledger) == len(ledger.stored)
    assert proved(worker, ledger)["finished"] == 209


def test_small_steps_back_and_forth_lose_and_double_nothing(clock, worker, ledger):
    chance = random.Random(6)
    worker.ask("submit", delays=[chance.uniform(0, 3) for _ in range(200)])
    ahead = 0.0
    for _ in range(20):
        ahead += chance.uniform(-0.5, 0.55)
        clock.set(ahead)
        goes_on(worker, ledger)
        worker.ask("submit", delays=[chance.uniform(0, 0.3)])
    clock.set(10)
    due_have_run(clock, ledger)
    assert proved(worker, ledger)["finished"] == 240


def test_the_clock_steps_while_tasks_run(clock, worker, ledger):
    running = worker.ask("submit", name="slow", delays=[0.01 * n for n in range(100)])
    for ahead in (HOUR, 0, HOUR, -HOUR, HOUR):
        clock.set(ahead)
        goes_on(worker, ledger)
    ledger.wait(lambda: all(ledger.done[task_id] for task_id in running), "all have run")
    assert proved(worker, ledger)["finished"] == 105


def test_set_back_between_two_processes_it_fires_again_at_the_new_time(
    tmp_path, clock, worker, ledger
):
    clock.set(HOUR)
    (due,) = worker.ask("submit", delays=[0])
    ledger.wait(lambda: ledger.done[due], "it has run")
    worker.ask("submit", delays=[0.1, 60, 2 * HOUR])
    worker.kill()
    clock.set(0)
    environment = clock.environment
    with Worker(worker.url, ledger, environment=environment) as second:
        goes_on(second, ledger)
        clock.set(4 * HOUR)  # beyond the lease of what was running when it was killed, too
        due_have_run(clock, ledger)
        second.ask("drain")
        second.stop()
    Audit(ledger, Tables(worker.url), stepped=True).run()
