"""Several processes on one database, each of which may be killed at any moment.

On SQLite one dispatches while the others submit and stand by; on PostgreSQL they share the shards.
"""

import contextlib
import random

import pytest

from durable.ledger import Audit, Ledger, Tables
from durable.worker import Worker
from servers import wait_until

SHARDS = 64
TTL = 2.0  # seconds that the shards of one that died stay its own

pytestmark = pytest.mark.usefixtures("watched")


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def file_url(tmp_path):
    return f"sqlite:///{tmp_path}/tasks.db"


@contextlib.contextmanager
def workers(url, ledger, count, **options):
    """So many workers on one database, all of which have started."""
    with contextlib.ExitStack() as stack:
        team = [stack.enter_context(Worker(url, ledger, **options)) for _ in range(count)]
        for worker in team:
            worker.ask("stats")
        yield team


def owned(team):
    """How many shards each has."""
    return [worker.ask("stats")["owned"] for worker in team]


def ran_by(ledger, worker):
    """How many runs began in this process."""
    return sum(run["pid"] == worker.pid for runs in list(ledger.runs.values()) for run in runs)


def all_done(ledger, ids):
    ledger.wait(lambda: all(ledger.done[task_id] for task_id in ids), f"{len(ids)} have run")


def drained(team):
    """Let all run that is left, and stop everybody."""
    team[0].ask("drain")
    for worker in team:
        worker.stop()


class TestOneFile:
    def test_one_dispatches_and_the_others_stand_by(self, file_url, ledger):
        with workers(file_url, ledger, 3) as team:
            wait_until(lambda: sum(owned(team)) == SHARDS, "somebody dispatches")
            assert sorted(owned(team)) == [0, 0, SHARDS]
            ids = [task_id for worker in team for task_id in worker.ask("submit", delays=[0] * 20)]
            all_done(ledger, ids)
            (dispatcher,) = [worker for worker in team if ran_by(ledger, worker)]
            assert ran_by(ledger, dispatcher) == 60
            drained(team)
        assert Audit(ledger, Tables(file_url)).run()["runs"] == 60

    def test_when_the_one_that_dispatches_is_killed_another_takes_over(self, file_url, ledger):
        with workers(file_url, ledger, 3) as team:
            for _ in range(2):
                wait_until(lambda: sum(owned(team)) == SHARDS, "somebody dispatches")
                dispatcher = max(team, key=lambda worker: worker.ask("stats")["owned"])
                others = [worker for worker in team if worker is not dispatcher]
                ids = others[0].ask("submit", name="slow", delays=[0.01 * n for n in range(50)])
                ledger.wait(lambda ids=ids: any(map(ledger.ran, ids)), "some have begun")
                dispatcher.kill()
                ids += others[-1].ask("submit", delays=[0] * 10)
                all_done(ledger, ids)
                team.remove(dispatcher)
            drained(team)
        figures = Audit(ledger, Tables(file_url)).run()
        assert figures["acknowledged"] == figures["finished"] == 120

    def test_one_that_only_submits_never_dispatches(self, file_url, ledger):
        with workers(file_url, ledger, 1, dispatch=False) as (submitter,):
            ids = submitter.ask("submit", delays=[0] * 10)
            assert owned([submitter]) == [0]
            with Worker(file_url, ledger) as dispatcher:
                ids += submitter.ask("submit", delays=[0] * 10)
                all_done(ledger, ids)
                assert ran_by(ledger, dispatcher) == 20
                dispatcher.stop()
            submitter.stop()

    def test_all_load_it_at_once_while_dispatchers_are_killed(self, file_url, ledger):
        chance = random.Random(7)
        with contextlib.ExitStack() as stack:
            team = [stack.enter_context(Worker(file_url, ledger)) for _ in range(3)]
            for worker in team:
                worker.order("load", seed=chance.random(), clients=3)
            for _ in range(5):
                before = len(ledger.notes)
                ledger.wait(lambda before=before: len(ledger.notes) > before + 300, team[0].said)
                team.pop(chance.randrange(len(team))).kill()
                team.append(stack.enter_context(Worker(file_url, ledger)))
                team[-1].order("load", seed=chance.random(), clients=3)
            for worker in team:
                worker.kill()
            last = stack.enter_context(Worker(file_url, ledger))
            drained([last])
        Audit(ledger, Tables(file_url)).run()


class TestOnePostgres:
    def balanced(self, team):
        wait_until(lambda: sum(owned(team)) == SHARDS and fair(owned(team)), "shared fairly")

    def test_they_share_the_shards_and_each_runs_its_own(self, postgres_url, ledger):
        with workers(postgres_url, ledger, 3, ttl=TTL) as team:
            self.balanced(team)
            ids = [i for worker in team for i in worker.ask("submit", delays=[0.01] * 50)]
            all_done(ledger, ids)
            assert all(ran_by(ledger, worker) for worker in team)
            drained(team)
        assert Audit(ledger, Tables(postgres_url)).run()["acknowledged"] == 150

    def test_when_one_is_killed_the_others_take_its_shards(self, postgres_url, ledger):
        with workers(postgres_url, ledger, 3, ttl=TTL) as team:
            self.balanced(team)
            delays = [0.02 * n for n in range(60)]
            ids = [i for worker in team for i in worker.ask("submit", name="slow", delays=delays)]
            ledger.wait(lambda: ran_by(ledger, team[0]) > 0, "the first has begun")
            team[0].kill()
            ids += team[1].ask("submit", delays=[0] * 30)
            self.balanced(team[1:])
            all_done(ledger, ids)
            drained(team[1:])
        figures = Audit(ledger, Tables(postgres_url)).run()
        assert figures["acknowledged"] == figures["finished"] == 210

    def test_one_that_joins_gets_a_share_and_one_that_leaves_gives_it_back(
        self, postgres_url, ledger
    ):
        with workers(postgres_url, ledger, 1, ttl=TTL) as (first,):
            self.balanced([first])
            with Worker(postgres_url, ledger, ttl=TTL) as second:
                self.balanced([first, second])
                ids = first.ask("submit", delays=[0.01 * n for n in range(50)])
                second.stop()
            self.balanced([first])
            all_done(ledger, ids)
            drained([first])
        assert Audit(ledger, Tables(postgres_url)).run()["acknowledged"] == 50

    def test_all_load_it_at_once_while_some_are_killed(self, postgres_url, ledger):
        chance = random.Random(8)
        with contextlib.ExitStack() as stack:

            def another():
                worker = stack.enter_context(Worker(postgres_url, ledger, ttl=TTL))
                worker.order("load", seed=chance.random(), clients=3)
                return worker

            team = [another() for _ in range(3)]
            for _ in range(4):
                before = len(ledger.notes)
                ledger.wait(lambda before=before: len(ledger.notes) > before + 300, team[0].said)
                team.pop(chance.randrange(len(team))).kill()
                team.append(another())
            for worker in team:
                worker.kill()
            drained([stack.enter_context(Worker(postgres_url, ledger, ttl=TTL))])
        Audit(ledger, Tables(postgres_url)).run()


def fair(shares):
    return max(shares) - min(shares) <= 1
