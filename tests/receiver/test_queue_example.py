"""The example of a worker behind a broker: through real brokers, to the end of a task."""

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

import broker_servers
from receiver.conftest import TASK_ID, Caller

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "queue_worker.py"
LINES = """\
closing order o-1, attempt 1
the message: acknowledge
the task: finished, {'closed': 'o-1'}
"""


@pytest.fixture(params=["nats", "kafka", "redis", "rabbit"])
def url(request):
    if request.param == "nats":
        with broker_servers.NatsServer() as server:
            yield server.url
    else:
        yield request.getfixturevalue(f"{request.param}_server").url


def test_a_worker_handles_a_task_and_its_feedback_ends_it(url):
    command = [sys.executable, str(EXAMPLE), url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    # The task may end before the worker has printed what it does with the message.
    assert sorted(ran.stdout.splitlines()) == sorted(LINES.splitlines())


def test_an_entry_that_a_dead_consumer_took_is_handled(redis_url):
    example = runpy.run_path(str(EXAMPLE))
    headers, body = Caller(example["SECRET"])({"order": "o-2"})
    reports = []

    async def feedback(task_id, outcome, **_):
        reports.append((task_id, outcome))

    async def work():
        app = SimpleNamespace(feedback=feedback)
        ready = asyncio.get_running_loop().create_future()
        async with Redis.from_url(redis_url) as client:
            await client.xgroup_create("orders", "workers", mkstream=True)
            entry = await client.xadd("orders", headers | {"payload": body})
            await client.xreadgroup("workers", "dead", {"orders": ">"})
            # It was two minutes ago.
            await client.xclaim("orders", "workers", "dead", 0, [entry], idle=120_000)
            worker = asyncio.ensure_future(example["redis_worker"](redis_url, app, ready))
            while (await client.xpending("orders", "workers"))["pending"]:
                assert not worker.done(), worker.exception()
                await asyncio.sleep(0.01)
            worker.cancel()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert reports == [(TASK_ID, "finished")]
