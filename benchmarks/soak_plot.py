"""Plot a soak against time; the arguments are its file of samples, and the plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from plot import drawing

COLOURS = {
    "library": "#1565c0",
    "embedded": "#2e7d32",
    "node1": "#c2185b",
    "node2": "#f48fb1",
    "traffic": "#6d4c41",
    "postgres": "#9e9e9e",
    "sqlite": "#81c784",
}
MIB = 1 << 20
PANELS = {
    "memory": ("anonymous memory, MiB", MIB),
    "bytes": ("database files, MiB", MIB),
    "descriptors": ("open descriptors", 1),
    "threads": ("threads", 1),
    "p50": ("late by, median, ms", 0.001),
    "p99": ("late by, 99 %, ms", 0.001),
}
"""Measure -> title, and the unit that values are divided by."""
POINTS = 180  # of a line: the plot stays small


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the plot as SVG; raise ImportError without matplotlib."""
    with drawing(path, 3, 2, figsize=(10, 9), sharex=True) as (figure, axes):
        for axis, (measure, (title, unit)) in zip(axes.flat, PANELS.items(), strict=True):
            axis.set_title(title, loc="left", fontsize=11)
            axis.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
            for source, name, points in found["series"]:
                if name == measure:
                    draw_line(axis, source, points, unit)
            if measure in ("p50", "p99"):
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
        for axis in axes[-1]:
            axis.set_xlabel("minutes")
        lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=7, frameon=False)
        figure.tight_layout(rect=(0, 0.05, 1, 1))


def draw_line(axis: Any, source: str, points: list[tuple[float, float]], unit: float) -> None:
    """Draw one process, the mean of a few samples at a time."""
    size = -(-len(points) // POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    axis.plot(
        [sum(at for at, _ in part) / len(part) / 60 for part in parts],
        [sum(value for _, value in part) / len(part) / unit for part in parts],
        label=source,
        color=COLOURS[source],
        linewidth=1.4,
    )


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
