"""The package in a sub-interpreter: wheels work there, and still work in the main one."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
try:
    import _interpreters as interpreters
except ImportError:
    try:
        import _xxsubinterpreters as interpreters
    except ImportError:
        raise SystemExit(77)

import tickwheel

ROUND = '''
import gc
import tickwheel
for make in (tickwheel.Wheel, tickwheel.RoundsWheel):
    wheel = make(size=20)
    item = [wheel]
    entries = [wheel.schedule(expiry, item) for expiry in (3, 25, 450)]
    assert wheel.advance(30) == [item, item]
    assert entries[2].cancel()
    try:
        wheel.schedule(-1, item)
    except tickwheel.OutOfRange:
        pass
    else:
        raise SystemError("no OutOfRange")
    wheel.schedule(999, item)
    wheel._check()
del wheel, item, entries
gc.collect()
'''

def work():
    exec(ROUND, {})

work()
kept = tickwheel.Wheel(size=20)
entry = kept.schedule(450, "kept")
for _ in range(3):
    inner = interpreters.create()
    error = interpreters.run_string(inner, ROUND)
    if error is not None:
        raise SystemExit(f"in the sub-interpreter: {error}")
    work()
    interpreters.destroy(inner)
    work()
assert entry.pending and kept.advance(450) == ["kept"]
print("native" if tickwheel.NATIVE else "pure")
"""


def test_wheels_work_in_a_sub_interpreter_and_after_it(core):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "TICKWHEEL_PURE": "0" if core.native else "1",
            "PYTHONWARNINGS": "ignore",  # _xxsubinterpreters is private and warns
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if run.returncode == 77:
        pytest.skip("this Python has no sub-interpreters to test with")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == core.name
