"""Store a run's figures by size, contestant, operation and repetition; compute medians."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

OPERATIONS = {
    "schedule": "schedule",
    "schedule_constant": "schedule, 30 s",
    "schedule_many": "schedule_many",
    "cancel": "cancel",
    "cancel_many": "cancel_many",
    "churn": "churn",
    "expire": "expire",
    "drain": "drain",
    "bytes": "bytes",
    "pause_ms": "pause, ms",
}
"""Operation -> heading. A figure is ns per operation, except bytes per timer and pause in ms."""

SETTLED = "_settled"
"""The suffix of an operation counted until it is in the structure, or out of it."""

WORKED = "_worked"
"""The suffix of an operation that includes the processor time of the peer's own thread."""


class Results:
    """The figures of one run, in the order of the contestants' labels."""

    def __init__(self, labels: dict[str, str], settling: dict[str, str]) -> None:
        self.labels = labels
        self.settling = settling
        self.missing: dict[str, str] = {}
        self.runs: dict[int, dict[str, dict[str, list[float]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )

    def add(self, size: int, name: str, operation: str, rounds: list[float]) -> None:
        """Add one repetition: the median of its rounds."""
        if rounds:
            self.runs[size][name][operation].append(round(median(rounds), 2))

    def figure(self, size: int, name: str, operation: str) -> float | None:
        """Return the median over the repetitions, or None if it was not measured."""
        runs = self.runs.get(size, {}).get(name, {}).get(operation)
        return median(runs) if runs else None

    def settled(self, size: int, name: str, operation: str) -> float | None:
        """Return the figure until in the structure or out of it, if that differs."""
        figure = self.figure(size, name, operation + SETTLED)
        return self.figure(size, name, operation) if figure is None else figure

    def sizes(self) -> list[int]:
        """Return the measured sizes, smallest first."""
        return sorted(self.runs)

    def as_json(self) -> dict[str, Any]:
        """Return the medians and the runs behind them."""
        return {
            "labels": self.labels,
            "missing": self.missing,
            "medians": {
                str(size): {
                    name: {operation: median(runs) for operation, runs in operations.items()}
                    for name, operations in self.runs[size].items()
                }
                for size in self.sizes()
            },
            "runs": {str(size): self.runs[size] for size in self.sizes()},
        }
