"""Plot submits, burst and lateness of the durable scheduler: a bar per library."""

from __future__ import annotations

from pathlib import Path

from plot import drawing
from results import Results

OURS, OTHERS = "#c2185b", "#90a4ae"
MINE = ("sqlite", "postgres")
PANELS = {
    "one_caller": "single submits per second, one client",
    "burst": "burst at one instant, tasks per second",
    "p99_ms": "lateness p99, ms",
}


def draw(results: Results, path: Path) -> None:
    """Write the plot as SVG; raise ImportError without matplotlib."""
    labels = results.labels
    names = [name for name in reversed(labels) if name in results.runs[0]]
    height = 1.2 + 0.32 * len(names)
    with drawing(path, 1, len(PANELS), figsize=(12, height), sharey=True) as (picture, axes):
        for axis, (column, title) in zip(axes, PANELS.items(), strict=True):
            values = [results.figure(0, name, column) or 0.0 for name in names]
            colours = [OURS if name in MINE else OTHERS for name in names]
            bars = axis.barh(range(len(names)), values, color=colours)
            texts = [f"{one:,.0f}" if one > 10 else f"{one:.1f}" if one else "" for one in values]
            axis.bar_label(bars, texts, padding=3, fontsize=9)
            axis.set_yticks(range(len(names)), [labels[name] for name in names])
            axis.set_xscale("log")
            axis.margins(x=0.2)
            axis.set_title(title, loc="left", fontsize=11)
            axis.spines[["top", "right"]].set_visible(False)
        picture.tight_layout()
