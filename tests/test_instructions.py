"""Instructions per native operation, counted by callgrind: flat in the number of entries, and few.

A busy machine does not change a count, so a test can check it, unlike a time.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

import cores

PROGRAM = Path(__file__).resolve().parent.parent / "benchmarks" / "instructions.py"
FEW, MANY = 1_000, 10_000
FLAT = 1.25

MOST = {"schedule": 380, "cancel": 130, "expire": 300}
"""Half as much again as was counted with GCC 12 and CPython 3.11, to leave room for others."""


@pytest.fixture(scope="module")
def instructions():
    """Import benchmarks/instructions.py, which is not in a package."""
    if "native" not in cores.NAMES:
        pytest.skip("there is no native core under test")
    spec = importlib.util.spec_from_file_location("instructions", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def counts(instructions):
    """Return {size: {operation: instructions}}."""
    reason = instructions.why_not()
    if reason:
        pytest.skip(reason)
    return {size: instructions.measure(size) for size in (FEW, MANY)}


@pytest.mark.parametrize("operation", MOST)
def test_callgrind_counts_no_more_per_operation_among_ten_times_as_many_entries(counts, operation):
    assert counts[MANY][operation] <= FLAT * counts[FEW][operation]


@pytest.mark.parametrize("operation", MOST)
def test_callgrind_counts_few_instructions_per_operation(counts, operation):
    assert max(counts[FEW][operation], counts[MANY][operation]) <= MOST[operation]
