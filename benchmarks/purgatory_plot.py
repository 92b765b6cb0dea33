"""Plot the purgatory's CPU, latency and memory against the rate, a row per case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plot import drawing
from purgatory_report import CASES, CLOSED, LABELS
from results import Results

PANELS = {"cpu": "CPU, % of one core", "p99_ms": "latency p99, ms", "memory_mib": "memory, MiB"}
STYLES = {"tickwheel": ("#c2185b", "o", 2.6), "old": ("#6d4c41", "^", 1.4)}


def draw(measured: dict[str, Results], path: Path) -> None:
    """Write the plot as SVG; raise ImportError without matplotlib."""
    with drawing(path, 2, 3, figsize=(12, 7), sharex=True) as (figure, axes):
        for row, (case, results) in zip(axes, measured.items(), strict=True):
            for axis, (name, title) in zip(row, PANELS.items(), strict=True):
                draw_panel(axis, results, name, f"{CASES[case].title}: {title}")
        for axis in axes[1]:
            axis.set_xlabel("operations offered, thousands a second")
        lines, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="lower center", ncols=2, frameon=False)
        figure.tight_layout(rect=(0, 0.06, 1, 1))


def draw_panel(axis: Any, results: Results, name: str, title: str) -> None:
    """Draw one figure against the rate, both designs."""
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(True, color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if name == "p99_ms":
        axis.set_yscale("log")
    for design, (colour, marker, width) in STYLES.items():
        points = [
            (rate / 1000, figure)
            for rate in results.sizes()
            if rate != CLOSED and (figure := results.figure(rate, design, name)) is not None
        ]
        if points:
            x, y = zip(*points, strict=True)
            axis.plot(
                x,
                y,
                label=LABELS[design],
                color=colour,
                marker=marker,
                linewidth=width,
                markersize=5,
            )
