"""The purgatory's tables, goals and page, in Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from goals import Goal
from page import described
from report import NOTHING, cell, goal_table, ratio, table
from results import Results


@dataclass(frozen=True)
class Case:
    """A share of operations that nobody completes."""

    title: str
    share: float


CASES = {"few": Case("Mostly completed", 0.01), "many": Case("Many timeouts", 0.5)}
LABELS = {
    "tickwheel": "tickwheel's purgatory",
    "old": "old design: heapq and sweeps",
    "calls": "the operations' methods alone",
    "none": "the generator alone",
}
DESIGNS = ("tickwheel", "old")
"""The others are floors, for the closed loop."""

CLOSED = 0
"""The rate that stands for the closed loop."""

HELD_SHARE = 0.98
MOST_LATE_MS = 100.0
"""A rate holds when so much of it is done, and 99 of 100 operations end within half a timeout."""

LEAST_RATE = 60_000
DREAM_RATE = 100_000
AT_LEAST_FASTER = 3
FLAT_MIB = 2.0
BUSY = 20.0
"""A process that waited for a core more than this share of the time, in %, shows no knee."""

COLUMNS = {
    "achieved": "achieved/s",
    "cpu": "CPU, %",
    "waited": "waited, %",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "expired": "timed out, %",
    "memory_mib": "memory, MiB",
    "growth_mib": "growth, MiB",
    "watched": "watched",
    "delayed": "delayed",
}
COMPARED = ("cpu", "p99_ms", "memory_mib", "watched", "delayed")

PICTURE = """\
![CPU, latency and memory against operations per second, for both designs](purgatory.svg)
"""

READING = f"""\
Operations with a timeout of 200 ms, each watched on one to three keys, are offered at a fixed rate
and completed by `check_and_complete` of one of their keys, or left to time out. A rate *holds* when
{100 * HELD_SHARE:.0f} % of it is done and 99 of 100 operations end at most {MOST_LATE_MS:.0f} ms
late. In brackets: how many times tickwheel's figure that is.
"""

METHOD = """\
## How the purgatory is measured

- Every row is a process of its own. The generator, the purgatory and the thread of its deadlines
  share one interpreter, so all of it has to fit into one core.
- 10,000 keys. Completing events come after an exponential time of 20 ms in the mean, 150 ms at
  most; nobody completes 1 % of the operations in the first case, and 50 % in the second. All is
  drawn beforehand from a fixed seed.
- Latency is counted from the moment at which an operation was planned to end: its completing event,
  or its start and 200 ms. So a generator that falls behind shows in it. The generator
  sleeps a millisecond at least when it has nothing to do, which is part of every latency.
- CPU is the process's time by the time that passed, generator included. Memory is the growth of the
  resident set at its most; *growth* is from the second quarter of the run to the last. Watched and
  delayed are the most that was seen, which in the old design includes completed operations.
- *Waited* is how long the process's threads wanted a core that other work on the machine had,
  in % of the time that passed. Where that is much, a rate that does not hold says little.
- A rate that does not hold is tried once more, and the better of the two counts; higher ones are
  then left out.
- The closed loop completes the operation made 1,000 before and makes another, without a pause:
  the median of three runs. *Per core* is the rate by the CPU share that the process was given,
  which other work on the machine moves less.
- *The operations' methods alone* is the same loop without a purgatory, which makes each
  operation, looks at it three times and completes it: the calls of methods written in Python that
  every design has to make. *The generator alone* makes the operations and lets them go.
- In the second case a check meets operations that nobody completes, and looks at them in vain. The
  closed loop has the more of them under way the faster it goes, so its rates there are further from
  these floors, and the faster design does more work per operation.
- The old design is plain Python. It keeps the same operations, whose tickets and locks are native
  as in tickwheel's, in a `heapq` until their timeout, and on lists per key that are swept after
  every 1,000 completed. It has no lock around `try_complete`, logs no exceptions, and pops all that
  is due in one go: whatever it could be spared.
"""


def holds(rate: int, figures: dict[str, float]) -> bool:
    """Whether a run kept up with its rate."""
    return figures["achieved"] >= HELD_SHARE * rate and figures["p99_ms"] <= MOST_LATE_MS


def highest(results: Results, design: str) -> int:
    """The highest rate that held, 0 when none did."""
    held = [
        rate
        for rate in results.sizes()
        if rate != CLOSED
        and (achieved := results.figure(rate, design, "achieved")) is not None
        and (late := results.figure(rate, design, "p99_ms")) is not None
        and holds(rate, {"achieved": achieved, "p99_ms": late})
    ]
    return max(held, default=0)


def rate_table(results: Results) -> str:
    """Both designs at every rate that was offered."""
    rows = [["offered/s", "", *COLUMNS.values(), "holds"]]
    for rate in [rate for rate in results.sizes() if rate != CLOSED]:
        for design in [design for design in LABELS if design in results.runs[rate]]:
            figures = {name: results.figure(rate, design, name) for name in COLUMNS}
            held = rate <= highest(results, design)
            shown = [rate_cell(results, rate, name, figures[name]) for name in COLUMNS]
            rows.append([f"{rate:,}", LABELS[design], *shown, "yes" if held else "no"])
    return table(rows, left=2)


def rate_cell(results: Results, rate: int, name: str, figure: float | None) -> str:
    """A figure, with its ratio to ours where that says something."""
    ours = results.figure(rate, "tickwheel", name)
    return cell(figure, ours if name in COMPARED and figure != ours else None)


def closed_table(measured: dict[str, Results]) -> str:
    """The highest rates of the closed loop."""
    rows = [["", *[f"{CASES[case].title.lower()}, {what}" for case in measured for what in WHAT]]]
    for design, label in LABELS.items():
        row = [label]
        for results in measured.values():
            row += [closed_cell(results, design, name) for name in WHAT.values()]
        rows.append(row)
    return table(rows)


WHAT = {"a second": "achieved", "per core": "per_core", "memory, MiB": "memory_mib"}


def closed_cell(results: Results, design: str, name: str) -> str:
    """A figure of the closed loop."""
    figure = results.figure(CLOSED, design, name)
    ours = results.figure(CLOSED, "tickwheel", name)
    return cell(figure, None if design == "tickwheel" or not figure else ours)


def goals(measured: dict[str, Results]) -> list[Goal]:
    """What was set out to be reached."""
    few = measured["few"]
    return [
        knee(few, LEAST_RATE, ""),
        knee(few, DREAM_RATE, " (the dream)"),
        *[beside_old(measured[case], case) for case in measured],
        *[flat(measured[case], case) for case in measured],
    ]


def knee(results: Results, least: int, remark: str) -> Goal:
    """No knee below a rate; not measured when other work on the machine stood in the way."""
    text = f"mostly completed: holds {least:,} operations/s{remark}"
    best = highest(results, "tickwheel")
    core = results.figure(CLOSED, "tickwheel", "per_core") or 0
    figures = f"{best:,} held; closed loop {core:,.0f} per core"
    failed = [rate for rate in results.sizes() if rate > best and rate != CLOSED]
    waited = results.figure(failed[0], "tickwheel", "waited") if failed else None
    if best >= least:
        return Goal(text, True, figures)
    if waited is None:
        return Goal(text, None, figures)
    if waited > BUSY and core >= least:
        return Goal(text, None, f"{figures}; without a core for {waited:.0f} % of the time")
    return Goal(text, False, figures)


def beside_old(results: Results, case: str) -> Goal:
    """Faster than the old design, by the processor time of the closed loop."""
    text = f"{CASES[case].title.lower()}: at least {AT_LEAST_FASTER} × the old design's rate"
    ours = results.figure(CLOSED, "tickwheel", "per_core")
    theirs = results.figure(CLOSED, "old", "per_core")
    if ours is None or theirs is None:
        return Goal(text, None, NOTHING)
    figures = f"{ours:,.0f} beside {theirs:,.0f} per core: {ratio(ours / theirs)} ×"
    return Goal(text, ours >= AT_LEAST_FASTER * theirs, figures)


def flat(results: Results, case: str) -> Goal:
    """Memory does not grow while a rate is held."""
    text = f"{CASES[case].title.lower()}: memory flat (within {FLAT_MIB:.0f} MiB)"
    best = highest(results, "tickwheel")
    growth = results.figure(best, "tickwheel", "growth_mib") if best else None
    if growth is None:
        return Goal(text, None, "no rate held")
    theirs = results.figure(best, "old", "growth_mib")
    beside = "" if theirs is None else f", old design {theirs:+.1f} MiB"
    return Goal(text, growth <= FLAT_MIB, f"{growth:+.1f} MiB at {best:,}/s{beside}")


def show(measured: dict[str, Results]) -> str:
    """All tables."""
    parts = [f"{CASES[case].title}\n\n{rate_table(measured[case])}\n" for case in measured]
    parts += [f"Closed loop\n\n{closed_table(measured)}\n", goal_table(goals(measured))]
    return "\n".join(parts)


def page(measured: dict[str, Results], machine: dict[str, str], versions: dict[str, str]) -> str:
    """The whole page."""
    tables = [f"## {CASES[case].title}\n\n{rate_table(measured[case])}\n" for case in measured]
    parts = [
        f"# The purgatory\n\n{described(machine, versions)}",
        PICTURE,
        READING,
        *tables,
        f"## As fast as it goes\n\n{closed_table(measured)}\n",
        f"## What the purgatory set out to reach\n\n{goal_table(goals(measured))}\n",
        METHOD,
    ]
    return "\n".join(parts)
