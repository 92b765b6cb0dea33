"""The timers once more on the core in Python, in a process of their own.

Which core the timers stand on is decided at import. test_deadlines.py is not among these files: it
has both cores side by side in one process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cores
import tickwheel

HERE = Path(__file__).parent
NAMES = ["clock", "timer", "every", "aio", "loop", "timer_threads", "timer_processes"]
NAMES += ["purgatory", "async_purgatory", "idle"]
FILES = [HERE / f"test_{name}.py" for name in NAMES]
OMITTED = "drift_over or for_now_for_ever"  # long, and the same on both cores: the timer's work


@pytest.mark.skipif(not tickwheel.NATIVE, reason="this process has the core in Python already")
@pytest.mark.skipif("pure" not in cores.NAMES, reason="the native core alone was asked for")
def test_every_test_of_the_timers_passes_on_the_core_in_python():
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            f"not ({OMITTED})",
            *map(str, FILES),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=HERE.parent,
        env={**os.environ, "TICKWHEEL_PURE": "1", "PYTEST_ADDOPTS": ""},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-5_000:]
    assert "passed" in ended.stdout


def test_the_files_are_there_and_this_one_is_not_among_them():
    assert all(path.is_file() for path in FILES)
    assert Path(__file__) not in FILES
