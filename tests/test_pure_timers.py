"""The tests of the timers again, on the core in Python, in a few processes.

The core of the timers is chosen at import. test_deadlines.py is not one of these files: it runs
both cores in one process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cores
import tickwheel

HERE = Path(__file__).parent
GROUPS = {
    "timers": ["clock", "every", "timer", "timer_callbacks", "timer_life"],
    "processes": ["timer_processes", "timer_threads"],
    "loops": ["aio", "aio_loops", "loop"],
    "purgatory": ["async_purgatory", "purgatory/purgatory", "purgatory/checks", "purgatory/memory"],
    "races": ["purgatory/operations", "purgatory/races"],
    "idle": ["idle", "idle_timers"],
}
OMITTED = "drift_over or reschedules_itself_without_a_delay"  # long, and independent of the core


def path_of(name):
    folder, _, name = name.rpartition("/")
    return HERE / folder / f"test_{name}.py"


@pytest.mark.skipif(not tickwheel.NATIVE, reason="this process already uses the core in Python")
@pytest.mark.skipif("pure" not in cores.NAMES, reason="only the native core is tested")
@pytest.mark.parametrize("group", GROUPS)
def test_the_tests_of_the_timers_pass_on_the_core_in_python(group):
    files = [path_of(name) for name in GROUPS[group]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "-k", f"not ({OMITTED})", *files],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=HERE.parent,
        env={**os.environ, "TICKWHEEL_PURE": "1", "PYTEST_ADDOPTS": ""},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-5_000:]
    assert "passed" in ended.stdout


def test_every_test_of_a_timer_is_in_a_group():
    found = {path for kind in ("aio", "idle", "timer") for path in HERE.glob(f"test_{kind}*.py")}
    found |= {*(HERE / "purgatory").glob("test_*.py")}
    listed = {path_of(name) for names in GROUPS.values() for name in names}
    assert found - {HERE / "test_idle_gateway.py"} <= listed
