"""asyncio's own tests on our loop, one module each: the quick part of `make test-asyncio`."""

import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parent.parent / "tools" / "asyncio-suite"
WITHOUT_TESTS = 2

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="the suite replaces the loops of Unix"
)


def quick_modules():
    """Return the asyncio test modules that the tool runs with --quick."""
    loader = SourceFileLoader("asyncio_suite", str(SUITE))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module.QUICK


@pytest.mark.parametrize("module", [] if sys.platform == "win32" else quick_modules())
def test_asyncios_tests_pass_on_our_loop_if_they_pass_on_the_standard_loop(module):
    command = [sys.executable, SUITE, "--brief", module]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    if ran.returncode == WITHOUT_TESTS and os.environ.get("CI") != "true":
        pytest.skip(ran.stderr)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_python_without_its_test_package_names_the_missing_package():
    hide = "import sys, runpy; sys.modules['test'] = None; sys.argv = sys.argv[1:];"
    hide += "runpy.run_path(sys.argv[0], run_name='__main__')"
    ran = subprocess.run(
        [sys.executable, "-c", hide, SUITE], capture_output=True, text=True, check=False
    )
    assert ran.returncode == WITHOUT_TESTS
    assert "apt-get install libpython3." in ran.stderr
