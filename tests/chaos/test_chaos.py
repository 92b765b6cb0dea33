"""The chaos run, and its parts that tell a sound run from a broken one.

`make chaos` has the long form; TICKWHEEL_CHAOS_SECONDS and TICKWHEEL_CHAOS_SEED change it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from chaos import faults, isolation
from chaos.cluster import SOURCE, TESTS

SHORT_SECONDS = 15
SHORT_SEED = 3
LONG_SECONDS = int(os.environ.get("TICKWHEEL_CHAOS_SECONDS", "1800"))
OUTPUT = Path(__file__).resolve().parents[2] / "build" / "chaos"


def run(directory, *arguments, seconds):
    """Run it in a process of its own; return its output, and fail if it has found a violation."""
    if obstacle := isolation.obstacle():
        text = f"a cluster in network namespaces cannot run here: {obstacle}"
        pytest.fail(text, pytrace=False) if os.environ.get("CI") == "true" else pytest.skip(text)
    ran = subprocess.run(
        [sys.executable, "-m", "chaos.run", "--directory", directory, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{TESTS}:{SOURCE}"}, capture_output=True, text=True,
        check=False, timeout=seconds,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def test_a_cluster_under_faults_loses_and_duplicates_nothing():
    arguments = ["--short", "--nodes", 3, "--seconds", SHORT_SECONDS, "--seed", SHORT_SEED]
    # On the disk: the cluster mounts a file system of its own for files in memory.
    with TemporaryDirectory(prefix="tickwheel-chaos-") as folder:
        print(run(folder, *arguments, seconds=300))
        text = Path(folder, f"seed-{SHORT_SEED}", "figures.json").read_text()
    figures, _ = json.loads(text)
    assert figures["acknowledged"] > 0
    assert figures["calls"] > 0
    assert figures["stale claims refused"] > 0


@pytest.mark.chaos
def test_a_cluster_under_faults_for_long_loses_and_duplicates_nothing(capsys):
    seed = os.environ.get("TICKWHEEL_CHAOS_SEED")
    arguments = ["--seconds", LONG_SECONDS, *(["--seed", seed] if seed else [])]
    text = run(OUTPUT, *arguments, seconds=LONG_SECONDS + 900)
    with capsys.disabled():
        print(f"\n{text}")


def test_a_seed_gives_the_same_plan_always():
    plan = faults.make_plan(7, 600, 4)
    assert plan == faults.make_plan(7, 600, 4)
    assert plan != faults.make_plan(8, 600, 4)
    assert {event.lane for event in plan} == {
        *faults.LANES, "node1", "node2", "node3", "node4",
    }  # fmt: skip
    long = faults.make_plan(7, 20_000, 4)
    assert {event.fault for event in long} == {
        *faults.NODE_FAULTS, *(name for lane in faults.LANES.values() for name in lane),
    }  # fmt: skip
