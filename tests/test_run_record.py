"""What CI does after a failure, with a tiny suite: real make, pytest and xdist."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
CONFTEST = "import run_record\n\n\ndef pytest_configure(config):\n    run_record.register(config)\n"
EARLIER = '{"tests": 2, "failed": ["test_tiny.py"]}'
MAKEFILE = f"""
check docs dist:
test:
\techo '{EARLIER}' > build/last-run.json
\t{sys.executable} -m pytest -q -n 1 --dist loadfile --max-worker-restart 0
test-again:
\ttools/test-again {sys.executable}
test-lowest: test
"""
FIRST_TIME = """
from pathlib import Path
import os

def test_first():
    marker = Path("ran")
    if not marker.exists():
        marker.touch()
        {what}

def test_second():
    {second}
"""


@pytest.fixture
def run_ci(tmp_path):
    """Return a function that runs a copy of .ci/run with these tests."""
    for name in (".ci/run", "tools/test-again", "tests/run_record.py"):
        copy = tmp_path / name.removeprefix("tests/")
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, copy)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "last-run.json").write_text(EARLIER)

    def run(what, second="pass"):
        (tmp_path / "test_tiny.py").write_text(FIRST_TIME.format(what=what, second=second))
        environ = {name: os.environ[name] for name in os.environ if not name.startswith("PYTEST")}
        environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
        return subprocess.run(
            [".ci/run"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )

    return run


def test_a_test_that_passes_alone_is_unstable(run_ci):
    done = run_ci("assert False")
    assert done.returncode == 0, done
    assert "1 of 2 tests failed" in done.stdout
    assert "UNSTABLE" in done.stdout
    assert "\ntest_tiny.py::test_first\n" in done.stdout


@pytest.mark.parametrize("end", ["os._exit(3)", "raise KeyboardInterrupt"])
def test_no_test_is_run_again_if_the_run_did_not_end(run_ci, end):
    """The second test never ran; the first one alone would pass."""
    done = run_ci(end, second="assert False")
    assert done.returncode != 0, done
    assert "the last run of the tests did not end" in done.stderr
    assert "UNSTABLE" not in done.stdout


def test_no_test_is_run_again_if_a_file_cannot_be_imported(run_ci, tmp_path):
    (tmp_path / "test_broken.py").write_text("import not_installed\n")
    done = run_ci("assert False")
    assert done.returncode != 0, done
    assert "the last run of the tests did not end" in done.stderr


def test_an_earlier_run_is_no_proof_if_make_fails_before_pytest(run_ci, tmp_path):
    (tmp_path / "Makefile").write_text(MAKEFILE.replace("\techo", "\tfalse\n\techo"))
    done = run_ci("pass")
    assert done.returncode != 0, done
    assert "the last run of the tests did not end" in done.stderr
