"""Every fuzz target passes on its kept corpus, and on some thousand changed inputs of it."""

import importlib

import pytest

import cores
from fuzz.inputs import CORPUS, NATIVE, TARGETS, kept_inputs, mutants

# As many as take about half a second.
RUNS = {
    "answers": 3_000, "api": 150, "batch": 4_000, "cron": 5_000, "deadlines": 500, "idle": 800,
    "protocol": 600, "purgatory": 600, "receiver": 1_500, "values": 6_000, "wheel": 500,
    "wire": 6_000,
}  # fmt: skip
MAX_CORPUS_BYTES = 300_000


def run_noted(run, data):
    """Run an input; an error names it."""
    try:
        run(data)
    except BaseException as error:
        error.add_note(f"The input is bytes.fromhex({data.hex()!r}).")
        raise


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_and_changes_of_them_pass(target):
    if target in NATIVE and len(cores.NAMES) < 2:
        pytest.skip("one core only: nothing to compare")
    module = importlib.import_module(f"fuzz.targets.{target}")
    inputs = kept_inputs(target)
    try:
        for data in (b"", *inputs, *mutants(inputs, RUNS[target], target)):
            run_noted(module.run, data)
    finally:
        getattr(module, "close", lambda: None)()


def test_the_corpus_stays_small():
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_CORPUS_BYTES
    assert {path.parent.name for path in files} == set(TARGETS)
