"""Async tests of the HTTP client, each on asyncio's loop, on uvloop and on tickwheel's.

A test is a coroutine function that takes a `stage`. What it opens on the stage is closed after it,
and it fails when a task or a socket is left, or after 30 s.
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
        runner.run(played(stage, test(**arguments)))
    del stage, arguments
    gc.collect()  # what was not closed is warned of, and a warning is an error
    assert sockets() == before, "a socket is left open"
    return True


async def played(stage, test):
    """The test, its end and what may not be left of it."""
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
    assert not faults, f"errors that nobody saw: {faults}"


def links():
    return [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


def sockets():
    """How many sockets this process has, where that can be told."""
    try:
        return sum(str(each.readlink()).startswith("socket:") for each in links())
    except OSError:
        return 0
