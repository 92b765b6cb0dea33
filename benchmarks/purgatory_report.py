"""Format the purgatory's tables, goals and page, in Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from goals import Goal
from page import describe_run
from report import MISSING_CELL, cell, goal_table, ratio, table
from results import Results


@dataclass(frozen=True)
class Case:
    """A share of operations that no event completes."""

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
"""The other labels are floors, for the closed loop."""

CLOSED = 0
"""The rate that stands for the closed loop."""

MIN_ACHIEVED_SHARE = 0.98
MAX_LATE_MS = 100.0
"""A rate holds if this share of it is done, and 99 of 100 operations end within half a timeout."""

MIN_RATE = 60_000
STRETCH_RATE = 100_000
MIN_SPEEDUP = 3
FLAT_MIB = 2.0
MAX_WAITED_PERCENT = 20.0
"""A process that waited for a core longer than this, in % of the time, shows no knee."""

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
{100 * MIN_ACHIEVED_SHARE:.0f} % of it is done and 99 of 100 operations end at most
{MAX_LATE_MS:.0f} ms late. In brackets: the multiple of tickwheel's figure.
"""

METHOD = """\
## Method of the purgatory's benchmark

- Every row is a separate process. The generator, the purgatory and the thread of its deadlines
  share one interpreter, so everything has to fit into one core.
- 10,000 keys. Completing events follow after an exponential time of 20 ms on average, 150 ms at
  most; 1 % of the operations in the first case have no completing event, and 50 % in the second.
  All events are generated beforehand from a fixed seed.
- Latency counts from the moment at which an operation was planned to end: its completing event,
  or its start plus 200 ms. So it includes the delay of a generator that falls behind. The generator
  sleeps at least a millisecond when it has nothing to do, which is part of every latency.
- CPU is the process's time divided by the elapsed time, including the generator. Memory is the
  maximum growth of the resident set; *growth* is from the second quarter of the run to the last.
  Watched and delayed are maxima, which in the old design include completed operations.
- *Waited* is how long the process's threads waited for a core that other work on the machine used,
  in % of the elapsed time. If it is large, a rate that does not hold is not conclusive.
- A rate that does not hold is tried once more, and the better result counts; higher rates are
  then skipped.
- The closed loop completes the operation made 1,000 before and makes another, without a pause:
  the median of three runs. *Per core* is the rate divided by the CPU share of the process,
  which other work on the machine affects less.
- *The operations' methods alone* is the same loop without a purgatory, which makes each
  operation, checks it three times and completes it: the calls of methods written in Python that
  every design has to make. *The generator alone* makes the operations and drops them.
- In the second case a check also finds operations without a completing event, and checks them for
  nothing. The faster the closed loop, the more of them are in flight, so its rates there are
  further from these floors, and the faster design does more work per operation.
- The old design is plain Python. It keeps the same operations, whose tickets and locks are native
  as in tickwheel's, in a `heapq` until their timeout, and on lists per key that are swept after
  every 1,000 completions. It has no lock around `try_complete`, logs no exceptions, and pops all
  due operations at once: it does only what is indispensable.
"""


def holds(rate: int, figures: dict[str, float]) -> bool:
    """Return whether a run kept up with its rate."""
    return figures["achieved"] >= MIN_ACHIEVED_SHARE * rate and figures["p99_ms"] <= MAX_LATE_MS


def highest(results: Results, design: str) -> int:
    """Return the highest rate that held, or 0."""
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
    """Format both designs at every offered rate."""
    rows = [["offered/s", "", *COLUMNS.values(), "holds"]]
    for rate in [rate for rate in results.sizes() if rate != CLOSED]:
        for design in [design for design in LABELS if design in results.runs[rate]]:
            figures = {name: results.figure(rate, design, name) for name in COLUMNS}
            held = rate <= highest(results, design)
            shown = [rate_cell(results, rate, name, figures[name]) for name in COLUMNS]
            rows.append([f"{rate:,}", LABELS[design], *shown, "yes" if held else "no"])
    return table(rows, left=2)


def rate_cell(results: Results, rate: int, name: str, figure: float | None) -> str:
    """Format a figure, with its ratio to tickwheel's for the compared columns."""
    ours = results.figure(rate, "tickwheel", name)
    return cell(figure, ours if name in COMPARED and figure != ours else None)


def closed_table(measured: dict[str, Results]) -> str:
    """Format the highest rates of the closed loop."""
    rows = [["", *[f"{CASES[case].title.lower()}, {what}" for case in measured for what in WHAT]]]
    for design, label in LABELS.items():
        row = [label]
        for results in measured.values():
            row += [closed_cell(results, design, name) for name in WHAT.values()]
        rows.append(row)
    return table(rows)


WHAT = {"a second": "achieved", "per core": "per_core", "memory, MiB": "memory_mib"}


def closed_cell(results: Results, design: str, name: str) -> str:
    """Format a figure of the closed loop."""
    figure = results.figure(CLOSED, design, name)
    ours = results.figure(CLOSED, "tickwheel", name)
    return cell(figure, None if design == "tickwheel" or not figure else ours)


def goals(measured: dict[str, Results]) -> list[Goal]:
    """Return the goals and whether this run reached them."""
    few = measured["few"]
    return [
        knee(few, MIN_RATE, ""),
        knee(few, STRETCH_RATE, " (stretch goal)"),
        *[vs_old_design(measured[case], case) for case in measured],
        *[flat(measured[case], case) for case in measured],
    ]


def knee(results: Results, least: int, remark: str) -> Goal:
    """Require no knee below a rate; not measured if other work on the machine interfered."""
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
    if waited > MAX_WAITED_PERCENT and core >= least:
        return Goal(text, None, f"{figures}; without a core for {waited:.0f} % of the time")
    return Goal(text, False, figures)


def vs_old_design(results: Results, case: str) -> Goal:
    """Require to beat the old design, by processor time in the closed loop."""
    text = f"{CASES[case].title.lower()}: at least {MIN_SPEEDUP} × the old design's rate"
    ours = results.figure(CLOSED, "tickwheel", "per_core")
    theirs = results.figure(CLOSED, "old", "per_core")
    if ours is None or theirs is None:
        return Goal(text, None, MISSING_CELL)
    figures = f"{ours:,.0f} against {theirs:,.0f} per core: {ratio(ours / theirs)} ×"
    return Goal(text, ours >= MIN_SPEEDUP * theirs, figures)


def flat(results: Results, case: str) -> Goal:
    """Require that memory does not grow at a rate that holds."""
    text = f"{CASES[case].title.lower()}: memory flat (within {FLAT_MIB:.0f} MiB)"
    best = highest(results, "tickwheel")
    growth = results.figure(best, "tickwheel", "growth_mib") if best else None
    if growth is None:
        return Goal(text, None, "no rate held")
    theirs = results.figure(best, "old", "growth_mib")
    old = "" if theirs is None else f", old design {theirs:+.1f} MiB"
    return Goal(text, growth <= FLAT_MIB, f"{growth:+.1f} MiB at {best:,}/s{old}")


def show(measured: dict[str, Results]) -> str:
    """Return all tables."""
    parts = [f"{CASES[case].title}\n\n{rate_table(measured[case])}\n" for case in measured]
    parts += [f"Closed loop\n\n{closed_table(measured)}\n", goal_table(goals(measured))]
    return "\n".join(parts)


def page(measured: dict[str, Results], machine: dict[str, str], versions: dict[str, str]) -> str:
    """Return the whole page."""
    tables = [f"## {CASES[case].title}\n\n{rate_table(measured[case])}\n" for case in measured]
    parts = [
        f"# The purgatory\n\n{describe_run(machine, versions)}",
        PICTURE,
        READING,
        *tables,
        f"## Highest rate\n\n{closed_table(measured)}\n",
        f"## Goals of the purgatory\n\n{goal_table(goals(measured))}\n",
        METHOD,
    ]
    return "\n".join(parts)
