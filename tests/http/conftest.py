"""Async tests of the HTTP client, each on asyncio's loop, on uvloop and on tickwheel's.

A test is a coroutine function that takes a `stage`. Servers and pools on the stage are closed after
it; the test fails if a task or a socket is left, or after 30 s.
"""

import asyncio
import gc
import inspect
import sys
from pathlib import Path

import pytest
import uvloop

import tickwheel

sys.path.insert(0, str(Path(__file__).parent))

from http_peers import Authority, Stage

LOOPS = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
    "tickwheel": tickwheel.new_event_loop,
}
WATCHDOG = 30


@pytest.fixture(params=LOOPS)
def stage(request, authority):
    return Stage(authority, LOOPS[request.param])


@pytest.fixture(autouse=True, scope="module")
def cheap_collections(young_heap):
    """Each test ends with a full collection."""


@pytest.fixture(scope="session")
def authority():
    return Authority()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    values = pyfuncitem.funcargs
    arguments = {name: values[name] for name in inspect.signature(test).parameters}
    stage = arguments["stage"]
    before = sockets()
    with asyncio.Runner(loop_factory=stage.new_loop) as runner:
        runner.run(run_and_check_leftovers(stage, test(**arguments)))
    del stage, arguments
    gc.collect()  # an unclosed resource is a warning, and a warning is an error
    assert sockets() == before, "a socket is left open"
    return True


async def run_and_check_leftovers(stage, test):
    """Run a test, close its stage, and check that no task or error is left."""
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    try:
        async with asyncio.timeout(WATCHDOG):
            await test
    finally:
        await stage.close()
    for _ in range(10):  # a server's task may have a few steps to go
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks are left: {left}"
    assert not faults, f"unhandled errors: {faults}"


def links():
    return [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


def sockets():
    """Return the number of sockets of this process, 0 if unknown."""
    try:
        return sum(str(each.readlink()).startswith("socket:") for each in links())
    except OSError:
        return 0
