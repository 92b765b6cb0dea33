"""Run one case: a contestant, a scenario, a size. Prints its rounds as JSON.

    python benchmarks/case.py native churn 100000 --seconds 0.4

The garbage collector stays on, with its default thresholds. A first round, at 10^4, is discarded:
it warms the interpreter's specialised bytecode. Memory is measured cold.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice

from contestants import CONTESTANTS, contestant
from scenarios import SCENARIOS, Round, Rounds

WARM_UP_SIZE = 10_000
MIN_ROUNDS = 3
MAX_ROUNDS = 25


def main() -> None:
    """Run the case named on the command line."""
    arguments = parse()
    try:
        chosen = contestant(arguments.contestant)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    scenario = SCENARIOS[arguments.scenario]
    if arguments.scenario != "memory":
        list(islice(scenario(chosen, WARM_UP_SIZE), 1))
    rounds = list(within(arguments.seconds, scenario(chosen, arguments.size)))
    print(json.dumps({"rounds": rounds}))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("size", type=int)
    parser.add_argument("--seconds", type=float, default=0.4, help="for all rounds together")
    return parser.parse_args()


def within(seconds: float, rounds: Rounds) -> Iterator[Round]:
    """Yield rounds until the time is up: three if they take at most 5 x `seconds`, else one."""
    started = time.perf_counter()
    for number, round_ in enumerate(islice(rounds, MAX_ROUNDS), start=1):
        yield round_
        elapsed = time.perf_counter() - started
        if elapsed > (seconds if number >= MIN_ROUNDS else 5 * seconds):
            return


if __name__ == "__main__":
    main()
