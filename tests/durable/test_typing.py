"""Covers durable.function: what type checkers say of submits and of results."""

import json
import pickle
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from typing import NamedTuple

import pytest

from tickwheel.durable import Scheduler

PROGRAM = """\
from datetime import timedelta

from tickwheel.durable import Scheduler, Task

app = Scheduler("sqlite:///tasks.db")


@app.task(max_attempts=2)
async def close(order_id: str, reason: str = "late") -> int:
    return 1


@app.task
def price(order_id: str) -> float:
    return 1.0


@app.task
def count(a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> int:
    return a


def number(value: int | None) -> None:
    pass


async def main() -> None:
    await close.submit("o-1")
    await close.submit("o-1", delay=3, key="k", on_conflict="keep")
    await close.submit("o-1", "paid", delay=timedelta(days=1))
    await close.submit(order_id="o-1")
    await count.submit(1, 2, 3, 4, 5, 6, 7)
    await count.options(delay=3).submit(1, 2, 3, 4, 5, 6, 7)
    await close.submit("o-1", reason="paid")
    task: Task[int] = await close.options(delay=3).submit(order_id="o-1", reason="paid")
    number((await app.wait(task)).result)
    number((await app.get(task)).result)
    number((await app.get("id")).result)
    any_task: Task = task
    print(any_task)


with app.blocking() as b:
    number(b.wait(close.submit_sync("o-1", delay=3), timeout=3).result)
    number(b.get(close.options(delay=3).submit_sync(order_id="o-1")).result)
    cost: float | None = b.wait(price.submit_sync("o-1")).result


async def wrong() -> None:
    {wrong}
"""
LINE = PROGRAM[: PROGRAM.index("{wrong}")].count("\n") + 1
WRONG = [
    "await close.submit(3, delay=3)",
    "await close.submit()",
    "await close.submit('o-1', dealy=3)",
    "await close.submit('o-1', delay='soon')",
    "await close.submit('o-1', on_conflict='ignore')",
    "await close.options(dealy=3).submit('o-1')",
    "await close.options(delay=3).submit(order=1)",
    "await count.options(delay=3).submit(1, 2, 3, 4, 5, 6, '7')",
    "close.submit_sync(3, delay=3)",
    "close.submit_sync('o-1', dealy=3)",
    "close.options(delay=3).submit_sync(order=1)",
    "number((await app.wait(await price.submit('o-1'))).result)",
    "x: str | None = (await app.wait(await close.submit('o-1'))).result",
    "x: Task[str] = await close.submit('o-1')",
    "number(b.wait(price.submit_sync('o-1')).result)",
]


def mypy(program):
    """Return the lines for which mypy reports an error."""
    command = [sys.executable, "-m", "mypy", "--strict", "--output=json", program.name]
    done = subprocess.run(command, check=False, cwd=program.parent, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    found = map(json.loads, done.stdout.splitlines())
    return {one["line"] for one in found if one["severity"] == "error"}


def pyright(program):
    """Return the lines for which pyright reports an error, in its strict mode."""
    (program.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command = [
        sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable,
        program.name,
    ]  # fmt: skip
    done = subprocess.run(command, check=False, cwd=program.parent, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [one for one in found if one["severity"] == "error"]
    return {one["range"]["start"]["line"] + 1 for one in errors}


@pytest.fixture(scope="module", params=[mypy, pyright])
def reported(request, tmp_path_factory):
    """The lines of a program that a type checker reports: right ones, and every wrong one."""
    program = tmp_path_factory.mktemp("typing") / "program.py"
    program.write_text(PROGRAM.format(wrong="\n    ".join(WRONG)))
    return request.param(program)


def test_right_submits_and_results_pass_a_strict_check(reported):
    assert not {line for line in reported if line < LINE}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_submit_or_result_is_reported(reported, wrong):
    assert LINE + WRONG.index(wrong) in reported


class Bill(NamedTuple):
    order_id: str
    total: Decimal
    at: datetime


def test_a_result_is_what_its_type_says(tmp_path):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")

    @app.task
    def bill(order_id: str) -> Bill:
        return Bill(order_id, Decimal("1.10"), datetime(2030, 1, 1, tzinfo=UTC))

    @app.task
    async def bills(number: int) -> tuple[Bill, ...]:
        return tuple(bill(str(one)) for one in range(number))

    with app.blocking() as b:
        one = b.wait(bill.submit_sync("o-1"), timeout=60)
        assert one.result == bill("o-1")
        assert isinstance(one.result, Bill)
        assert b.get(one).result == b.list(service=bill).items[0].result == bill("o-1")
        many = b.wait(bills.submit_sync(2), timeout=60)
        assert many.result == (bill("0"), bill("1"))
        assert many._replace(key="k").result[1] == ["1", "1.10", "2030-01-01T00:00:00+00:00"]
        assert pickle.loads(pickle.dumps(many)) == many
