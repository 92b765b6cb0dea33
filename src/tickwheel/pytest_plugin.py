"""The pytest plugin: `manual_clock`, `timer`, `async_timer`, `jumping_event_loop`, `scheduler`.

pytest loads it wherever tickwheel is installed, so it imports little until a fixture is used.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

import pytest

import tickwheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tickwheel.durable import Scheduler
    from tickwheel.testing import JumpingEventLoop

APP = "tickwheel_app"  # the setting: where the scheduler of the program under test is


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the setting."""
    parser.addini(APP, "the scheduler under test, module:name; the fixture `scheduler` is it")


@pytest.fixture
def manual_clock() -> tickwheel.ManualClock:
    """A clock at 0 that moves only by `manual_clock.advance(seconds)`."""
    return tickwheel.ManualClock()


@pytest.fixture
def timer(manual_clock: tickwheel.ManualClock) -> Iterator[tickwheel.Timer]:
    """A `Timer` on `manual_clock`, without a thread; closed at the end."""
    with tickwheel.Timer(clock=manual_clock) as timer:
        yield timer


@pytest.fixture
def async_timer(manual_clock: tickwheel.ManualClock) -> Iterator[tickwheel.AsyncTimer]:
    """An `AsyncTimer` on `manual_clock`, bound to the loop that runs at its first use.

    It is an ordinary fixture, for async tests under any plugin. At the end it is closed, and its
    coroutines are cancelled if their loop can still run.
    """
    timer = tickwheel.AsyncTimer(clock=manual_clock)
    yield timer
    close(timer)


@pytest.fixture
def jumping_event_loop() -> Iterator[JumpingEventLoop]:
    """A `JumpingEventLoop`; at the end its tasks are cancelled and it is closed."""
    import asyncio  # noqa: PLC0415 - slow to import, and not every test run needs it

    from tickwheel.testing import JumpingEventLoop  # noqa: PLC0415 - as above

    with asyncio.Runner(loop_factory=JumpingEventLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, JumpingEventLoop)
        yield loop


@pytest.fixture
def scheduler(
    request: pytest.FixtureRequest, manual_clock: tickwheel.ManualClock
) -> Iterator[Scheduler]:
    """A `Scheduler` on `memory://` and `manual_clock`, not started; `run_due` runs its tasks.

    With the setting `tickwheel_app = module:name` it is that scheduler, moved to this store for the
    test.
    """
    from tickwheel.testing.tasks import scheduler_in_memory  # noqa: PLC0415 - as above

    where = request.config.getini(APP)
    with scheduler_in_memory(pkgutil.resolve_name(where) if where else None, manual_clock) as app:
        yield app


def close(timer: tickwheel.AsyncTimer) -> None:
    """Close `timer` from outside of its loop, which may be closed already."""
    loop = timer._loop
    if loop is not None and not loop.is_closed() and not loop.is_running():
        loop.run_until_complete(timer.close())
        return
    closing = timer.close()
    try:
        closing.send(None)  # up to its first await: after that no callback is pending
    except (StopIteration, RuntimeError):
        return
    closing.close()
