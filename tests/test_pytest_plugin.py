"""The fixtures of the pytest plugin, in separate test runs."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def passed(pytester, monkeypatch):
    """Run a test file with only this plugin; all its tests must pass."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(code, *arguments, passed=1):
        pytester.makepyfile(code)
        result = pytester.runpytest("-p", "tickwheel.pytest_plugin", "-W", "error", *arguments)
        result.assert_outcomes(passed=passed)
        return result

    return run


def test_pytest_finds_the_plugin_by_itself():
    (entry,) = entry_points(group="pytest11", name="tickwheel")
    assert entry.value == "tickwheel.pytest_plugin"


def test_loading_it_imports_neither_asyncio_nor_the_event_loop():
    code = (
        "import sys, pytest; before = 'asyncio' in sys.modules; import tickwheel.pytest_plugin;"
        "print('asyncio' in sys.modules and not before, 'tickwheel.loop' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False False\n"


def test_its_fixtures_are_listed_with_their_descriptions(passed, pytester):
    result = pytester.runpytest("-p", "tickwheel.pytest_plugin", "--fixtures", "-v")
    result.stdout.fnmatch_lines_random(
        [
            "manual_clock*",
            "*A clock at 0 that moves only by*",
            "timer*",
            "async_timer*",
            "jumping_event_loop*",
        ]
    )


def test_a_timer_on_the_manual_clock(passed):
    passed(
        """
        def test_reminder(timer, manual_clock):
            seen = []
            timer.call_later(3600, seen.append, "an hour")
            manual_clock.advance(3599.999)
            assert seen == []
            manual_clock.advance(0.001)
            assert seen == ["an hour"]
            assert timer.time() == manual_clock.time() == 3600
        """
    )


def test_the_timer_is_closed_at_the_end_and_each_test_has_its_own(passed):
    passed(
        """
        import pytest, tickwheel

        kept = []

        def test_first(timer):
            timer.call_later(5, kept.append, "fired")
            kept.append(timer)

        def test_second(timer, manual_clock):
            assert manual_clock.time() == 0 and len(timer) == 0
            (first,) = kept
            with pytest.raises(tickwheel.TimerClosed):
                first.call_later(1, print)
        """,
        passed=2,
    )


ASYNC_TEST = """
    import asyncio, tickwheel

    {extra}

    {mark}
    async def test_async(async_timer, manual_clock):
        seen = []

        async def work(name):
            await asyncio.sleep(0)
            seen.append(name)

        async_timer.call_later(60, seen.append, "plain")
        async_timer.call_later(90, work, "coroutine")
        manual_clock.advance(60)
        assert seen == ["plain"]
        manual_clock.advance(30)
        await asyncio.sleep(0.001)
        assert seen == ["plain", "coroutine"]
        async_timer.call_later(5, print)
        async_timer.call_later(0, asyncio.sleep, 3600)
        manual_clock.advance(0)
        assert len(async_timer) == 1  # left to the end of the test
"""


def test_an_async_timer_in_a_test_that_runs_its_own_loop(passed):
    story = ASYNC_TEST.format(extra="", mark="").replace("def test_async", "def story")
    run = "asyncio.run(story(async_timer, manual_clock))"
    passed(f"{story}\n    def test_it(async_timer, manual_clock): {run}")


def test_an_async_timer_under_pytest_asyncio(passed):
    pytest.importorskip("pytest_asyncio")
    code = ASYNC_TEST.format(extra="import pytest", mark="@pytest.mark.asyncio")
    scope = "asyncio_default_fixture_loop_scope=function"
    passed(code, "-p", "pytest_asyncio.plugin", "-o", scope)


def test_an_async_timer_under_anyio(passed):
    pytest.importorskip("anyio")
    extra = "import pytest; anyio_backend = pytest.fixture(lambda: 'asyncio', name='anyio_backend')"
    passed(ASYNC_TEST.format(extra=extra, mark="@pytest.mark.anyio"), "-p", "anyio.pytest_plugin")


def test_an_async_timer_that_was_never_used_is_closed_too(passed):
    passed("def test_it(async_timer): assert len(async_timer) == 0")


def test_at_the_end_the_coroutines_of_an_open_loop_are_ended(passed):
    passed(
        """
        import asyncio, pytest

        seen = []

        @pytest.fixture
        def loop():
            loop = asyncio.new_event_loop()
            yield loop
            loop.close()

        def test_one(loop, async_timer, manual_clock):
            async def work():
                try:
                    await asyncio.sleep(3600)
                finally:
                    seen.append("ended")

            async def main():
                async_timer.call_later(1, work)
                manual_clock.advance(1)
                await asyncio.sleep(0)

            loop.run_until_complete(main())
            assert seen == []

        def test_two():
            assert seen == ["ended"]
        """,
        passed=2,
    )


def test_a_loop_that_jumps_and_is_closed_with_its_tasks(passed):
    passed(
        """
        import asyncio

        kept = []

        def test_one(jumping_event_loop):
            kept.append(jumping_event_loop)
            kept.append(jumping_event_loop.create_task(asyncio.sleep(10**6)))
            jumping_event_loop.run_until_complete(asyncio.sleep(3600))
            assert jumping_event_loop.time() == 3600

        def test_two():
            loop, task = kept
            assert loop.is_closed() and task.cancelled()
        """,
        passed=2,
    )


def test_a_scheduler_in_memory_whose_tasks_run_when_the_test_says_so(passed):
    passed(
        """
        import asyncio
        from tickwheel.testing import submitted

        def test_an_order_expires(scheduler, manual_clock):
            seen = []
            scheduler.task(name="expire")(seen.append)

            async def main():
                async with scheduler:
                    await scheduler.submit("expire", "o-1", delay=1800)
                    [call] = await submitted(scheduler)
                    assert (call.function, call.delay) == ("expire", 1800)
                    manual_clock.advance(1799)
                    assert await scheduler.run_due() == []
                    manual_clock.advance(1)
                    [task] = await scheduler.run_due()
                    assert (task.state, seen) == ("finished", ["o-1"])

            asyncio.run(main())

        def test_another_one_finds_nothing(scheduler):
            with scheduler.blocking() as b:
                assert b.counts() == {"live": 0, "final": 0}
        """,
        passed=2,
    )


SHOP = """
from tickwheel.durable import Scheduler

app = Scheduler("sqlite:///production.db")
expired = []

@app.task
def expire(order_id):
    expired.append(order_id)
"""


def test_the_scheduler_of_a_program_is_moved_to_memory_for_each_test(passed, pytester):
    pytester.makepyfile(shop=SHOP)
    pytester.makeini("[pytest]\ntickwheel_app = shop:app\npythonpath = .")
    passed(
        """
        import pytest, shop

        @pytest.mark.parametrize("order", ["o-1", "o-2"])
        def test_an_order_expires(scheduler, manual_clock, order):
            assert scheduler is shop.app
            shop.expired.clear()
            with scheduler.blocking() as b:
                b.submit(shop.expire, order, delay=60)
                manual_clock.advance(60)
                b.run_due()
            assert shop.expired == [order]

        def test_afterwards_it_is_where_it_was():
            assert shop.app._binding.url == "sqlite:///production.db"
            assert str(shop.app._make_store().path) == "production.db"
        """,
        passed=3,
    )
    assert not list(pytester.path.glob("production.db*"))


def test_a_setting_that_names_something_else_is_an_error(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\ntickwheel_app = os:path")
    pytester.makepyfile("def test_it(scheduler): ...")
    result = pytester.runpytest("-p", "tickwheel.pytest_plugin")
    result.stdout.fnmatch_lines(["*tickwheel_app names a Scheduler as module:name*"])
    result.assert_outcomes(errors=1)
