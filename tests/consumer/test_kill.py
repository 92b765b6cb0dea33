"""A consumer that is killed with SIGKILL again and again: one task for each message, exactly.

`make chaos` runs the long form.
"""

import asyncio
import json
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing

import pytest

import servers
from contracts.sources import BROKERS
from web.serving import Served

MESSAGES, KILLS = 6_000, 3
SESSION = "?session_timeout=1"


class Command:
    """The command `tickwheel consume`, to start, kill and stop."""

    def __init__(self, broker, server, log):
        session = SESSION if broker.server.name == "kafka" else ""
        self._argv = [sys.executable, "-m", "tickwheel", "consume", broker.name]
        self._argv += ["--broker", broker.server.url + session, "--server", server.url]
        self._argv += ["--batch", "500", "--json"]
        self._log = log
        self._process = None

    def start(self):
        self._process = subprocess.Popen(self._argv, stdout=subprocess.PIPE, stderr=self._log)

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def stop(self):
        """Stop it cleanly; return what it printed."""
        self._process.send_signal(signal.SIGTERM)
        out, _ = self._process.communicate(timeout=servers.PATIENCE)
        assert self._process.returncode == 0
        return json.loads(out)


def stored(path):
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as tasks:
        return tasks.execute("SELECT count(*) FROM task").fetchone()[0]


def payloads(path):
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as tasks:
        return Counter(int(body) for (body,) in tasks.execute("SELECT payload FROM task"))


def consume_with_kills(broker, tmp_path, messages, kills, chance):
    """Publish, and kill the consumer at random counts of stored tasks; return the last counts."""
    body = {"service": "work", "delay": 3600}
    path = tmp_path / "tasks.db"
    with (
        Served("--store", f"sqlite:///{path}", "--allow-private-targets", cwd=tmp_path) as server,
        (tmp_path / "consume.log").open("wb") as log,
    ):
        server.service("work")
        asyncio.run(
            broker.publish([json.dumps({**body, "payload": n}).encode() for n in range(messages)])
        )
        command = Command(broker, server, log)
        for at in sorted(chance.sample(range(1, messages), kills)):
            command.start()
            servers.wait_until(lambda at=at: stored(path) >= at, f"{at} tasks are stored", 300)
            command.kill()
        command.start()
        servers.wait_until(lambda: stored(path) >= messages, "all tasks are stored", 300)
        last = command.stop()
        assert payloads(path) == Counter(range(messages))
        repeated = server.get("/v1/stats", status=200).json["submitted"] - messages
        print(f"{messages} messages, {kills} kills: {repeated} were delivered again")
    assert last["refused"] == 0
    return last


@pytest.fixture
def broker(request):
    made = BROKERS[request.param](request.getfixturevalue(f"{request.param}_server"))
    asyncio.run(made.create())
    return made


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)
def test_each_message_becomes_one_task_however_often_the_consumer_is_killed(broker, tmp_path):
    consume_with_kills(broker, tmp_path, MESSAGES, KILLS, random.Random(7))


@pytest.mark.chaos
@pytest.mark.parametrize("broker", BROKERS, indirect=True)
def test_50_000_messages_and_ten_kills(broker, tmp_path):
    consume_with_kills(broker, tmp_path, 50_000, 10, random.Random(8))
