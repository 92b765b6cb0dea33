"""The costs on the page about sizing are those of the benchmarks."""

import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "how-to" / "sizing.md").read_text("utf-8")


def figures(name):
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text("utf-8"))


def test_the_costs_are_those_of_the_benchmarks():
    service = figures("service")["medians"]["0"]
    fewest, most = sorted(service[store]["callbacks_cpu_us"] for store in ("sqlite", "postgres"))
    assert f"| {fewest:.0f} to {most:.0f} µs of one core" in PAGE
    assert f"rate * {most:.0f}e-6" in PAGE
    waiting = figures("scale")["measured"]["tasks"]["bytes"]
    assert f"| {waiting:.0f} bytes in PostgreSQL" in PAGE
    assert f"({waiting:.0f} + payload)" in PAGE
    memory = figures("durable")["medians"]["1000000"]
    largest = max(memory[store]["rss_mib"] for store in ("sqlite", "postgres"))
    assert f"| {largest:.0f} MiB, 14 connections" in PAGE
