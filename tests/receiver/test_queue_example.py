"""The example of a worker behind a broker: through real brokers, to the end of a task."""

import subprocess
import sys
from pathlib import Path

import pytest

import broker_servers

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
