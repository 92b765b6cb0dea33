"""The frame that `top` draws from two snapshots of a server. Pure: no requests, no clock."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.cli.output import cell, format_duration
from tickwheel.cli.terminal import escape_controls

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
COUNTERS = ("submitted", "sent", "ended")
MAX_SERVICES = 20  # lines; the busiest come first


class Snapshot(NamedTuple):
    """The answers of a server at one moment; `at` is in seconds, on any clock."""

    at: float
    stats: dict[str, Any]
    wheel: dict[str, Any]
    services: list[dict[str, Any]]
    nodes: list[dict[str, Any]]

    def rates(self, before: Snapshot) -> dict[str, float | None]:
        """Return how many tasks per second were submitted, sent and ended since `before`."""
        return {name: self._rate(before, name) for name in COUNTERS}

    def _rate(self, before: Snapshot, name: str) -> float | None:
        passed = self.at - before.at
        if passed <= 0 or self.stats.get(name) is None:
            return None
        more = total(self.stats[name]) - total(before.stats.get(name, 0))
        return max(0.0, more) / passed  # negative after the server has restarted

    def lateness(self, before: Snapshot, share: float) -> float | None:
        """Return an estimate of a quantile of lateness since `before`, in seconds; None: unknown.

        If nothing was sent since `before`, the quantile covers everything ever sent.
        """
        now = buckets(self.stats)
        then = buckets(before.stats)
        if len(then) == len(now):
            since = [(bound, n - m) for (bound, n), (_, m) in zip(now, then, strict=True)]
            if since and since[-1][1] > 0 and all(n >= 0 for _, n in since):
                return quantile(since, share)
        return quantile(now, share) if now else reported_quantile(self.stats, share)

    def document(self, before: Snapshot) -> dict[str, Any]:
        """Return the snapshot, with rates and lateness, as JSON."""
        return {
            "rates": self.rates(before),
            "lateness": {"p50": self.lateness(before, 0.5), "p99": self.lateness(before, 0.99)},
            "stats": self.stats,
            "wheel": self.wheel,
            "services": self.services,
            "nodes": self.nodes,
        }


def total(value: Any) -> float:
    """Return a counter, or the sum of a dictionary of counters."""
    if isinstance(value, dict):
        return sum(map(total, value.values()))
    return float(value) if isinstance(value, int | float) else 0.0


def buckets(stats: dict[str, Any]) -> list[tuple[float, int]]:
    """Return the histogram of lateness: each bound, and the number of tasks within it."""
    lateness = stats.get("lateness")
    found = lateness.get("buckets") if isinstance(lateness, dict) else None
    return [(math.inf if bound is None else float(bound), int(n)) for bound, n in found or []]


def reported_quantile(stats: dict[str, Any], share: float) -> float | None:
    """Return the server's own quantile of lateness, over everything that it ever sent."""
    lateness = stats.get("lateness")
    return lateness.get(f"p{share * 100:g}") if isinstance(lateness, dict) else None


def quantile(cumulative: Sequence[tuple[float, int]], share: float) -> float | None:
    """Estimate a quantile of a cumulative histogram; the last finite bound is its maximum."""
    if not cumulative or not cumulative[-1][1]:
        return None
    wanted = share * cumulative[-1][1]
    for (low, below), (high, count) in pairwise([(0.0, 0), *cumulative]):
        if count > below and count >= wanted:
            if math.isinf(high):
                return low
            return low + (high - low) * max(0.0, wanted - below) / (count - below)
    return cumulative[-1][0]


def draw_frame(server: str, before: Snapshot, after: Snapshot, trouble: str = "") -> RenderableType:
    """Return one frame of `top`."""
    from rich.console import Group  # noqa: PLC0415 - JSON does not need rich
    from rich.text import Text  # noqa: PLC0415

    title = Text.assemble(("tickwheel top", "bold"), f"  {escape_controls(server)}")
    if trouble:
        title.append(f"  {escape_controls(trouble)}", "bold red")
    parts: list[RenderableType] = [title, Text(), figures(before, after), Text(), levels(after)]
    if after.services:
        parts += [Text(), services(after)]
    if after.nodes:
        parts += [Text(), nodes(after)]
    return Group(*parts)


def figures(before: Snapshot, after: Snapshot) -> Text:
    """Return the lines with rates, lateness and numbers of tasks."""
    from rich.text import Text  # noqa: PLC0415

    text = Text()
    for name, rate in after.rates(before).items():
        _add(text, f"{name} ", "–" if rate is None else f"{rate:,.0f}/s")
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        _add(text, f"late {name} ", format_duration(after.lateness(before, share)))
    if "uptime" in after.stats:
        _add(text, "up ", format_duration(after.stats["uptime"]))
    text.append("\n")
    for name in ("held", "waiting", "running", "owned"):
        if after.stats.get(name) is not None:
            shards = " shards" if name == "owned" else ""
            _add(text, f"{name} ", f"{int(total(after.stats[name])):,}{shards}")
    stored = after.stats.get("store")
    for name, count in stored.items() if isinstance(stored, dict) else ():
        _add(text, f"{name} ", f"{int(total(count)):,}")
    return text


def _add(text: Text, name: str, value: str) -> None:
    text.append(escape_controls(name), "bright_black")
    text.append(f"{escape_controls(value)}   ", "bold")


class Bars:
    """The slots of a level, on one line, or wrapped into the fewest lines of equal length."""

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
        from rich.measure import Measurement  # noqa: PLC0415

        return Measurement(1, max(1, len(self._slots)))


def levels(snapshot: Snapshot) -> Table:
    """Return the wheel: for each level a bar per slot, with the pointer's slot highlighted."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    for level in snapshot.wheel.get("levels") or snapshot.stats.get("wheel") or []:
        counts, pointer = list(level.get("counts", ())), int(level.get("pointer", 0))
        most = max(counts, default=0)
        bars = Text()
        for slot, count in enumerate(counts):
            style = "black on green" if slot == pointer else "cyan" if count else "bright_black"
            bars.append(block(count, most) if count or slot == pointer else "·", style)
        tasks = Text(f"{sum(counts):,}", justify="right")
        name = Text(escape_controls(f"level {level.get('level', '?')}"), style="bold")
        table.add_row(name, Text(f"tick {format_tick(level.get('tick'))}"), tasks, Bars(bars))
    if not table.row_count:
        hidden = "held" in snapshot.wheel and snapshot.wheel["held"] is None
        why = "the wheel is shown to tokens of all namespaces" if hidden else "the wheel is empty"
        table.add_row(Text(why, style="bright_black"))
    return table


def format_tick(tick_ms: int | None) -> str:
    """Return a level's tick, given in milliseconds, for people."""
    if tick_ms is None:
        return "?"
    return f"{tick_ms} ms" if tick_ms < 1000 else format_duration(tick_ms / 1000)


def block(count: int, most: int) -> str:
    """Return a block whose height is proportional to a count."""
    return BLOCKS[0 if not count else max(1, round(count / most * (len(BLOCKS) - 1)))]


def services(snapshot: Snapshot) -> Table:
    """Return the services, those with the most running and waiting tasks first."""
    live = snapshot.stats.get("services")
    states: dict[str, Any] = live if isinstance(live, dict) else {}

    def busy(service: dict[str, Any]) -> tuple[float, str]:
        state = states.get(service.get("name", ""), {})
        load = total(state.get("running")) + total(state.get("waiting"))
        return -load, str(service.get("name"))

    table = _table("service", "", "breaker", "running", "waiting", "concurrency", "rate")
    ordered = sorted(snapshot.services, key=busy)
    for service in ordered[:MAX_SERVICES]:
        state = states.get(service.get("name", ""), {})
        enabled = {None: "?", True: "enabled"}.get(service.get("enabled"), "disabled")
        asked = [state.get(name) for name in ("breaker", "running", "waiting")]
        row = [
            service.get("name"),
            enabled,
            *asked,
            service.get("concurrency", "?"),
            service.get("rate", "?"),
        ]
        table.add_row(*map(cell, row))
    if len(ordered) > MAX_SERVICES:
        table.add_row(cell(f"and {len(ordered) - MAX_SERVICES:,} more"))
    return table


def nodes(snapshot: Snapshot) -> Table:
    """Return the nodes and how many shards each owns; a single node has no lease."""
    titles = {"name": "node", "state": "", "shards": "shards", "started_at": "started"}
    titles |= {"lease_until": "lease until", "held": "held", "waiting": "waiting"}
    titles |= {"running": "running", "error": ""}
    figures = snapshot.stats.get("by_node")
    by_name = {one.get("name"): one for one in figures} if isinstance(figures, list) else {}
    rows = [{**by_name.get(node.get("name"), {}), **node} for node in snapshot.nodes]
    known = [name for name in titles if any(row.get(name) is not None for row in rows)]
    table = _table(*(titles[name] for name in known))
    for node in rows:
        table.add_row(*(cell(node.get(name)) for name in known))
    return table


def _table(*titles: str) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for title in titles:
        table.add_column(title)
    return table
