"""The idle tracker's tables, goals and page, in Markdown."""

from __future__ import annotations

from goals import Goal, compared
from page import described
from report import NOTHING, cell, goal_table, ratio, table
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
MOST_PLAIN = 3.0
AT_LEAST_CHEAPER = 20
MOST_SHARE = 0.2

PICTURE = """\
![Nanoseconds per packet of each way to notice silence, with 100,000 keys](idle.svg)
"""

READING = f"""\
What a packet costs when {SIZE:,} keys are known, and what a second costs besides when the silent
ones have to be looked for. The last column adds the two up at {PACKETS:,} packets a second, in % of
one core. In brackets: how many times `IdleTracker.touch` that is.
"""

METHOD = """\
## How the idle tracker is measured

- Every row is the median of seven processes of its own, in which no neighbour's heap disturbs, run
  in turn with those of the other rows. In each of five rounds a process hears once of each of the
  100,000 keys, in a shuffled order, and then looks for silent ones. Figures are the thread's
  processor time; the loop around the calls is part of each. Keys are strings whose hash is known.
- `touch` reads the system's clock, as do the stamps of the others, which do it from Python;
  *advanced by hand* and `d[key] = value` read none.
- asyncio's loop turns after every 1,000 packets, so that it sweeps its cancelled timers. `heapq`
  gets a push per packet, and is swept when more than half of it is outdated.
- The measured share of a core: packets of random keys in 100 bursts a second for 10 s, after the
  keys were filled in over one timeout of 30 s, so that the ones not heard of fall due meanwhile.
  It is the thread's time in the bursts, minus that of bursts that nobody hears, and for the tracker
  the time of its timer's thread. Between two bursts the caches are lost to others, so a packet
  costs more here than in the table; the same loop with `d[key] = value` shows how much.
- The rate that one core holds: touches without a pause for 10 s, with a timeout of 2 s so that
  every key is looked at again and again, by the process's time.
"""


def packet_table(results: Results) -> str:
    """Every contestant."""
    rows = [["", "ns per packet", "µs per second besides", f"% of a core at {PACKETS:,}/s"]]
    for name, label in LABELS.items():
        packet, second = (figure(results, name, what) for what in ("packet", "second"))
        beside = f"{second / 1000:,.0f}" if name in ("scan", "ordered", "heapq") else NOTHING
        added = added_up(results, name)
        ours = added_up(results, "tracker")
        share = f"{added:.3f}" + (f" ({ratio(added / ours)} ×)" if name != "tracker" else "")
        rows.append([label, cell(packet, figure(results, "tracker", "packet")), beside, share])
    return table(rows)


def added_up(results: Results, name: str) -> float:
    """A contestant's share of a core at the packet rate, in %."""
    second = figure(results, name, "second") if name in ("scan", "ordered", "heapq") else 0.0
    return (figure(results, name, "packet") * PACKETS + second) / 1e9 * 100


def figure(results: Results, name: str, what: str) -> float:
    """What every run has measured."""
    found = results.figure(SIZE, name, what)
    assert found is not None
    return found


def share(results: Results, name: str) -> float:
    """The measured share of a core, in %; kept in hundredths, for its digits."""
    return (results.figure(PACKETS, name, "share") or 0.0) / 100


def measured_share(results: Results) -> str:
    """What the tracker takes of a core, in words."""
    reported = results.figure(PACKETS, "tracker", "reported") or 0
    ours, driver, plain, loop = (share(results, name) for name in SHARES)
    rate = figure(results, "tracker", "rate")
    return (
        f"Measured at {PACKETS:,} packets a second, with {reported:,.0f} keys a second falling "
        f"silent: the tracker takes\n{ours:.3f} % of one core, {driver:.3f} % of it on its timer's "
        f"thread, and `d[key] = value` in its\nplace {plain:.3f} %; the loop that paces the "
        f"packets takes {loop:.2f} %. "
        f"One core holds {rate / 1e6:.1f} million touches a second.\n"
    )


def goals(results: Results) -> list[Goal]:
    """What was set out to be reached."""
    ours, plain = figure(results, "tracker", "packet"), figure(results, "plain", "packet")
    theirs = figure(results, "asyncio", "packet")
    taken = share(results, "tracker")
    cheaper = f"{ours:,.0f} ns beside {theirs:,.0f} ns: {ratio(theirs / ours)} × cheaper"
    return [
        compared(
            f"touch: at most {MOST_PLAIN:.0f} × d[key] = value", ours, plain, MOST_PLAIN, "ns"
        ),
        Goal(
            f"touch: at least {AT_LEAST_CHEAPER} × cheaper than call_later and cancel",
            theirs >= AT_LEAST_CHEAPER * ours,
            cheaper,
        ),
        Goal(
            f"at {PACKETS:,} packets/s: under {MOST_SHARE} % of one core",
            taken < MOST_SHARE,
            f"{taken:.3f} %, d[key] = value {share(results, 'plain'):.3f} %",
        ),
    ]


def show(results: Results) -> str:
    """All tables."""
    return f"{packet_table(results)}\n\n{measured_share(results)}\n{goal_table(goals(results))}"


def page(results: Results, machine: dict[str, str], versions: dict[str, str]) -> str:
    """The whole page."""
    parts = [
        f"# The idle tracker\n\n{described(machine, versions)}",
        PICTURE,
        READING,
        f"{packet_table(results)}\n",
        measured_share(results),
        f"## What the idle tracker set out to reach\n\n{goal_table(goals(results))}\n",
        METHOD,
    ]
    return "\n".join(parts)
