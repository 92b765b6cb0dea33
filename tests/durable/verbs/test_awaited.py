"""verbs.awaited: a submit that nobody awaits is an error in the log, not silence."""

import asyncio
import logging
import subprocess
import sys

import pytest

from tickwheel.durable import NotStarted, Scheduler

PROGRAM = """\
from tickwheel.durable import Scheduler

app = Scheduler("sqlite:///tasks.db")


@app.task
def close(order_id):
    pass


def pay(order_id):
    task = None
    close{bound}.submit(order_id, delay=60)


with app.blocking() as b:
    pay("o-1")
    print(len(b.list().items))
"""


@pytest.mark.parametrize("bound", ["", ".options(priority=1)"])
def test_a_forgotten_await_is_logged_with_its_line_and_what_to_do(tmp_path, bound):
    (tmp_path / "shop.py").write_text(PROGRAM.format(bound=bound))
    command = [sys.executable, "shop.py"]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "0\n"  # the error is true: nothing was stored
    errors = [line for line in done.stderr.splitlines() if "not awaited" in line]
    assert len(errors) == 1
    assert "shop.py, line 13:" in errors[0]
    assert "submit_sync(" in errors[0]


@pytest.fixture
def app(tmp_path):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")
    app.task(name="close")(print)
    return app


@pytest.mark.asyncio
async def test_an_awaited_closed_or_cancelled_verb_is_no_error(app, caplog):
    close = app._functions["close"]
    async with app:
        task = await close.submit(delay=60)
        await asyncio.create_task(close.submit(delay=60))
        both = await asyncio.gather(close.submit(delay=60), app.cancel(task.id))
        assert both[1].won
        close.submit(delay=60).close()
        never_begun = asyncio.create_task(close.submit(delay=60))
        never_begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await never_begun
        del never_begun  # it is dropped now, not after the assertion
        await asyncio.to_thread(lambda: app.run(app.reschedule(both[0].id, delay=70)))
    with pytest.raises(NotStarted):
        app.run(close.submit())
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_the_other_verbs_that_change_tasks_or_schedules_are_logged_too(app, caplog):
    async with app:
        for verb in (
            lambda: app.submit_many([]),
            lambda: app.cancel("0" * 32),
            lambda: app.cancel_key("k"),
            lambda: app.cancel_where(service="close"),
            lambda: app.reschedule("0" * 32, delay=1),
            lambda: app.reschedule_where(service="close", delay=1),
            lambda: app.feedback("0" * 32, "finished", attempt=1),
            lambda: app.replay("0" * 32),
            lambda: app.replay_where(service="close"),
            lambda: app.run_due(),
            lambda: app.put_schedule("nightly", "close", interval=5),
            lambda: app.store_schedule("nightly", "close", b"[]", interval=5),
            lambda: app.delete_schedule("nightly"),
        ):
            caplog.clear()
            verb()
            assert "was not awaited" in caplog.text
