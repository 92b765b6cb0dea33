"""The report of all benchmarks: its page is the generated one; a worse figure is red and fails."""

import importlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIGURE = ("runs", "100000", "native", "schedule")


@pytest.fixture
def report(monkeypatch, tmp_path):
    """The program, with its own docs and outputs of the same figures."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("performance")
    for name in ("docs", "outputs"):
        shutil.copytree(ROOT / "docs" / "benchmarks", tmp_path / name)
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    return module


@pytest.fixture
def change(tmp_path):
    """Change the repetitions of a figure in the outputs."""

    def apply(function, path=FIGURE):
        output = tmp_path / "outputs" / "wheel.json"
        record = json.loads(output.read_text())
        at = record
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = function(at[path[-1]])
        output.write_text(json.dumps(record))

    return apply


def figure_in(path):
    at = json.loads(path.read_text("utf-8"))
    for key in FIGURE:
        at = at[key]
    return at


@pytest.fixture
def run(report, tmp_path):
    """Run the report of the outputs; return its exit code."""

    def apply(*words):
        return report.main(["--only", "wheel", "--output", str(tmp_path / "outputs"), *words])

    return apply


def test_the_age_of_an_output_that_is_taken_over_is_printed(run, tmp_path, capsys):
    output = tmp_path / "outputs" / "wheel.json"
    then = output.stat().st_mtime - 5 * 3600
    os.utime(output, (then, then))
    run("--accept")
    printed = re.search(
        r"^wheel: not run again; (.*) is ([\d.]+) h old$", capsys.readouterr().out, re.MULTILINE
    )
    assert printed[1] == str(output)
    assert float(printed[2]) >= 5


def test_the_page_is_the_generated_one(report):
    text = report.page(report.read(ROOT / "docs" / "benchmarks", list(report.LAYERS)))
    assert (ROOT / "docs" / "performance.md").read_text() == text, (
        "run benchmarks/performance.py --page"
    )


def test_no_figure_misses_a_goal_where_all_goals_are_reached(report):
    for name, record in report.read(report.DOCS, list(report.LAYERS)).items():
        if all(goal["reached"] for goal in record.get("goals", [])):
            assert "not reached" not in report.section(report.LAYERS[name], record), name


def test_every_figure_of_a_committed_benchmark_is_measured(report):
    records = report.read(report.DOCS, list(report.LAYERS))
    missing = [
        (name, figure.what, figure.peer)
        for name, record in records.items()
        for figure in report.LAYERS[name].figures
        if report.ratio_of(record, figure) is None
    ]
    assert missing == []


def test_equal_figures_are_taken_over_with_their_date(report, run):
    assert run() == 0
    assert json.loads((report.DOCS / "wheel.json").read_text())["date"][:2] == "20"
    assert report.PAGE.read_text().startswith("# Performance")


def test_a_worse_figure_is_red_and_fails_and_changes_nothing(report, run, change, capsys):
    change(lambda runs: [2 * one for one in runs])
    before = (report.DOCS / "wheel.json").read_text()
    assert run() == 1
    red = [line for line in capsys.readouterr().out.splitlines() if line.endswith("RED |")]
    assert {line.split("|")[2].strip() for line in red} == {"schedule at 10^5"}
    assert (report.DOCS / "wheel.json").read_text() == before
    assert not report.PAGE.exists()


def test_a_red_figure_can_be_accepted(report, run, change):
    before = figure_in(report.DOCS / "wheel.json")
    change(lambda runs: [2 * one for one in runs])
    assert run("--accept") == 0
    assert figure_in(report.DOCS / "wheel.json") == [2 * one for one in before]


def test_the_short_form_has_fewer_figures_and_writes_nothing_and_a_red_one_does_not_fail(
    report, run, change, capsys
):
    change(lambda runs: [2 * one for one in runs])
    before = (report.DOCS / "wheel.json").read_text()
    change(lambda sizes: {"100000": sizes["100000"]}, ("runs",))
    assert run("--quick") == 0
    assert "not measured |" not in capsys.readouterr().out
    assert (report.DOCS / "wheel.json").read_text() == before


def test_a_figure_that_is_worse_within_its_noise_is_not_red(run, change):
    change(lambda runs: [1.05 * one for one in runs])
    assert run() == 0


def test_a_comparison_with_much_noise_is_not_called_the_same(run, change, capsys):
    change(lambda runs: [0.5 * runs[0], *runs[1:], 1.5 * runs[0]])
    assert run() == 0
    assert " too noisy |" in capsys.readouterr().out


def test_a_figure_that_was_not_measured_fails(run, change, capsys):
    change(lambda runs: [])
    assert run() == 1
    assert "not measured |" in capsys.readouterr().out


def test_a_goal_that_is_no_longer_reached_is_printed_and_does_not_fail(run, change, capsys):
    change(lambda goals: [{**goal, "reached": False} for goal in goals], ("goals",))
    assert run() == 0
    printed = capsys.readouterr().out
    assert "goal no longer reached: wheel: schedule at 10^5: faster than Kafka" in printed
    assert "schedule_many at 10^6: at most half" not in printed  # nor was it before


def test_a_lower_rate_and_a_higher_cost_are_both_worse(report):
    record = {"ours": [100.0], "theirs": [50.0]}
    figures = [report.Figure("", unit, ("ours",), "", ("theirs",)) for unit in ("tasks/s", "ns")]
    assert [report.ratio_of(record, figure).value for figure in figures] == [2.0, 0.5]


def test_the_noise_comes_from_the_repetitions(report):
    assert report.spread([100.0]) == report.ONE_SPREAD
    assert report.spread([100.0, 100.0, 100.0]) == report.MIN_SPREAD
    assert report.spread([80.0, 100.0, 140.0]) == pytest.approx(0.6)
