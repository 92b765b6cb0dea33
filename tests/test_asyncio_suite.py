"""asyncio's own tests on our loop: the quick part of what `make test-asyncio` runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parent.parent / "tools" / "asyncio-suite"
WITHOUT_TESTS = 2


@pytest.mark.skipif(sys.platform == "win32", reason="the suite replaces the loops of Unix")
def test_asyncios_own_tests_pass_on_our_loop_wherever_they_pass_on_the_standard_one():
    ran = subprocess.run(
        [sys.executable, SUITE, "--quick"], capture_output=True, text=True, timeout=540, check=False
    )
    if ran.returncode == WITHOUT_TESTS and os.environ.get("CI") != "true":
        pytest.skip(ran.stderr)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="the suite replaces the loops of Unix")
def test_a_python_without_its_tests_is_told_so():
    hide = "import sys, runpy; sys.modules['test'] = None; sys.argv = sys.argv[1:];"
    hide += "runpy.run_path(sys.argv[0], run_name='__main__')"
    ran = subprocess.run(
        [sys.executable, "-c", hide, SUITE], capture_output=True, text=True, check=False
    )
    assert ran.returncode == WITHOUT_TESTS
    assert "apt-get install libpython3." in ran.stderr
