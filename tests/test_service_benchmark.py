"""The service benchmark: its quick run works, and its goals and tables report the figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PATIENCE = 240


@pytest.fixture
def bench(monkeypatch):
    """Make the benchmark's modules importable by name; they are not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def results(bench):
    """Results without a figure."""
    from results import Results

    return Results({"sqlite": "tickwheel / SQLite", "huey": "Huey / Redis"}, {})


def verdict(results, words):
    from service_goals import goals

    return next(goal.verdict for goal in goals(results) if words in goal.text)


def run_quick(*words):
    program = [sys.executable, BENCHMARKS / "service.py", "--quick", *words]
    return subprocess.run(program, capture_output=True, text=True, check=False, timeout=PATIENCE)


def test_the_quick_run_loses_nothing_and_writes_figures_and_page(tmp_path):
    done = run_quick("--stores", "sqlite", "--only", "single,callbacks", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "service.json").read_text())
    figures = record["medians"]["0"]["sqlite"]
    rates = ("closed_1", "closed_16", "callbacks", "bare_tickwheel_64")
    assert min(figures[rate] for rate in rates) > 0
    wrong = ("single_lost", "callbacks_early", "callbacks_repeated", "callbacks_unrecorded")
    assert [figures[what] for what in wrong] == [0, 0, 0, 0]
    assert "single, 16 connections" in (tmp_path / "service.md").read_text()


def test_an_unknown_part_is_refused():
    done = run_quick("--only", "nothing")
    assert done.returncode == 2
    assert "unknown: nothing" in done.stderr


def test_a_missing_figure_is_neither_reached_nor_missed(results):
    from service_goals import goals

    results.add(0, "sqlite", "half_own_asked", [100.0])
    assert {goal.verdict for goal in goals(results)} == {"not measured"}


def test_single_submits_count_on_the_best_number_of_connections(results):
    for connections, rate in {1: 900.0, 64: 6_100.0, 256: 5_000.0}.items():
        results.add(0, "sqlite", f"closed_{connections}", [rate])
    assert verdict(results, "single submits") == "reached"


@pytest.mark.parametrize(("lost", "expected"), [(0, "reached"), (1, "not reached")])
def test_a_lost_acknowledged_task_misses_the_goal(results, lost, expected):
    for part, gone in {"single": 0, "batch": lost}.items():
        results.add(0, "sqlite", f"{part}_acknowledged", [1_000])
        results.add(0, "sqlite", f"{part}_lost", [gone])
    assert verdict(results, "lost after kill -9") == expected


@pytest.mark.parametrize(("p99", "expected"), [(29.9, "reached"), (30.0, "not reached")])
def test_answers_at_half_of_the_goal_must_come_in_time(results, p99, expected):
    for column, figure in {"rate": 3_000.0, "p50_ms": 2.0, "p99_ms": p99}.items():
        results.add(0, "sqlite", f"half_goal_{column}", [figure])
    assert verdict(results, "at 3,000 submits/s") == expected


@pytest.mark.parametrize(
    ("rate", "bare", "expected"),
    [
        (2_500.0, 20_000.0, "reached"),
        (2_000.0, 3_300.0, "reached"),
        (2_000.0, 3_400.0, "not reached"),
    ],
)
def test_callbacks_reach_a_rate_or_a_part_of_the_bare_client(results, rate, bare, expected):
    results.add(0, "sqlite", "callbacks", [rate])
    results.add(0, "sqlite", "bare_tickwheel_64", [bare])
    assert verdict(results, "callbacks: at least") == expected


def test_a_repeated_callback_in_any_repetition_misses_the_goal(results):
    for what in ("early", "unrecorded"):
        results.add(0, "sqlite", f"callbacks_{what}", [0.0])
    for repeated in (0.0, 1.0, 0.0):
        results.add(0, "sqlite", "callbacks_repeated", [repeated])
    assert verdict(results, "repeated") == "not reached"


@pytest.mark.parametrize(("beside", "expected"), [(27.0, "reached"), (27.1, "not reached")])
def test_lateness_with_failing_services_must_be_unchanged(results, beside, expected):
    for name, p99 in {"late": 20.0, "beside": beside}.items():
        results.add(0, "sqlite", f"{name}_p50_ms", [2.0])
        results.add(0, "sqlite", f"{name}_p99_ms", [p99])
    assert verdict(results, "with a dead and a slow service") == expected


def test_a_rate_that_was_not_kept_is_reported(results):
    from service_report import paced

    columns = {"asked": 3_000.0, "rate": 2_400.0, "p50_ms": 90.0, "p99_ms": 250.0}
    for column, figure in columns.items():
        results.add(0, "sqlite", f"half_goal_{column}", [figure])
    assert paced(results, "sqlite", "half_goal") == "90.0 / 250.0 at 3,000/s, kept 2,400/s"


def test_a_failed_system_is_named_with_the_reason_and_keeps_its_figures(results):
    from service_report import tables

    results.add(0, "sqlite", "closed_1", [2_468.0])
    results.add(0, "huey", "one_caller", [1_234.0])
    results.missing["huey"] = "its worker did not start"
    guarantees = dict.fromkeys(("sqlite", "huey"), ("fsync per write", "at most once"))
    text = tables(results, guarantees)
    assert "- Huey / Redis: its worker did not start" in text
    assert "submits by one client: 2.0 × Huey / Redis" in text


def test_a_busy_machine_is_reported(results):
    from service_report import busy_warning

    results.add(0, "machine", "load_before", [3.2])
    assert "its load average was 3.2 before the run" in busy_warning(results)


def test_the_disk_is_watched_during_a_run(bench):
    from disk import DiskWatch

    with DiskWatch() as disk:
        pass
    figures = disk.figures()
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]


def test_the_disk_figures_are_shown_below_each_lateness(results):
    from service_report import late_table

    for number, column in enumerate(("p50_ms", "p99_ms", "max_ms"), 1):
        results.add(0, "sqlite", f"late_{column}", [10.0 * number])
        results.add(0, "sqlite", f"late_disk_{column}", [1.0 * number])
    rows = late_table(results).splitlines()
    (at,) = [number for number, row in enumerate(rows) if "1,000/s due" in row]
    assert "10.0 / 20.0 (30)" in rows[at]
    assert "a bare fdatasync at the same time" in rows[at + 1]
    assert "1.0 / 2.0 (3)" in rows[at + 1]
