"""Covers durable.function: what a type checker says of submits."""

import subprocess
import sys

import pytest

PROGRAM = """\
from datetime import timedelta

from tickwheel.durable import Scheduler

app = Scheduler("sqlite:///tasks.db")


@app.task(max_attempts=2)
async def close(order_id: str, reason: str = "late") -> int:
    return 1


async def main() -> None:
    await close.submit("o-1")
    await close.submit("o-1", delay=3, key="k", on_conflict="keep")
    await close.submit("o-1", "paid", delay=timedelta(days=1))
    await close.submit(order_id="o-1")
    await close.submit("o-1", reason="paid")
    await close.options(delay=3).submit(order_id="o-1", reason="paid")
    {wrong}
"""


def check(path, wrong):
    program = path / "program.py"
    program.write_text(PROGRAM.format(wrong=wrong))
    mypy = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(program)]
    done = subprocess.run(mypy, check=False, cwd=path, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A folder where mypy has its cache: each check after the first takes a second."""
    return tmp_path_factory.mktemp("typing")


def test_right_submits_pass_a_strict_check(cached):
    assert check(cached, "pass") == ""


@pytest.mark.parametrize(
    "wrong",
    [
        "await close.submit(3, delay=3)",
        "await close.submit()",
        "await close.submit('o-1', dealy=3)",
        "await close.submit('o-1', delay='soon')",
        "await close.submit('o-1', on_conflict='ignore')",
        "await close.options(dealy=3).submit('o-1')",
        "await close.options(delay=3).submit(order=1)",
    ],
)
def test_a_wrong_submit_is_reported(cached, wrong):
    assert "program.py:20: error" in check(cached, wrong)
