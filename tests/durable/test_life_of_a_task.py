"""The life of a task, from top to bottom, with a process that is killed on the way.

An order will be closed in half an hour. This program submits the task and dispatches nothing. Child
processes run it; the first of them is killed.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

from durable.stage import watchdog
from tickwheel.durable import Scheduler, State

SHOP = """
import asyncio, sys
from tickwheel.durable import Fail, Scheduler, current_task

app = Scheduler("sqlite:///{path}", node=sys.argv[1], grace=1)
now_or_later = 0.05


@app.task(max_attempts=4, backoff=now_or_later, timeout=0.5)
async def close_order(order_id):
    attempt = current_task().attempt
    if current_task().replay_of:
        return {{"closed": order_id, "by": sys.argv[1]}}
    print("attempt", attempt, flush=True)
    if attempt == 1:
        raise ConnectionError("the shop does not answer")
    if attempt == 2:
        await asyncio.Event().wait()  # killed here
    return Fail("the order is unknown")


async def main():
    async with app:
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until we are told to close


asyncio.run(main())
"""


def shop(path, name):
    """Open a shop in a process of its own; it is open when this returns."""
    child = subprocess.Popen(
        [sys.executable, "-c", SHOP.format(path=path), name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert child.stdout.readline() == "open\n"
    return child


def close(child):
    """Tell a shop to close; it does so well."""
    child.communicate("", timeout=30)
    assert child.returncode == 0


def wait_for(look, condition):
    """Look again and again until the condition holds; the watchdog ends a test that hangs."""
    while not condition(found := look()):
        time.sleep(0.005)
    return found


def test_the_life_of_a_task(tmp_path):
    path = tmp_path / "tasks.db"
    app = Scheduler(f"sqlite:///{path}", dispatch=False)
    with watchdog(), app.blocking() as b:
        # It is submitted: when this returns, it is on the disk.
        task = b.submit(
            "close_order", ["o-1"], delay=timedelta(minutes=30), key="order:o-1", max_attempts=4
        )
        assert task.state is State.DELAY
        assert b.get(task.id) == task

        # A first shop opens. The task is not due, and nothing happens to it.
        first = shop(path, "first")
        assert b.list(key="order:o-1").items == [task]

        # The customer has paid early: it is due now. The first attempt fails, and is retried.
        verdict = b.reschedule(task.id, delay=0)
        assert (verdict.won, verdict.state) == (True, State.DELAY)
        assert first.stdout.readline() == "attempt 1\n"
        assert first.stdout.readline() == "attempt 2\n"
        (one,) = b.attempts(task.id)
        assert (one.attempt, one.event, one.node) == (1, "retry", "first")
        assert "the shop does not answer" in one.error

        # The second attempt is running: a cancel is too late.
        running = b.get(task.id)
        assert (running.state, running.attempt, running.node) == (State.RUNNING, 2, "first")
        assert b.cancel(task.id) == (task.id, False, State.RUNNING)

        # The process is killed. Nobody knows, until another has its lock.
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
        assert b.get(task.id).state is State.RUNNING

        # A second shop opens, and tries again, under the same id.
        second = shop(path, "second")
        assert second.stdout.readline() == "attempt 3\n"
        final = wait_for(lambda: b.get(task.id), lambda found: found.final)

        # The function returns Fail: the task is in the backlog, with its attempts.
        assert (final.state, final.error) == (State.FAILED, "the order is unknown")
        assert (final.attempt, final.failures) == (3, 3)
        assert b.backlog(state="failed").items == [final]
        rows = b.attempts(task.id)
        assert [(row.attempt, row.event, row.node) for row in rows] == [
            (1, "retry", "first"), (2, "retry", "first"), (3, "fail", "second"),
        ]  # fmt: skip
        assert rows[1].error.startswith("lost: first")
        assert rows[0].ended_at <= rows[1].started_at <= rows[1].ended_at <= rows[2].started_at
        assert rows[2].epoch > rows[1].epoch

        # The order is known now. The replay is a new task, which finishes.
        again = b.replay(task.id)
        assert (again.replay_of, again.key) == (task.id, "order:o-1")
        done = wait_for(lambda: b.get(again.id), lambda found: found.final)
        assert (done.state, done.attempt) == (State.FINISHED, 1)
        assert done.result == {"closed": "o-1", "by": "second"}
        assert b.get(task.id).replayed_as == again.id

        # Nothing is left to do, and the shop closes.
        close(second)
        assert b.list(final=False).items == []
