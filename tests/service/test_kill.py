"""The kill test of the service: servers are killed and paused under load, clients and receivers
live on, and in the end what they saw is held against the tables.

`make chaos` runs the long form; TICKWHEEL_KILL_ROUNDS and TICKWHEEL_KILL_SEED change it.
"""

import os
import random
import time
from collections import Counter

import pytest
from servers import PATIENCE

from durable.ledger import EXPLAINED, Tables, reason
from service.rig import QUICK, Submitters, seed, working
from web.serving import wait_until

ROUNDS = 3
PAUSE = 15.0  # longer than a node's lease, and than a call's
LEASE = 10.5  # seconds, with the timeout below

SERVICE = {"timeout": 0.5, "max_attempts": 1000, "backoff": QUICK, "concurrency": 20}
LONG = int(os.environ.get("TICKWHEEL_KILL_ROUNDS", "200"))
WATCHDOG = 60.0

KINDS = {"sqlite": (), "postgres": ("--coordinator", "solo")}


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    """A store, and what a server on it is told beside it."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url"), KINDS[request.param]
    return f"sqlite:///{tmp_path}/tasks.db", KINDS[request.param]


def rounds_of_killing(make_server, place, receiver, rounds, number):
    """Kill a server under load, and start it again, so many times; then hold all to account."""
    url, arguments = place
    chance = random.Random(number)
    server = make_server(url, *arguments, errors=True)
    server.service("work", receiver.watch("/work", working(0.02)), **SERVICE)
    with Submitters([server.url], seed=number) as submitters:
        for _ in range(rounds):
            submitters.wait(chance.randrange(20, 200))
            time.sleep(chance.choice((0, chance.uniform(0, 0.05))))  # not always after an answer
            server.restart()
        submitters.wait(50)  # and all of them go on by themselves
    server.drained(PATIENCE)
    return Account(server, url, submitters, receiver).settle()


class Account:
    """What clients were told and what the receiver saw, against the tables.

    Each check is one promise; `figures` says how much was seen.
    """

    def __init__(self, server, url, submitters, receiver):
        self._submitters = submitters
        self._receiver = receiver
        self._tables = Tables(url)
        self._names = {}  # payloads, each of which is a name
        with server.client() as client:
            for task in client.iterate_backlog(service="work", limit=1000):
                self._names.setdefault(task.payload, set()).add(task.id)

    def settle(self):
        assert not self._submitters.errors, self._submitters.errors
        assert not self._tables.live, f"{len(self._tables.live)} are live"
        self.no_acknowledged_task_is_lost()
        self.no_name_is_stored_twice()
        self.each_ends_once()
        self.each_call_is_an_attempt_and_explained()
        return self.figures()

    def no_acknowledged_task_is_lost(self):
        stored = {one for ids in self._submitters.stored.values() for one in ids}
        missing = stored - self._tables.final.keys()
        assert not missing, f"acknowledged and gone: {sorted(missing)[:3]} of {len(missing)}"
        for one in stored:
            wanted = "cancelled" if one in self._submitters.cancelled else "finished"
            assert self._tables.final[one].state == wanted, self._tables.final[one]

    def no_name_is_stored_twice(self):
        for name, ids in self._submitters.stored.items():
            assert len(ids) == 1, f"{name} was answered with {ids}"
            assert self._names[name] == ids, f"{name} is stored as {self._names[name]}"
        twice = {name: ids for name, ids in self._names.items() if len(ids) > 1}
        assert not twice, f"one idempotency key, two tasks: {twice}"

    def each_ends_once(self):
        for row in self._tables.final.values():
            log = self._tables.log[row.id]
            events = [one.event for one in log]
            assert [one.attempt for one in log] == list(range(1, row.attempt + 1)), (row, log)
            ends = ["finish"] if row.state == "finished" else []
            assert events[len(events) - len(ends) :] == ends, (row, log)
            assert {"finish", "fail", "expire"}.isdisjoint(events[: len(events) - len(ends)]), log

    def each_call_is_an_attempt_and_explained(self):
        """A second call has the same id and a later attempt, and the log says why it came."""
        calls = self._receiver.attempts()
        for one, row in self._tables.final.items():
            log = self._tables.log[one]
            attempts = calls.get(one, [])
            assert attempts == sorted(set(attempts)), f"{one} was called as {attempts}"
            assert set(attempts) <= set(range(1, row.attempt + 1)), (row, attempts)
            if row.state == "finished":
                assert attempts[-1:] == [row.attempt], f"{row} was called as {attempts}"
            for attempt in attempts[:-1]:
                assert reason(log[attempt - 1]) in EXPLAINED, log
        assert calls.keys() <= self._tables.final.keys(), "called, and never stored"

    def figures(self):
        final, stored = self._tables.final, self._submitters.stored
        calls = self._receiver.attempts()
        why = Counter(
            reason(one) for log in self._tables.log.values() for one in log if one.event != "finish"
        )
        return {
            "acknowledged": len(stored),
            "not acknowledged, and there": len(self._names.keys() - stored.keys()),
            "finished": sum(row.state == "finished" for row in final.values()),
            "cancelled": sum(row.state == "cancelled" for row in final.values()),
            "calls": sum(map(len, calls.values())),
            "called again": sum(len(attempts) > 1 for attempts in calls.values()),
        } | {f"attempts {word}": number for word, number in why.items()}


def test_killed_under_load_it_loses_and_doubles_nothing(make_server, place, receiver, capsys):
    figures = rounds_of_killing(make_server, place, receiver, ROUNDS, seed())
    assert figures["finished"] > 0
    print(figures)


@pytest.mark.chaos
def test_killed_many_times_it_loses_and_doubles_nothing(make_server, place, receiver, capsys):
    figures = rounds_of_killing(make_server, place, receiver, LONG, seed())
    with capsys.disabled():
        print(f"\n{place[0].partition(':')[0]}: {figures}")
    assert figures["attempts lost"] > 0, "nothing was killed while it ran: this proved little"


def test_a_server_that_was_paused_sends_nothing_stale(make_server, postgres_url, receiver, capsys):
    first, second = (make_server(postgres_url, errors=True) for _ in range(2))
    first.service("work", receiver.watch("/work", working(0.02)), **SERVICE)
    share = lambda: [one["shards"] for one in first.get("/v1/nodes").json["items"]]  # noqa: E731
    wait_until(lambda: share() == [32, 32], "each has its share")
    with Submitters([first.url, second.url], seed=seed()) as submitters:
        submitters.wait(300)
        first.pause()
        paused = time.time()
        time.sleep(PAUSE)
        calls = sum(map(len, receiver.attempts().values()))
        first.resume()
        submitters.wait(300)
    second.drained()
    figures = Account(second, postgres_url, submitters, receiver).settle()
    assert calls, figures
    again = [one for one in receiver.of("/work") if one.attempt > 1]
    assert all(one.at >= paused for one in again)
    with capsys.disabled():
        print(f"\n  paused for {PAUSE:g} s: {figures}")
