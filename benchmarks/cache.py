"""Simulate cache misses and count instructions by number of timers, with callgrind.

    python benchmarks/cache.py [SIZE ...]

Virtual machines seldom offer the processor's own counters, so callgrind simulates fixed caches. The
simulation has no prefetching and no address translation (TLB).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import instructions
from counted import CHURN_COUNT
from instructions import Profile

FIRST_LEVEL = "32 KiB"
LAST_LEVEL = "32 MiB"
SIMULATION = (
    "--cache-sim=yes",
    "--I1=32768,8,64",
    "--D1=32768,8,64",
    "--LL=33554432,16,64",
    "--instr-atstart=no",
)


@dataclass(frozen=True)
class Growth:
    """Counts at one size, each per operation."""

    size: int
    schedule_instructions: float
    cancel_instructions: float
    expire_instructions: float | None
    churn_first_misses: float
    churn_last_misses: float
    expire_first_misses: float | None
    expire_last_misses: float | None


def simulate(n: int) -> Growth:
    """Simulate churn with N pending, interpreter included; then expiry of N, up to 10^6."""
    with TemporaryDirectory() as directory:
        last = instructions.run(n, Path(directory), *SIMULATION, control=True)
        churn = instructions.read_profile(next(Path(directory).glob("*.out.1")))
        expire = instructions.read_profile(last)
    executed = instructions.per_operation(churn, n, "Ir")
    executed |= instructions.per_operation(expire, n, "Ir")
    expires = "expire" in executed
    return Growth(
        size=n,
        schedule_instructions=executed["schedule"],
        cancel_instructions=executed["cancel"],
        expire_instructions=executed.get("expire"),
        churn_first_misses=misses(churn, "totals", "D1") / CHURN_COUNT,
        churn_last_misses=misses(churn, "totals", "DL") / CHURN_COUNT,
        expire_first_misses=misses(expire, "Wheel_advance", "D1") / n if expires else None,
        expire_last_misses=misses(expire, "Wheel_advance", "DL") / n if expires else None,
    )


def misses(profile: Profile, function: str, cache: str) -> float:
    """Return a function's data misses in one cache, reads and writes together."""
    costs = profile[function].costs
    return costs[f"{cache}mr"] + costs[f"{cache}mw"]


def why_not() -> str | None:
    """Return why the simulation cannot run here, or None."""
    return instructions.why_not()


if __name__ == "__main__":
    reason = why_not()
    if reason:
        sys.exit(f"cannot simulate the caches: {reason}")
    for size in [int(size) for size in sys.argv[1:]] or [10_000, 100_000, 1_000_000]:
        print(simulate(size))
