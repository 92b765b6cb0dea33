"""Plot the timers: schedule and cancel by size, firing and lateness as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plot import STYLES, drawing
from results import Results
from timer_report import Measured
from timer_sections import SECTIONS

COLOURS = {name: colour for name, (colour, _, _) in STYLES.items()} | {
    "timer": "#c2185b",
    "manual": "#d81b60",
    "asynctimer": "#e91e63",
    "eventloop": "#f48fb1",
    "wheel": "#880e4f",
    "threading": "#6d4c41",
    "apscheduler": "#bcaaa4",
}
QUANTILES = {"p50_ms": 1.0, "p99_ms": 0.6, "max_ms": 0.3}
"""Column -> opacity of its bar."""


def draw(measured: Measured, path: Path) -> None:
    """Write the plot as SVG; raise ImportError without matplotlib."""
    with drawing(path, 2, 2, figsize=(10, 8)) as (figure, axes):
        if results := measured.get("schedule"):
            draw_lines(axes[0, 0], results, "schedule", "schedule, 1–600 s")
            draw_lines(axes[0, 1], results, "cancel", "cancel, random order, until swept")
            lines, labels = axes[0, 0].get_legend_handles_labels()
            figure.legend(lines, labels, loc="lower center", ncols=4, frameon=False)
        if results := measured.get("fire"):
            draw_bars(axes[1, 0], results, {"fire": 1.0}, "fire what is due, ns per callback")
        if results := measured.get("lateness"):
            title = "lateness at p50, p99 and max, ms"
            draw_bars(axes[1, 1], results, QUANTILES, title, SECTIONS["lateness"].names)
        figure.tight_layout(rect=(0, 0.09, 1, 1))


def draw_lines(axis: Any, results: Results, operation: str, title: str) -> None:
    """Draw one operation by number of pending timers."""
    axis.set_xscale("log")
    axis.set_xlabel("pending timers")
    axis.set_ylabel("ns per operation")
    dress(axis, title, log=axis.set_yscale)
    for name, label in results.labels.items():
        points = [
            (size, figure)
            for size in results.sizes()
            if (figure := results.settled(size, name, operation)) is not None
        ]
        if points:
            width = 2.6 if name == "timer" else 1.4
            axis.plot(
                *zip(*points, strict=True),
                label=label,
                color=COLOURS[name],
                marker="o",
                linewidth=width,
                markersize=5,
                zorder=3 if name == "timer" else 2,
            )


def draw_bars(
    axis: Any,
    results: Results,
    columns: dict[str, float],
    title: str,
    names: tuple[str, ...] | None = None,
) -> None:
    """Draw one group of bars per contestant, at the largest size."""
    size = results.sizes()[-1]
    shown = [name for name in names or results.labels if name in results.runs[size]]
    height = 0.8 / len(columns)
    for number, (column, strength) in enumerate(columns.items()):
        for row, name in enumerate(reversed(shown)):
            value = results.figure(size, name, column) or 0.0
            where = row + 0.4 - height * (number + 0.5)
            axis.barh(where, value, height, color=COLOURS[name], alpha=strength)
    axis.set_yticks(range(len(shown)), [results.labels[name] for name in reversed(shown)])
    dress(axis, title, log=axis.set_xscale)


def dress(axis: Any, title: str, log: Any) -> None:
    """Add a title, a logarithmic axis of values, and a light grid."""
    log("log")
    axis.set_title(title, loc="left", fontsize=11)
    axis.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
