"""The durable benchmark: its quick run works, and its goals and tables report the figures."""

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


def verdicts(results):
    from durable_goals import goals

    return {goal.text: goal.verdict for goal in goals(results, ["huey"])}


def test_the_quick_run_writes_figures_and_page(tmp_path):
    program = [sys.executable, BENCHMARKS / "durable.py", "--quick", "--stores", "sqlite"]
    done = subprocess.run(
        [*program, "--only", "many", "--output", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "durable.json").read_text())
    figures = record["medians"]["0"]["sqlite"]
    assert set(figures) == {"floor_many", "many", "many_made"}
    assert min(figures.values()) > 0
    assert "submit_many" in (tmp_path / "durable.md").read_text()


def test_an_unknown_part_is_refused():
    program = [sys.executable, BENCHMARKS / "durable.py", "--only", "nothing"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2
    assert "unknown: nothing" in done.stderr


def test_a_missing_figure_is_neither_reached_nor_missed(results):
    results.add(0, "sqlite", "one_caller", [100.0])
    assert set(verdicts(results).values()) == {"not measured"}


@pytest.mark.parametrize(("rate", "verdict"), [(60.0, "reached"), (59.0, "not reached")])
def test_submit_many_is_compared_with_its_floor(results, rate, verdict):
    results.add(0, "sqlite", "many", [rate])
    results.add(0, "sqlite", "floor_many", [100.0])
    assert verdicts(results)["SQLite, submit_many: at least 60% of the bare driver"] == verdict


@pytest.mark.parametrize(("theirs", "verdict"), [(2_000.0, "reached"), (2_100.0, "not reached")])
def test_a_burst_is_compared_with_the_fastest_of_the_others(results, theirs, verdict):
    results.labels["celery"] = "Celery / Redis"
    results.add(0, "sqlite", "burst", [10_000.0])
    results.add(0, "huey", "burst", [theirs])
    results.add(0, "celery", "burst", [500.0])
    assert verdicts(results)["SQLite, burst: at least 5 × every other library"] == verdict


@pytest.mark.parametrize(
    ("with_pending", "verdict"), [(80.0, "reached"), (70.0, "not reached"), (130.0, "not reached")]
)
def test_the_rate_with_many_pending_must_be_unchanged(results, with_pending, verdict):
    results.add(0, "sqlite", "callers_in_turn", [100.0])
    results.add(1_000_000, "sqlite", "callers_in_turn", [with_pending])
    text = "SQLite, submits with 10^6 pending: within 25% of the rate without them"
    assert verdicts(results)[text] == verdict


def test_a_failed_library_is_named_with_the_reason_and_keeps_its_figures(results):
    from durable_report import tables

    results.add(0, "huey", "one_caller", [1_234.0])
    results.missing["huey"] = "its worker did not start"
    text = tables(results, {"huey": ("fsync per write", "at most once")})
    assert "- Huey / Redis: its worker did not start" in text
    assert "1,234" in text


def test_lateness_reports_early_and_missing_tasks(results):
    from durable_report import lateness

    for column, figure in {"p50_ms": 1.5, "p99_ms": 3.0, "early": 2.0, "unrun": 0.0}.items():
        results.add(0, "huey", column, [figure])
    assert lateness(results, "huey") == "1.5 / 3.0, 2 early"
