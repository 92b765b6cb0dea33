"""The log explains every long standstill between a node and its database.

Causes are a slow network, lost answers, silence, and a database whose clock jumps.

`make chaos` runs the long form; TICKWHEEL_KILL_ROUNDS and TICKWHEEL_KILL_SEED change it.
"""

import os
import random
import re
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from math import inf
from typing import NamedTuple

import psycopg
import pytest

import servers
from false_clock import FalseClock
from proxies import Proxy
from service.harness import QUICK, Submitters, seed, working

STILL_SECONDS = 10.0  # a due task that has not moved for longer must be explained
SLACK_SECONDS = 3.0  # for its line to be late, since the machine is shared
REPEAT_SECONDS = 33.0  # a reason that holds is repeated after 30 s; a killed node repeats nothing
LOOK_SECONDS = 0.25
BEGINS = re.compile(r"^stalled .*?\((\w+)\):|^(step '\w+') waits for the")
ENDS = re.compile(r"for the reason '(\w+)'$|^(step '\w+') works again")
EVENT = re.compile("clock was set back|^node '.*' is gone")
SERVICE = {"timeout": 5, "max_attempts": 1000, "backoff": QUICK, "concurrency": 50}
LARGE = "x" * 500_000
LONG = int(os.environ.get("TICKWHEEL_KILL_ROUNDS", "200")) // 20  # a round is two minutes


class Standstill(NamedTuple):
    """A live task that was due and did not move."""

    id: str
    state: str
    began: float  # seconds since 1970
    ended: float

    @property
    def seconds(self):
        return self.ended - self.began


class Watch:
    """Polls the tables, past the proxies, for tasks that do not move."""

    LIVE = """
        SELECT id, state, attempt FROM tickwheel.task
        WHERE due_at_ms <= floor(extract(epoch FROM clock_timestamp()) * 1000)
    """

    def __init__(self, url, still_seconds):
        self._url = url
        self._still_seconds = still_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._since = {}
        self.found = []
        self.looks = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(servers.PATIENCE)

    def _run(self):
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._over.wait(LOOK_SECONDS):
                self._note({tuple(row) for row in connection.execute(self.LIVE)})
        self._note(set())

    def _note(self, live):
        now = time.time()
        self.looks += 1
        for row in self._since.keys() - live:
            began = self._since.pop(row)
            if now - began > self._still_seconds:
                self.found.append(Standstill(row[0].hex, row[1], began, now))
        for row in live - self._since.keys():
            self._since[row] = now


class Reason(NamedTuple):
    """A reason in a log: its first line, and the time until which it held."""

    at: float  # seconds since 1970
    until: float
    message: str

    def explains(self, standstill):
        """Return whether it was logged in time, and held if it was logged before."""
        began = standstill.began
        if self.at < began:
            return self.until >= began + standstill.seconds / 2
        return self.at <= began + STILL_SECONDS + SLACK_SECONDS


def reasons(lines):
    """Return the reasons for standstills in the log of a server."""
    found, held = [], {}  # held: by name, the first line and the time of the last one
    for line in lines:
        at, message = datetime.fromisoformat(line["at"]).timestamp(), line["message"]
        if EVENT.search(message):
            found.append(Reason(at, at, message))
        elif begins := BEGINS.search(message):
            first, first_message, last = held.get(begins[begins.lastindex], (at, message, at))
            if at - last > REPEAT_SECONDS:
                found.append(Reason(first, last + REPEAT_SECONDS, first_message))
                first, first_message = at, message
            held[begins[begins.lastindex]] = first, first_message, at
        elif (ends := ENDS.search(message)) and ends[ends.lastindex] in held:
            first, first_message, last = held.pop(ends[ends.lastindex])
            found.append(Reason(first, min(at, last + REPEAT_SECONDS), first_message))
    found += [Reason(first, last + REPEAT_SECONDS, text) for first, text, last in held.values()]
    return sorted(found)


def delay(standstill, found):
    """Return the seconds from the start of a standstill to its reason; inf: none is in time."""
    delays = (max(one.at - standstill.began, 0) for one in found if one.explains(standstill))
    return min(delays, default=inf)


class Trial:
    """Two nodes, each behind its own proxy to a database whose clock can be set."""

    def __init__(self, make_server, receiver, number):
        self._make_server = make_server
        self._receiver = receiver
        self._chance = random.Random(number)
        self._stack = ExitStack()

    def __enter__(self):
        database = servers.PostgresServer()
        self._stack.callback(database.close)
        self.clock = FalseClock(database.directory)
        database.environment = self.clock.environment
        self.database = database.start()
        self.proxies = [
            self._stack.enter_context(Proxy(database.port, seed=self._chance.random()))
            for _ in range(2)
        ]
        self.servers = [
            self._make_server(proxy.url_for(database.url), errors=True) for proxy in self.proxies
        ]
        endpoint = self._receiver.watch("/work", working(0.02))
        self.servers[0].service("work", endpoint, **SERVICE)
        return self

    def __exit__(self, *_):
        self.heal()
        for server in self.servers:
            server.kill()
        self._stack.close()

    def heal(self):
        self.clock.set(0)
        for proxy in self.proxies:
            proxy.heal()

    def silence(self):
        """The proxies forward nothing to both nodes."""
        for proxy in self.proxies:
            proxy.silent = True

    def slow_down(self):
        """The proxies slow the database down, and large tasks are due."""
        for proxy in self.proxies:
            proxy.rate = 200_000
        body = {"service": "work", "payload": LARGE}
        self.servers[0].post("/v1/tasks/batch", [body] * 8)

    def lose_answers(self):
        """The proxies lose one answer in ten."""
        for proxy in self.proxies:
            proxy.loses = 0.1

    def set_clock(self):
        """Set the database's clock forward or back."""
        self.clock.set(self._chance.choice((-600, -60, 60, 600)))

    def set_back_amid_a_death(self):
        """Kill a node, and set the clock back: its leases end far in the future."""
        self.servers[1].kill()
        self.clock.set(-3600)

    def suffer(self, fault, seconds):
        """Apply one fault for some seconds, then recover."""
        fault(self)
        time.sleep(seconds)
        self.heal()
        if self.servers[1].process.poll() is not None:
            self.servers[1].restart()


FAULTS = [
    Trial.silence, Trial.slow_down, Trial.lose_answers, Trial.set_clock,
    Trial.set_back_amid_a_death,
]  # fmt: skip


def stand_still(make_server, receiver, number, faults, seconds, still_seconds=STILL_SECONDS):
    """Apply each fault to nodes under load; return figures of standstills and log lines."""
    with Trial(make_server, receiver, number) as trial:
        urls = [server.url for server in trial.servers]
        with (
            Watch(trial.database.url, still_seconds) as watch,
            Submitters(urls, seed=number, threads=1, tasks=2, pause=0.2) as submitters,
        ):
            submitters.wait(10)
            for fault in faults:
                trial.suffer(fault, seconds)
                submitters.wait(10)
        trial.servers[0].drained(60)
        assert not submitters.errors, submitters.errors
        found = [reason for server in trial.servers for reason in reasons(server.lines())]
        delays = [delay(one, found) for one in watch.found]
        for one, after in zip(watch.found, delays, strict=True):
            print(one, f"explained after {after:.1f} s")
        for at, until, message in sorted(found):
            print(f"{at:.1f} to {until:.1f}", message[:200])
        assert inf not in delays, f"{delays.count(inf)} of {len(delays)} are not explained"
        return {
            "tasks": len(submitters.stored), "still": len(delays), "reasons": len(found),
            "explained after": f"{max(delays, default=0):.1f} s",
        }  # fmt: skip


def test_a_silent_database_is_in_the_log(make_server, receiver):
    figures = stand_still(make_server, receiver, seed(), [Trial.silence], 7.0, still_seconds=4.0)
    assert figures["reasons"] > 0
    assert figures["still"] > 0


def test_a_line_from_before_a_standstill_explains_it_only_while_its_reason_holds():
    def line(at, message):
        return {"at": datetime.fromtimestamp(at, UTC).isoformat(), "message": message}

    stall, over = "stalled for 6 s (store): silent", "no task is stalled any more for the reason "
    lines = [
        line(0, stall),
        line(20, f"{over}'owner'"),
        line(30, stall),
        line(40, f"{over}'store'"),
    ]
    lines += [line(50, "node 'a' is gone: the others take its shards"), line(200, stall)]
    found = reasons(lines)
    explained = {0: 0, 25: 0, 39: 11, 41: 9, 51: inf, 180: inf, 187: 13, 232: inf}
    assert {began: delay(Standstill("", "", began, began + 12), found) for began in explained} == (
        explained
    )


@pytest.mark.chaos
def test_every_standstill_is_explained_in_the_log(make_server, receiver, capsys):
    number = seed()
    chance = random.Random(number)
    faults = [fault for _ in range(LONG) for fault in chance.sample(FAULTS, len(FAULTS))]
    figures = stand_still(make_server, receiver, number, faults, 20.0)
    with capsys.disabled():
        print(f"\n{figures}")
    assert figures["still"] > 0
