"""Plot the balance, the moved shards and the answers to heartbeats against the number of nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from plot import drawing
from scale_model import Changes, Load
from scale_report import NETWORK_BYTES

COLOURS = {64: "#1565c0", 1_024: "#2e7d32", 4_096: "#c2185b"}
T = TypeVar("T", Changes, Load)


def draw(changes: list[Changes], loads: list[Load], path: Path) -> None:
    """Write the plot as SVG; raise ImportError without matplotlib."""
    equal = [one for one in changes if not one.weighted]
    with drawing(path, 1, 3, figsize=(13, 4)) as (figure, (balance, moved, answers)):
        set_up(balance, "tasks of the fullest node / its share")
        draw_lines(balance, equal, lambda one: one.balance)
        set_up(moved, "shards moved by a join or leave, at most")
        draw_lines(moved, equal, lambda one: one.moved)
        draw_lines(moved, equal, lambda one: one.bound, style=":")
        set_up(answers, "answers to heartbeats, bytes per second")
        draw_lines(answers, loads, lambda one: one.heartbeat_bytes)
        answers.axhline(NETWORK_BYTES, color="#9e9e9e", linestyle="--", linewidth=1.2)
        balance.legend(frameon=False, title="shards")
        figure.tight_layout()


def set_up(axis: Any, title: str) -> None:
    """Label one panel, with logarithmic axes."""
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("nodes")
    axis.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def draw_lines(axis: Any, rows: list[T], value: Callable[[T], float], style: str = "-") -> None:
    """Draw a line for each number of shards."""
    for shards, colour in COLOURS.items():
        points = [(one.nodes, value(one)) for one in rows if one.shards == shards]
        axis.plot(
            *zip(*points, strict=True),
            label=f"{shards:,}",
            color=colour,
            linestyle=style,
            marker="o" if style == "-" else "",
            markersize=4,
        )
