"""The list of known faults: each must still fit the code, or it proves nothing any more."""

import importlib.machinery
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent
loader = importlib.machinery.SourceFileLoader("mutants", str(ROOT / "tools/mutants"))
spec = importlib.util.spec_from_loader("mutants", loader)
assert spec is not None
mutants = importlib.util.module_from_spec(spec)
loader.exec_module(mutants)


def test_the_text_of_each_is_in_its_file_once_and_its_tests_exist():
    for mutant in mutants.mutants():
        assert (ROOT / mutant.file).read_text("utf-8").count(mutant.before) == 1, mutant.name
        assert mutant.after != mutant.before, mutant.name
        named = [word.partition("::")[0] for word in mutant.tests if word.startswith("tests/")]
        assert named, mutant.name
        assert all((ROOT / one).is_file() for one in named), mutant.name
