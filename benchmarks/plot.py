"""Plot nanoseconds per operation against pending timers, one panel per operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from results import Results

PANELS = {
    "schedule": "schedule, 1–600 s",
    "cancel": "cancel, random order",
    "churn": "churn: cancel one, schedule one",
    "expire": "expire",
}
OFF_THE_CHART_NS = 100_000
"""sched's linear search would compress all other lines; it is mentioned, not drawn."""

STYLES: dict[str, tuple[str, str, float]] = {
    "native": ("#c2185b", "o", 2.6),
    "pure": ("#f48fb1", "o", 1.4),
    "asyncio": ("#1565c0", "s", 1.4),
    "uvloop": ("#64b5f6", "s", 1.4),
    "heapq": ("#6d4c41", "^", 1.4),
    "sched": ("#bcaaa4", "^", 1.4),
    "kafka": ("#2e7d32", "D", 1.4),
    "netty": ("#81c784", "D", 1.4),
    "executor": ("#9e9d24", "D", 1.4),
    "floor": ("#9e9e9e", "", 1.2),
}
"""Name -> colour, marker, width: one hue per kind, tickwheel's the strongest."""


@contextmanager
def drawing(path: Path, *grid: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, then write them as SVG; ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": "tickwheel", "svg.fonttype": "none", "font.size": 10}):
        figure, axes = plt.subplots(*grid, **options)
        yield figure, axes
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def draw(results: Results, path: Path) -> None:
    """Write the plot as SVG; raise ImportError without matplotlib."""
    with drawing(path, 2, 2, figsize=(10, 8), sharex=True) as (figure, axes):
        for axis, (operation, title) in zip(axes.flat, PANELS.items(), strict=True):
            draw_panel(axis, results, operation, title)
        for axis in axes[1]:
            axis.set_xlabel("pending timers")
        for axis in axes[:, 0]:
            axis.set_ylabel("ns per operation")
        lines, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="lower center", ncols=4, frameon=False)
        figure.tight_layout(rect=(0, 0.09, 1, 1))


def draw_panel(axis: Any, results: Results, operation: str, title: str) -> None:
    """Draw one operation, every contestant, on logarithmic axes; Netty until settled."""
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    for name, label in results.labels.items():
        points = [
            (size, figure)
            for size in results.sizes()
            if (figure := results.settled(size, name, operation)) is not None
        ]
        if any(figure > OFF_THE_CHART_NS for _, figure in points):
            axis.text(0.03, 0.94, f"{label}: off the chart", transform=axis.transAxes, fontsize=9)
        elif points:
            draw_line(axis, name, label, points)


def draw_line(axis: Any, name: str, label: str, points: list[tuple[int, float]]) -> None:
    """Draw one contestant."""
    colour, marker, width = STYLES[name]
    axis.plot(
        *zip(*points, strict=True),
        label=label,
        color=colour,
        marker=marker,
        linewidth=width,
        markersize=5,
        linestyle="--" if name == "floor" else "-",
        zorder=3 if name == "native" else 2,
    )
