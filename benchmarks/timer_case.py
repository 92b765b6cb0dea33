"""Run one case: a scenario, a timer, a size. Prints its rounds as JSON.

    python benchmarks/timer_case.py schedule timer 100000 --seconds 0.4

The garbage collector keeps its defaults. Scheduling is warmed up at 10^4 first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import islice

from case import WARM_UP_SIZE, within
from scenarios import Rounds
from timer_contestants import CONTESTANTS, LARGEST
from timer_scenarios import SCENARIOS
from timer_server import SERVERS, serve_and_ask

WARMED_UP = ("schedule", "argument")
REPEATED = WARMED_UP
"""The other scenarios have one round: it is long, or only the first counts."""


def main() -> None:
    """Run the case named on the command line."""
    arguments = parse()
    try:
        rounds = rounds_of(arguments.scenario, arguments.name, arguments.size, arguments.seconds)
        print(json.dumps({"rounds": rounds}), flush=True)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # without freeing a million timers one by one


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenario", choices=[*SCENARIOS, "server"])
    parser.add_argument("name", choices=sorted({*CONTESTANTS, *SERVERS}))
    parser.add_argument("size", type=int)
    parser.add_argument("--seconds", type=float, default=0.4)
    return parser.parse_args()


def rounds_of(scenario: str, name: str, size: int, seconds: float) -> list[dict[str, float]]:
    """Return the case's rounds."""
    if scenario == "server":
        return list(serve_and_ask(name, size, seconds))
    run, contestant = SCENARIOS[scenario], CONTESTANTS[name]()
    size = min(size, LARGEST.get(name, size))
    if scenario in WARMED_UP and name not in LARGEST:
        list(islice(run(contestant, WARM_UP_SIZE, seconds), 1))
    rounds: Rounds = run(contestant, size, seconds)
    return list(within(seconds, rounds) if scenario in REPEATED else islice(rounds, 1))


if __name__ == "__main__":
    main()
