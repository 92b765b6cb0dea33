"""The benchmark of the HTTP client runs, and prints a line for each client."""

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "http_client.py"


def test_the_benchmark_prints_a_table():
    short = ["--seconds", "0.1", "--rounds", "1", "--concurrency", "4"]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *short], capture_output=True, text=True, timeout=240, check=True
    )
    assert "| tickwheel |" in done.stdout
    assert done.stderr == ""
