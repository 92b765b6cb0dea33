"""The list of known faults: each must still fit the code, or it proves nothing any more."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
loader = importlib.machinery.SourceFileLoader("mutants", str(ROOT / "tools/mutants"))
spec = importlib.util.spec_from_loader("mutants", loader)
assert spec is not None
mutants = importlib.util.module_from_spec(spec)
loader.exec_module(mutants)


@pytest.mark.parametrize("mutant", mutants.mutants(), ids=lambda one: one.name.replace(" ", "_"))
def test_its_text_is_in_its_file_once_and_its_tests_exist(mutant):
    assert (ROOT / mutant.file).read_text("utf-8").count(mutant.before) == 1
    assert mutant.after != mutant.before
    named = [word.partition("::")[0] for word in mutant.tests if word.startswith("tests/")]
    assert named
    assert all((ROOT / one).is_file() for one in named)
