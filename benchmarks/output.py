"""Shared by the benchmark programs: parse name lists, print progress, write result files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"


def parse_names(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser for an option that takes some of these names, separated by commas."""

    def chosen(text: str) -> list[str]:
        words = text.split(",")
        unknown = [word for word in words if word not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
        return words

    return chosen


def add_names_option(parser: argparse.ArgumentParser, option: str, names: tuple[str, ...]) -> None:
    """Add an option that takes some of these names, by default all."""
    help_text = f"some of {','.join(names)}"
    parser.add_argument(option, type=parse_names(names), default=list(names), help=help_text)


def show_progress(line: str) -> None:
    """Print progress; on a terminal, overwrite the previous line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)


def save(
    directory: Path,
    name: str,
    record: dict[str, Any],
    page: str,
    draw: Callable[[Path], None] | None = None,
) -> None:
    """Write the figures, the page, and, if matplotlib is installed, the plot."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (directory / f"{name}.json").write_text(text + "\n")
    (directory / f"{name}.md").write_text(page)
    if draw is not None:
        try:
            draw(directory / f"{name}.svg")
        except ImportError as error:
            print(f"no plot: {error}")
    print(f"written: {', '.join(path.name for path in sorted(directory.glob(f'{name}.*')))}")
