"""The picture that `top` draws, of two looks at a server. Pure: it asks neither server nor time."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.cli.exits import clean
from tickwheel.cli.output import cell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
COUNTERS = ("submitted", "sent", "ended")
SERVICES = 20  # lines; the busiest first


class Look(NamedTuple):
    """What a server said at one moment; `at` is in seconds, on any clock."""

    at: float
    stats: dict[str, Any]
    wheel: dict[str, Any]
    services: list[dict[str, Any]]
    nodes: list[dict[str, Any]]

    def rates(self, before: Look) -> dict[str, float | None]:
        """Return how many per second were submitted, sent and ended since then."""
        return {name: self._rate(before, name) for name in COUNTERS}

    def _rate(self, before: Look, name: str) -> float | None:
        passed = self.at - before.at
        if passed <= 0 or name not in self.stats:
            return None
        more = total(self.stats[name]) - total(before.stats.get(name, 0))
        return max(0.0, more) / passed  # less than before: the server has been started anew

    def lateness(self, before: Look, part: float) -> float | None:
        """Return about how late, in seconds, that part was at most since then; None: unknown.

        When nothing was sent since then, it is over all that was ever sent.
        """
        now = buckets(self.stats)
        then = buckets(before.stats)
        if len(then) == len(now):
            since = [(bound, n - m) for (bound, n), (_, m) in zip(now, then, strict=True)]
            if since and since[-1][1] > 0 and all(n >= 0 for _, n in since):
                return quantile(since, part)
        return quantile(now, part) if now else told(self.stats, part)

    def document(self, before: Look) -> dict[str, Any]:
        """Return all of it as JSON."""
        return {
            "rates": self.rates(before),
            "lateness": {"p50": self.lateness(before, 0.5), "p99": self.lateness(before, 0.99)},
            "stats": self.stats,
            "wheel": self.wheel,
            "services": self.services,
            "nodes": self.nodes,
        }


def total(value: Any) -> float:
    """Return a counter, or the sum of those of a dictionary."""
    if isinstance(value, dict):
        return sum(map(total, value.values()))
    return float(value) if isinstance(value, int | float) else 0.0


def buckets(stats: dict[str, Any]) -> list[tuple[float, int]]:
    """Return the histogram of lateness: each bound, and how many did not exceed it."""
    lateness = stats.get("lateness")
    found = lateness.get("buckets") if isinstance(lateness, dict) else None
    return [(math.inf if bound is None else float(bound), int(n)) for bound, n in found or []]


def told(stats: dict[str, Any], part: float) -> float | None:
    """Return what the server says of lateness itself: over all that it ever sent."""
    lateness = stats.get("lateness")
    return lateness.get(f"p{part * 100:g}") if isinstance(lateness, dict) else None


def quantile(cumulative: Sequence[tuple[float, int]], part: float) -> float | None:
    """Return about how long that part took at most; beyond the last bound it is that bound."""
    if not cumulative or not cumulative[-1][1]:
        return None
    wanted = part * cumulative[-1][1]
    for (low, below), (high, count) in pairwise([(0.0, 0), *cumulative]):
        if count > below and count >= wanted:
            if math.isinf(high):
                return low
            return low + (high - low) * max(0.0, wanted - below) / (count - below)
    return cumulative[-1][0]


def drawn(server: str, before: Look, after: Look, trouble: str = "") -> RenderableType:
    """Return a frame."""
    from rich.console import Group  # noqa: PLC0415 - nothing else needs it
    from rich.text import Text  # noqa: PLC0415

    title = Text.assemble(("tickwheel top", "bold"), f"  {clean(server)}")
    if trouble:
        title.append(f"  {clean(trouble)}", "bold red")
    parts: list[RenderableType] = [title, Text(), figures(before, after), Text(), levels(after)]
    if after.services:
        parts += [Text(), services(after)]
    if after.nodes:
        parts += [Text(), nodes(after)]
    return Group(*parts)


def figures(before: Look, after: Look) -> Text:
    """Return the line of rates, the line of lateness and what is held."""
    from rich.text import Text  # noqa: PLC0415

    text = Text()
    for name, rate in after.rates(before).items():
        _add(text, f"{name} ", "–" if rate is None else f"{rate:,.0f}/s")
    for name, part in (("p50", 0.5), ("p99", 0.99)):
        _add(text, f"late {name} ", span(after.lateness(before, part)))
    if "uptime" in after.stats:
        _add(text, "up ", span(after.stats["uptime"]))
    text.append("\n")
    for name in ("held", "waiting", "running", "owned"):
        if name in after.stats:
            shards = " shards" if name == "owned" else ""
            _add(text, f"{name} ", f"{int(total(after.stats[name])):,}{shards}")
    stored = after.stats.get("store")
    for name, count in stored.items() if isinstance(stored, dict) else ():
        _add(text, f"{name} ", f"{int(total(count)):,}")
    return text


def _add(text: Text, name: str, value: str) -> None:
    text.append(clean(name), "bright_black")
    text.append(f"{clean(value)}   ", "bold")


def span(seconds: float | None) -> str:
    """Return a time span for people."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.1f} s"


class Bars:
    """The slots of a level, in one line or in as few of one length as have room."""

    def __init__(self, slots: Text) -> None:
        self._slots = slots

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        count = max(1, math.ceil(len(self._slots) / options.max_width))
        length = math.ceil(len(self._slots) / count)
        for start in range(0, len(self._slots), max(1, length)):
            line = self._slots[start : start + length]
            line.no_wrap = True
            yield line

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement  # noqa: PLC0415 - nothing else needs it

        return Measurement(1, max(1, len(self._slots)))


def levels(look: Look) -> Table:
    """Return the wheel: a bar for each slot of a level, and the slot that its pointer is at."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    for level in look.wheel.get("levels") or look.stats.get("wheel") or []:
        counts, pointer = list(level.get("counts", ())), int(level.get("pointer", 0))
        most = max(counts, default=0)
        bars = Text()
        for slot, count in enumerate(counts):
            style = "black on green" if slot == pointer else "cyan" if count else "bright_black"
            bars.append(block(count, most) if count or slot == pointer else "·", style)
        held = Text(f"{sum(counts):,}", justify="right")
        name = Text(clean(f"level {level.get('level', '?')}"), style="bold")
        table.add_row(name, Text(f"tick {tick_of(level.get('tick'))}"), held, Bars(bars))
    if not table.row_count:
        table.add_row(Text("the wheel is empty", style="bright_black"))
    return table


def tick_of(tick_ms: int | None) -> str:
    """Return a level's tick, which the server has in milliseconds, for people."""
    if tick_ms is None:
        return "?"
    return f"{tick_ms} ms" if tick_ms < 1000 else span(tick_ms / 1000)


def block(count: int, most: int) -> str:
    """Return a block as high as a count is beside the most."""
    return BLOCKS[0 if not count else max(1, round(count / most * (len(BLOCKS) - 1)))]


def services(look: Look) -> Table:
    """Return the services, those with most under way and waiting first."""
    live = look.stats.get("services")
    states: dict[str, Any] = live if isinstance(live, dict) else {}

    def busy(service: dict[str, Any]) -> tuple[float, str]:
        state = states.get(service.get("name", ""), {})
        load = total(state.get("running")) + total(state.get("waiting"))
        return -load, str(service.get("name"))

    table = _table("service", "", "breaker", "running", "waiting", "concurrency", "rate")
    ordered = sorted(look.services, key=busy)
    for service in ordered[:SERVICES]:
        state = states.get(service.get("name", ""), {})
        enabled = "enabled" if service.get("enabled", True) else "disabled"
        asked = [state.get(name) for name in ("breaker", "running", "waiting")]
        row = [
            service.get("name"),
            enabled,
            *asked,
            service.get("concurrency"),
            service.get("rate"),
        ]
        table.add_row(*map(cell, row))
    if len(ordered) > SERVICES:
        table.add_row(cell(f"and {len(ordered) - SERVICES:,} more"))
    return table


def nodes(look: Look) -> Table:
    """Return the nodes and how many shards each owns; a node that is alone has no lease."""
    titles = {"name": "node", "shards": "shards", "started_at": "started"}
    titles |= {"lease_until": "lease until"}
    told = [name for name in titles if any(node.get(name) is not None for node in look.nodes)]
    table = _table(*(titles[name] for name in told))
    for node in look.nodes:
        table.add_row(*(cell(node.get(name)) for name in told))
    return table


def _table(*titles: str) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for title in titles:
        table.add_column(title)
    return table
