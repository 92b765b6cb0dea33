"""Format the idle tracker's tables, goals and page, in Markdown."""

from __future__ import annotations

from goals import Goal, compare
from page import describe_run
from report import MISSING_CELL, cell, goal_table, ratio, table
from results import Results

SIZE = 100_000
PACKETS = 3_000
LABELS = {
    "tracker": "IdleTracker.touch",
    "many": "– touch_many, 1,000 at a time",
    "hand": "– touch, advanced by hand",
    "plain": "d[key] = value",
    "scan": "stamps, all scanned once a second",
    "asyncio": "asyncio call_later and cancel",
    "ordered": "OrderedDict.move_to_end",
    "heapq": "heapq, lazy deletion",
}
SHARES = ("tracker", "driver", "plain", "loop")
MAX_TIMES_PLAIN = 3.0
MIN_TIMES_CHEAPER = 20
MAX_SHARE_PERCENT = 0.2

PICTURE = """\
![Nanoseconds per packet of each way to detect silence, with 100,000 keys](idle.svg)
"""

READING = f"""\
The cost of a packet when {SIZE:,} keys are known, and the additional cost per second of a check for
silent keys. The last column is the sum of both at {PACKETS:,} packets a second, in % of
one core. In brackets: the multiple of `IdleTracker.touch`.
"""

METHOD = """\
## Method of the idle tracker's benchmark

- Every row is the median of seven separate processes, so that no other contestant's heap
  interferes, alternating with those of the other rows. In each of five rounds a process handles one
  packet of each of the 100,000 keys, in a shuffled order, and then checks for silent keys. Figures
  are the thread's processor time, including the loop around the calls. Keys are strings whose hash
  is cached.
- `touch` reads the system's clock; the other contestants read it from Python for their timestamps;
  *advanced by hand* and `d[key] = value` read no clock.
- asyncio's loop turns after every 1,000 packets, so that it sweeps its cancelled timers. `heapq`
  gets a push per packet, and is swept when more than half of it is outdated.
- The measured share of a core: packets of random keys in 100 bursts a second for 10 s, after the
  keys were added over one timeout of 30 s, so that keys without packets become due during the run.
  It is the thread's time in the bursts, minus that of the same bursts ignored, plus, for the
  tracker, the time of its timer's thread. Other work evicts the caches between two bursts, so a
  packet costs more here than in the table; the same loop with `d[key] = value` shows how much.
- The rate that one core sustains: touches without a pause for 10 s, with a timeout of 2 s so that
  every key is checked repeatedly, by the process's time.
"""


def packet_table(results: Results) -> str:
    """Format a row for every contestant."""
    rows = [["", "ns per packet", "extra µs per second", f"% of a core at {PACKETS:,}/s"]]
    for name, label in LABELS.items():
        packet, second = (figure(results, name, what) for what in ("packet", "second"))
        extra = f"{second / 1000:,.0f}" if name in ("scan", "ordered", "heapq") else MISSING_CELL
        added = share_at_rate(results, name)
        ours = share_at_rate(results, "tracker")
        share = f"{added:.3f}" + (f" ({ratio(added / ours)} ×)" if name != "tracker" else "")
        rows.append([label, cell(packet, figure(results, "tracker", "packet")), extra, share])
    return table(rows)


def share_at_rate(results: Results, name: str) -> float:
    """Return a contestant's share of a core at the packet rate, in %."""
    second = figure(results, name, "second") if name in ("scan", "ordered", "heapq") else 0.0
    return (figure(results, name, "packet") * PACKETS + second) / 1e9 * 100


def figure(results: Results, name: str, what: str) -> float:
    """Return a figure that every run has measured."""
    found = results.figure(SIZE, name, what)
    assert found is not None
    return found


def share(results: Results, name: str) -> float:
    """Return the measured share of a core, in %; stored in hundredths, for its digits."""
    return (results.figure(PACKETS, name, "share") or 0.0) / 100


def measured_share(results: Results) -> str:
    """Describe the tracker's share of a core."""
    reported = results.figure(PACKETS, "tracker", "reported") or 0
    ours, driver, plain, loop = (share(results, name) for name in SHARES)
    rate = figure(results, "tracker", "rate")
    return (
        f"Measured at {PACKETS:,} packets a second, with {reported:,.0f} keys a second falling "
        f"silent: the tracker takes\n{ours:.3f} % of one core, {driver:.3f} % of it on its timer's "
        f"thread, and `d[key] = value` in its\nplace {plain:.3f} %; the loop that paces the "
        f"packets takes {loop:.2f} %. "
        f"One core sustains {rate / 1e6:.1f} million touches a second.\n"
    )


def goals(results: Results) -> list[Goal]:
    """Return the goals and whether this run reached them."""
    ours, plain = figure(results, "tracker", "packet"), figure(results, "plain", "packet")
    theirs = figure(results, "asyncio", "packet")
    taken = share(results, "tracker")
    cheaper = f"{ours:,.0f} ns against {theirs:,.0f} ns: {ratio(theirs / ours)} × cheaper"
    return [
        compare(
            f"touch: at most {MAX_TIMES_PLAIN:.0f} × d[key] = value",
            ours,
            plain,
            MAX_TIMES_PLAIN,
            "ns",
        ),
        Goal(
            f"touch: at least {MIN_TIMES_CHEAPER} × cheaper than call_later and cancel",
            theirs >= MIN_TIMES_CHEAPER * ours,
            cheaper,
        ),
        Goal(
            f"at {PACKETS:,} packets/s: under {MAX_SHARE_PERCENT} % of one core",
            taken < MAX_SHARE_PERCENT,
            f"{taken:.3f} %, d[key] = value {share(results, 'plain'):.3f} %",
        ),
    ]


def show(results: Results) -> str:
    """Return all tables."""
    return f"{packet_table(results)}\n\n{measured_share(results)}\n{goal_table(goals(results))}"


def page(results: Results, machine: dict[str, str], versions: dict[str, str]) -> str:
    """Return the whole page."""
    parts = [
        f"# The idle tracker\n\n{describe_run(machine, versions)}",
        PICTURE,
        READING,
        f"{packet_table(results)}\n",
        measured_share(results),
        f"## Goals of the idle tracker\n\n{goal_table(goals(results))}\n",
        METHOD,
    ]
    return "\n".join(parts)
