"""Runs a command, and freezes all its processes for a moment every few seconds.

    python tests/chaos/frozen.py [--seed N] [--every SECONDS] -- COMMAND...

A test whose result depends on timing fails under this. The exit code is the command's.
"""

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chaos import isolation

FROZEN_SECONDS = (0.2, 1.5)


def main():
    """Run the command in a group of its own, until it ends."""
    parser = argparse.ArgumentParser(description="Freeze a command now and then.")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--every", type=float, default=4.0, help="seconds, on average")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    if obstacle := isolation.obstacle():
        print(f"nothing can be frozen here: {obstacle}", file=sys.stderr)
        return 2
    chance = random.Random(given.seed)
    group = isolation.new_group("frozen")
    try:
        join = f'echo $$ > {group.path}/cgroup.procs; exec "$@"'
        process = subprocess.Popen(["/bin/sh", "-c", join, "sh", *given.command])
        freezes, seconds = freeze_until_end(process, group, chance, given.every)
    finally:
        group.remove()
    print(f"seed {given.seed}: frozen {freezes} times, {seconds:.1f} s in all", flush=True)
    return process.returncode


def freeze_until_end(process, group, chance, every):
    """Freeze the group until the process ends; return how often and how long it was frozen."""
    freezes, frozen = 0, 0.0
    while True:
        try:
            process.wait(chance.uniform(0.5, 1.5) * every)
        except subprocess.TimeoutExpired:
            seconds = chance.uniform(*FROZEN_SECONDS)
            group.freeze()
            time.sleep(seconds)
            group.thaw()
            freezes, frozen = freezes + 1, frozen + seconds
        else:
            return freezes, frozen


if __name__ == "__main__":
    sys.exit(main())
