"""The tests of the timers again, on the core in Python, one file per process.

The core of the timers is chosen at import. test_deadlines.py is not one of these files: it compares
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
COVERED = ("clock", "timer", "every", "aio", "loop", "purgatory", "async_purgatory", "idle")
FILES = sorted(
    path.name
    for name in COVERED
    for path in (HERE / f"test_{name}.py", *HERE.glob(f"test_{name}_*.py"))
    if path.name != "test_idle_gateway.py"
)
OMITTED = "drift_over or reschedules_itself_without_a_delay"  # long, and independent of the core


@pytest.mark.skipif(not tickwheel.NATIVE, reason="this process already uses the core in Python")
@pytest.mark.skipif("pure" not in cores.NAMES, reason="only the native core is tested")
@pytest.mark.parametrize("file", FILES)
def test_the_tests_of_a_timer_pass_on_the_core_in_python(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "-k", f"not ({OMITTED})", HERE / file],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=HERE.parent,
        env={**os.environ, "TICKWHEEL_PURE": "1", "PYTEST_ADDOPTS": ""},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-5_000:]
    assert "passed" in ended.stdout


def test_every_file_exists_and_this_file_is_not_one_of_them():
    assert all((HERE / name).is_file() for name in FILES)
    assert Path(__file__).name not in FILES
