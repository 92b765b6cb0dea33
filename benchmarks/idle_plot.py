"""Plot the idle tracker's nanoseconds per packet: a bar per contestant."""

from __future__ import annotations

from pathlib import Path

from idle_report import LABELS, PACKETS, figure, share_at_rate
from plot import drawing
from results import Results

OURS, OTHERS = "#c2185b", "#90a4ae"
MINE = ("tracker", "many", "hand")


def draw(results: Results, path: Path) -> None:
    """Write the plot as SVG; raise ImportError without matplotlib."""
    panels = {
        "ns per packet": lambda name: figure(results, name, "packet"),
        f"% of a core at {PACKETS:,} packets a second": lambda name: share_at_rate(results, name),
    }
    names = list(reversed(LABELS))
    with drawing(path, 1, 2, figsize=(11, 4), sharey=True) as (picture, axes):
        for axis, (title, value) in zip(axes, panels.items(), strict=True):
            values = [value(name) for name in names]
            colours = [OURS if name in MINE else OTHERS for name in names]
            bars = axis.barh([LABELS[name] for name in names], values, color=colours)
            axis.bar_label(
                bars,
                [f"{one:,.0f}" if one > 10 else f"{one:.2f}" for one in values],
                padding=3,
                fontsize=9,
            )
            axis.set_xscale("log")
            axis.margins(x=0.15)
            axis.set_title(title, loc="left", fontsize=11)
            axis.spines[["top", "right"]].set_visible(False)
        picture.tight_layout()
