"""Servers are killed and paused under load: they lose, repeat and invent nothing.

In the end, what clients and receivers saw is compared with the tables.

`make chaos` runs the long form; TICKWHEEL_KILL_ROUNDS and TICKWHEEL_KILL_SEED change it.
"""

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack, suppress

import psycopg
import pytest

import servers
from durable.ledger import EXPLAINED, Tables, reason
from receivers import answering, slow
from service.harness import QUICK, Submitters, Watcher, metric, seed, working
from web.serving import wait_until

ROUNDS = 3
LEASE = 5.0
TTL = 4.0  # seconds of a node's lease, in the test with a pause
PAUSE = 7.5  # seconds: longer than the leases of nodes and calls

SERVICE = {"timeout": 0.5, "max_attempts": 1000, "backoff": QUICK, "concurrency": 20}
LONG = int(os.environ.get("TICKWHEEL_KILL_ROUNDS", "200")) // 5  # starting a server takes time

KINDS = {"sqlite": (), "postgres": ("--coordinator", "solo")}


@pytest.fixture
def places(tmp_path, postgres_url):
    """By kind, the URL of a store, and arguments for a server on it."""
    urls = {"sqlite": f"sqlite:///{tmp_path}/tasks.db", "postgres": postgres_url}
    return {kind: (urls[kind], arguments) for kind, arguments in KINDS.items()}


class Trial:
    """A server under load, with submitters and a receiver that survive its kills."""

    def __init__(self, make_server, place, number, lease=None, **service):
        self._url, arguments = place
        self._service = SERVICE | service
        self._chance = random.Random(number)
        self.receiver = Watcher()
        self.server = make_server(self._url, *arguments, errors=True, lease=lease)
        self.submitters = Submitters([self.server.url], seed=number)

    def __enter__(self):
        self.receiver.__enter__()
        endpoint = self.receiver.watch("/work", working(0.02))
        self.server.service("work", endpoint, **self._service)
        return self

    def __exit__(self, *_):
        self.receiver.__exit__()

    def kill(self):
        """Kill it at a random moment, sometimes a second time during its start."""
        self.submitters.wait(self._chance.randrange(20, 200))
        time.sleep(self._chance.choice((0, self._chance.uniform(0, 0.05))))
        if self._chance.random() < 0.3:
            self.server.kill()
            self.server.process.stdout.close()
            self.server.launch()
            time.sleep(self._chance.uniform(0, 0.5))
        self.server.restart()

    def stop(self):
        """Stop it with SIGTERM at a random moment, and start it again."""
        self.submitters.wait(self._chance.randrange(20, 200))
        assert self.server.stop() == 0, self.server.log()
        self.server.process.stdout.close()
        self.server.start()

    def settle(self):
        """Wait until all tasks are final, and check everything; return the figures."""
        self.server.drained()
        return Account(self.server, self._url, self.submitters, self.receiver).settle()


def rounds_of(verb, trials, rounds):
    """Apply a fault to each trial in turn, under load; check all, and return the figures."""
    with ExitStack() as stack:
        for trial in trials:
            stack.enter_context(trial)
        with ExitStack() as load:
            for trial in trials:
                load.enter_context(trial.submitters)
            for _ in range(rounds):
                for trial in trials:
                    verb(trial)
            for trial in trials:
                trial.submitters.wait(50)  # clients have reconnected by themselves
        return [trial.settle() for trial in trials]


class Account:
    """Compares the answers to clients and the calls of receivers with the tables.

    Each check is one guarantee; `figures` returns the counts.
    """

    def __init__(self, server, url, submitters, *receivers):
        self._submitters = submitters
        # A retried task may have changed its state between two lists of live tasks.
        wait_until(lambda: not Tables(url).live, "no task is live")
        self._tables = Tables(url)
        self._calls = {}
        for receiver in receivers:
            self._calls |= receiver.attempts()
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
        """A second call has the same id and a later attempt, and the log explains it."""
        calls = self._calls
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
        calls = self._calls
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


def test_killed_under_load_it_loses_and_duplicates_nothing(make_server, places):
    """Both stores in parallel, since a task of a killed server waits for the end of its lease."""
    number = seed()
    trials = [Trial(make_server, place, number, LEASE) for place in places.values()]
    for figures in rounds_of(Trial.kill, trials, ROUNDS):
        print(figures)
        assert figures["finished"] > 0


@pytest.mark.chaos
@pytest.mark.parametrize("kind", KINDS)
def test_killed_many_times_it_loses_and_duplicates_nothing(make_server, places, kind, capsys):
    trial = Trial(make_server, places[kind], seed(), LEASE)
    (figures,) = rounds_of(Trial.kill, [trial], LONG)
    with capsys.disabled():
        print(f"\n{kind}: {LONG} rounds: {figures}")
    assert figures["attempts lost"] > 0, "no call was under way at any kill: this proves little"


def test_stopped_under_load_it_loses_nothing_and_calls_nothing_twice(make_server, places):
    """No call times out, however slow this machine is: it would be repeated."""
    number = seed()
    trials = [Trial(make_server, place, number, timeout=60) for place in places.values()]
    for figures in rounds_of(Trial.stop, trials, 1):
        print(figures)
        assert figures["finished"] > 0
        assert figures["called again"] == 0, figures
        assert figures.get("attempts lost", 0) == 0, figures


@pytest.mark.parametrize("kind", KINDS)
def test_feedback_works_for_a_task_accepted_before_a_kill(make_server, places, receiver, kind):
    url, arguments = places[kind]
    server = make_server(url, *arguments)
    server.service("work", receiver.watch("/work", answering(202)), **SERVICE | {"timeout": 60})
    ids = server.now("work", 10)
    receiver.wait(lambda: receiver.ids("/work") == set(ids))
    # The answer 202 must be stored: a kill before that loses the call.
    noted = lambda: server.figures("work")["latency"]["count"] == 10  # noqa: E731
    wait_until(noted, "all were answered")
    for number, one in enumerate(ids):
        progress = {"outcome": "progress", "attempt": 1}
        server.post(f"/v1/tasks/{one}/feedback", progress, status=200)
        if number == 4:
            server.restart()
    server.restart()
    for one in ids:
        finished = {"outcome": "finished", "attempt": 1, "result": one}
        answer = server.post(f"/v1/tasks/{one}/feedback", finished, status=200).json
        assert answer == {"won": True, "state": "finished"}
    assert [server.ended(one)["result"] for one in ids] == ids
    assert receiver.attempts() == {one: [1] for one in ids}


def test_a_server_that_was_paused_sends_nothing_stale(make_server, postgres_url, receiver, capsys):
    """While one is paused, its leases end and the other repeats its calls; then it resumes.

    - Its calls under way: their receiver has closed the connections. On a kept connection that is a
      reason to send again, but not after the end of the lease.
    - Its last claim: the answer arrives when the lease has ended.
    """
    first = make_server(f"{postgres_url}?application_name=first", errors=True, lease=LEASE, ttl=TTL)
    second = make_server(postgres_url, errors=True, lease=LEASE, ttl=TTL)
    share = lambda: [one["shards"] for one in first.get("/v1/nodes").json["items"]]  # noqa: E731
    wait_until(lambda: share() == [32, 32], "each has its share")
    first.service("work", receiver.watch("/work", working(0.02)), **SERVICE)
    with ExitStack() as stack:
        sulking = stack.enter_context(Watcher())
        submitters = stack.enter_context(Submitters([first.url, second.url], seed=seed()))
        stack.callback(first.resume)  # in any case: its submitters wait for it
        submitters.wait(300)
        held = hold_calls(first, sulking)
        while not pause_amid_claim(postgres_url, first, "first"):
            first.resume()  # it took too long: the claim was abandoned
            held = hold_calls(first, sulking)
        sulking.down()
        sulking.watch("/held", answering(200))
        sulking.up()
        time.sleep(PAUSE)
        for one in held:
            assert second.ended(one)["state"] == "finished"
        before = sulking.attempts()
        first.resume()
        submitters.wait(300)
    second.drained()
    figures = Account(second, postgres_url, submitters, receiver, sulking).settle()
    unsent = [attempts for attempts in receiver.attempts().values() if attempts[0] > 1]
    with capsys.disabled():
        print(f"\n  paused for {PAUSE:g} s: {figures}, claimed and not sent: {len(unsent)}")
    assert unsent, "what it had claimed it has not sent"
    assert sulking.attempts() == before, "what it had under way it has not sent again"


def test_workers_end_when_their_supervisor_is_killed(make_server, postgres_url):
    server = make_server(postgres_url, "--workers", "2", errors=True)
    wait_until(lambda: len(server.get("/v1/nodes").json["items"]) == 2, "both workers serve")
    workers = servers._descendants(server.pid)
    try:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        gone = lambda: all(map(servers._gone, workers))  # noqa: E731
        wait_until(gone, "the workers have ended, too")
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    server.hang_up()
    server.process.stdout.close()
    server.start()
    wait_until(lambda: server.get("/readyz").status == 200, "it serves again")


def test_metrics_work_while_the_database_is_down(make_server):
    with servers.PostgresServer() as database:
        server = make_server(database.url, errors=True)
        database.kill()
        page = server.get("/metrics", status=200).body.decode()
        assert metric(page, "tickwheel_sent_total") == 0
        server.stop()


@pytest.mark.chaos
def test_a_database_that_is_killed_under_load_loses_nothing(make_server, receiver):
    with servers.PostgresServer(durable=True) as database:
        server = make_server(database.url, errors=True)
        server.service("work", receiver.watch("/work", working(0.02)), **SERVICE)
        with Submitters([server.url], seed=seed()) as submitters:
            submitters.wait(100)
            database.kill()
            assert server.get("/healthz").status == 200
            wait_until(lambda: server.get("/readyz").status == 503, "it says that it cannot work")
            assert server.get("/readyz").json["status"] == "unavailable"
            refused = server.post("/v1/tasks", {"service": "work"})
            assert (refused.status, refused.code) == (503, "store_unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            database.start()
            submitters.wait(100)
        server.drained()
        print(Account(server, database.url, submitters, receiver).settle())
        server.stop()


def pause_amid_claim(url, server, name):
    """Pause a server during a claim; return whether the claim was granted."""
    waiting = """
        SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND application_name = %s AND query LIKE %s
    """
    values = (name, "%FOR NO KEY UPDATE SKIP LOCKED%")
    granted = (
        "SELECT count(*) FROM task WHERE state = 'running' AND node = %s AND updated_at_ms >= %s"
    )
    (node,) = [one["name"] for one in server.get("/v1/nodes").json["items"] if one["this"]]
    with psycopg.connect(url) as locking, psycopg.connect(url, autocommit=True) as looking:
        ask = lambda *words: looking.execute(*words).fetchone()[0]  # noqa: E731
        locking.execute("LOCK TABLE task IN ACCESS EXCLUSIVE MODE")
        locked_at = ask("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)")
        wait_until(lambda: ask(waiting, values), "a claim waits")
        server.pause()
        locking.commit()
        wait_until(lambda: not ask(waiting, values), "the claim waits no more")
        return ask(granted, (node, locked_at)) > 0


def hold_calls(server, receiver):
    """Start calls of this server on reused connections, and hold them; return their ids."""
    receiver.wait(lambda: receiver.held == 0)
    endpoint = receiver.watch("/held", working(0.05))
    server.service("held", endpoint, **SERVICE | {"timeout": 4})
    assert {server.ended(one)["state"] for one in server.now("held", 10)} == {"finished"}
    receiver.watch("/held", slow)
    ids = server.now("held", 10)
    receiver.wait(lambda: receiver.held == 10)
    return ids
