"""The figures on the pages about sizing and scale are those of the benchmarks."""

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "how-to" / "sizing.md").read_text("utf-8")
SCALE = (DOCS / "scale.md").read_text("utf-8")
SIMULATED = (DOCS / "benchmarks" / "scale.md").read_text("utf-8")
FACTOR = 1.5
"""Between a rounded figure and the measured one, at most: runs differ by up to a third."""


def figures(name):
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text("utf-8"))


def check_near(where, shown, measured):
    for text, figure in zip(shown, measured, strict=True):
        rounded = float(text.replace(",", ""))
        assert figure / FACTOR <= rounded <= figure * FACTOR, (where, text, figure)


def check_rounded(page, pattern, *measured):
    """Check that the numbers of a sentence of a page are near the measured ones."""
    found = re.search(pattern, page)
    assert found, pattern
    check_near(pattern, found.groups(), measured)


def database_cores():
    """Return how many cores of the database an idle cluster takes, by its shards and nodes."""
    row = r"^\| +([\d,]+) \| +([\d,]+) \|(?:[^|]+\|){6} +([\d.]+) \| +[\d.]+ \|$"
    found = re.findall(row, SIMULATED, re.MULTILINE)
    return {(shards, nodes): float(cores) for shards, nodes, cores in found}


def test_the_costs_are_those_of_the_benchmarks():
    service = figures("service")["medians"]["0"]
    fewest, most = sorted(service[store]["callbacks_cpu_us"] for store in ("sqlite", "postgres"))
    assert f"| {fewest:.0f} to {most:.0f} µs of one core" in PAGE
    assert f"rate * {most:.0f}e-6" in PAGE
    tasks = figures("scale")["measured"]["tasks"]
    waiting = tasks["bytes"]
    assert f"| {waiting:.0f} bytes in PostgreSQL" in PAGE
    assert f"({waiting:.0f} + payload)" in PAGE
    check_rounded(PAGE, r"a core of PostgreSQL for about ([\d,]+)", 1e6 / tasks["task_database_us"])
    memory = figures("durable")["medians"]["1000000"]
    largest = max(memory[store]["rss_mib"] for store in ("sqlite", "postgres"))
    assert f"| {largest:.0f} MiB, 14 connections" in PAGE


def test_the_measured_figures_on_scale_are_near_those_of_the_benchmarks():
    service = figures("service")["medians"]["0"]["postgres"]
    single, many = service["closed_128"], service["batch_ndjson_4"]
    check_rounded(SCALE, r"about ([\d,]+) single, ([\d,]+) in batches", single, many)
    cpu = service["callbacks_cpu_us"]
    check_rounded(SCALE, r"recorded \| about ([\d,]+) \(measured", service["callbacks"])
    check_rounded(SCALE, r"(\d+) µs of the node's .* most ([\d,]+) on one core", cpu, 1e6 / cpu)

    measured = figures("scale")["measured"]
    a_core = 1e6 / measured["tasks"]["task_database_us"]
    check_rounded(SCALE, r"a core of it for about ([\d,]+) \(measured", a_core)
    check_rounded(SCALE, r"about ([\d,]+) tasks per second for a core \(measured", a_core)
    waiting = measured["tasks"]["bytes"]
    check_rounded(SCALE, r"about (\d+) bytes .* 10\^9 have (\d+) GB", waiting, waiting)
    check_rounded(SCALE, r"a disk of (\d+) GB", waiting)

    costs = {(one["shards"], one["nodes"]): one for one in measured["clusters"]}
    beats = [costs[1024, nodes]["heartbeat_node_ms"] for nodes in (100, 1000)]
    check_rounded(SCALE, r"about (\d+) ms of a node's .* and (\d+) ms with 1,000 \(meas", *beats)
    look = costs[1024, 100]["look_database_ms"]
    check_rounded(SCALE, r"about (\d+) ms of the database's processor time", look)
    cores = database_cores()
    few, many = ([cores[shards, nodes] for shards in ("64", "1,024")] for nodes in ("100", "1,000"))
    check_rounded(SCALE, r"about ([\d.]+) cores with 64 shards and ([\d.]+) with 1,024", *few)
    check_rounded(SCALE, r"1,000 nodes take (\d+) and (\d+) \(measured\)", *many)


def test_the_computed_figures_on_scale_are_those_of_the_simulation():
    record = figures("scale")
    load = {(one["shards"], one["nodes"]): one for one in record["loads"]}
    default = [load[64, nodes] for nodes in (1, 10, 1000)]
    connections = (f"{one['connections']:,}" for one in default)
    statements = (f"{one['statements']:,.0f}" for one in default)
    large = load[1024, 100]
    answers = large["heartbeat_bytes"] / 1e6
    reads = [load[64, nodes]["zookeeper_reads"] for nodes in (100, 1000)]
    most = re.search(r"([\d,]+) nodes with 1,024 shards", SIMULATED)[1]

    changes = {(one["shards"], one["nodes"], one["weighted"]): one for one in record["changes"]}
    balance = [
        changes[shards, nodes, False]["balance"]
        for shards, nodes in ((64, 100), (1024, 1000), (4096, 1000))
    ]
    equal = sum(one["changes"] for one in record["changes"] if not one["weighted"])
    uneven = changes[4096, 100, True]

    page = " ".join(SCALE.split())
    for text in (
        f"| connections | {' | '.join(connections)} |",
        f"| statements per second when idle | {' | '.join(statements)} |",
        f"{large['connections']:,} connections, {large['statements']:,.0f} statements",
        f"and {answers:.1f} MB of answers per second (computed)",
        f"{reads[0]:,.0f} reads per second with 100 nodes, {reads[1]:,.0f} with 1,000 (computed)",
        f"{load[64, 1000]['zookeeper_writes']:,.0f} writes per second with 1,000 nodes",
        f"{most} nodes fill 1 Gbit/s (computed)",
        f"{large['index_probes']:,.0f} probes",
        f"{balance[0]:.2f} × its share with 100 nodes on 64 shards",
        f"{balance[1]:.2f} × with 1,000 on 1,024, {balance[2]:.2f} × with 1,000 on 4,096",
        f"{equal} simulated changes",
        f"one change moved {uneven['moved']} shards, where {uneven['bound']} were the bound",
        f"and {uneven['most_excess']} shards went from one node",
    ):
        assert text in page


def test_the_table_of_several_nodes_is_near_that_of_the_benchmark():
    row = r"^\| (\d) \| ([\d,]+) \| [\d.]+ \| (\d+) µs \| (\d+) µs \| (\d+) µs \| ([\d.]+) \|$"
    rows = {nodes: cells for nodes, *cells in re.findall(row, SCALE, re.MULTILINE)}
    medians = figures("cluster")["medians"]
    assert rows.keys() == medians.keys()
    for nodes, cells in rows.items():
        ours = medians[nodes]["tickwheel"]
        columns = ("rate", "node_us", "postgres_us", "sink_us", "cores")
        check_near(f"{nodes} nodes", cells, [ours[column] for column in columns])
