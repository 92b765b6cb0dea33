"""The simulation of a large cluster: its quick run works; its moves and rates are the code's."""

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


def test_the_quick_run_keeps_the_bound_and_writes_figures_and_page(tmp_path):
    program = [sys.executable, BENCHMARKS / "scale.py", "--quick", "--output", tmp_path]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "scale.json").read_text())
    assert {goal["reached"] for goal in record["goals"]} == {True}
    assert "with 64 shards" in (tmp_path / "scale.md").read_text()


def test_a_seed_gives_the_same_figures(bench):
    from scale_model import simulate

    first, same, other = (
        simulate(64, 10, weighted=True, changes=6, seed=seed) for seed in (1, 1, 2)
    )
    assert first == same
    assert first != other


def test_it_simulates_the_assignment_of_the_coordinators(bench, monkeypatch):
    import scale_model

    def unstable(shards, weights, current):
        """Give each node other shards whenever the number of nodes changes."""
        names = sorted(weights)
        owners = [names[(shard + len(names)) % len(names)] for shard in range(shards)]
        return {name: [s for s in range(shards) if owners[s] == name] for name in names}

    def moved():
        return scale_model.simulate(64, 10, weighted=False, changes=4, seed=1)

    assert moved().moved <= moved().bound == 8
    assert moved().most_excess == 0
    monkeypatch.setattr(scale_model, "assign", unstable)
    assert moved().moved > moved().bound
    assert moved().most_excess > 0


def test_with_more_nodes_than_shards_the_rest_are_idle(bench):
    from scale_model import simulate

    case = simulate(64, 100, weighted=False, changes=0, seed=1)
    assert case.idle_nodes == 36
    assert case.balance == pytest.approx(100 / 64, rel=0.01)


def test_the_load_follows_the_constants_of_the_code(bench, monkeypatch):
    from scale_model import load_of, most_nodes
    from tickwheel.durable.steps import health, loader

    one, ten = load_of(64, 1, 16), load_of(64, 10, 16)
    assert (one.connections, ten.connections) == (14, 140)
    assert one.index_probes == ten.index_probes == 2 * 16 * 64
    assert ten.health_rows == 10 / 2 * (64 + 10)
    assert most_nodes(64, ten.heartbeat_bytes, 16) == 10
    monkeypatch.setattr(health, "INTERVAL_SECONDS", 4.0)
    monkeypatch.setattr(loader, "INTERVAL_SECONDS", 0.5)
    assert load_of(64, 10, 16).health_rows == ten.health_rows / 2
    assert load_of(64, 10, 16).index_probes == 2 * ten.index_probes


def test_a_small_run_of_the_cluster_benchmark_prints_its_table():
    program = [sys.executable, BENCHMARKS / "cluster.py", "--quick", "--nodes", "2"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "\n| 2 " in done.stdout
