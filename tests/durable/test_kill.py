"""A worker is killed at random moments, again and again: it loses, repeats and invents nothing.

It submits, runs, cancels and reschedules. In the end a ledger outside of the worker is
compared with the tables.

`make chaos` runs the long form; TICKWHEEL_KILL_ROUNDS and TICKWHEEL_KILL_SEED change it.
"""

import os
import random
import time

import pytest

from contracts.stores import watchdog
from durable.ledger import Audit, Ledger, Tables
from durable.worker import Worker

KINDS = {
    "sqlite": {},
    "sqlite-standard": {"driver": "sqlite3"},
    "postgres": {"ttl": 1.0},
    "postgres-solo": {"coordinator": "solo"},
}


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    """A URL, and the other options of a worker."""
    if request.param.startswith("postgres"):
        return request.getfixturevalue("postgres_url"), KINDS[request.param]
    return f"sqlite:///{tmp_path}/tasks.db", KINDS[request.param]


def rounds_of_killing(place, rounds, seed):
    """Kill a worker `rounds` times; then run the remaining tasks; return the figures."""
    url, options = place
    chance = random.Random(seed)
    ledger = Ledger()
    for number in range(rounds):
        with Worker(url, ledger, **options) as worker:
            worker.order("load", seed=chance.random())
            kill_at_random(worker, ledger, chance, number)
    with Worker(url, ledger, **options) as worker:
        worker.ask("drain")
        worker.stop()
    figures = Audit(ledger, Tables(url)).run()
    return {"rounds": rounds, "seed": seed} | figures


def kill_at_random(worker, ledger, chance, number):
    """Wait for a random number of notes, or sometimes for a moment while the worker starts."""
    if number % 4 == 3:
        time.sleep(chance.uniform(0, 0.4))
    else:
        enough = len(ledger.notes) + chance.randrange(1, chance.choice((50, 500, 2_000)))
        ledger.wait(lambda: len(ledger.notes) >= enough, worker.said)
        time.sleep(chance.choice((0, 0, chance.uniform(0, 0.01))))
    worker.kill()


def test_killed_at_random_moments_it_loses_and_doubles_nothing(place, capsys):
    seed = int(os.environ.get("TICKWHEEL_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}")
    with watchdog():
        figures = rounds_of_killing(place, 4, seed)
    assert figures["runs"] >= figures["finished"] > 0


@pytest.mark.chaos
def test_killed_many_times_it_loses_and_doubles_nothing(place, capsys):
    rounds = int(os.environ.get("TICKWHEEL_KILL_ROUNDS", "200"))
    seed = int(os.environ.get("TICKWHEEL_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}")
    with watchdog(60 + 10 * rounds):
        figures = rounds_of_killing(place, rounds, seed)
    with capsys.disabled():
        print(f"\n{place[0].split(':')[0]}: {figures}")
    assert figures["again: lost"] > 0, "nothing was killed while it ran: this proved little"
