"""Count instructions per operation inside the native wheel, with callgrind.

    python benchmarks/instructions.py

The count does not depend on the load of the machine, so a test can bound it. It covers a
native function and its callees, not the interpreter's loop around it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import tickwheel

PROGRAM = Path(__file__).with_name("counted.py")
FUNCTIONS = {"schedule": "Wheel_schedule", "cancel": "Entry_cancel", "expire": "Wheel_advance"}
SIZES = (10_000, 100_000)


@dataclass
class Function:
    """Calls of one function as seen by callgrind, and its cost including its callees."""

    calls: int = 0
    costs: dict[str, float] = field(default_factory=lambda: defaultdict(float))


Profile = dict[str, Function]


def why_not() -> str | None:
    """Return why callgrind cannot count here, or None."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed"
    if not tickwheel.NATIVE:
        return "the native core is not in use"
    return None


def measure(n: int) -> dict[str, float]:
    """Return instructions per schedule, cancel and expired item, with N pending."""
    with TemporaryDirectory() as directory:
        profile = read_profile(run(n, Path(directory)))
    return per_operation(profile, n, "Ir")


def per_operation(profile: Profile, n: int, event: str) -> dict[str, float]:
    """Return a function's cost per call; for expiry, where one call returns N items, per item."""
    found = {operation: profile[name] for operation, name in FUNCTIONS.items() if name in profile}
    return {
        operation: function.costs[event] / (n if operation == "expire" else function.calls)
        for operation, function in found.items()
    }


def run(n: int, directory: Path, *options: str, control: bool = False) -> Path:
    """Run the program under callgrind and return the last file that it wrote."""
    output = directory / "callgrind.out"
    package = Path(tickwheel.__file__).parents[1]
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={output}"]
    command += ["--compress-strings=no", "--compress-pos=no", *options]
    command += [sys.executable, "-S", str(PROGRAM), str(package), str(n)]
    command += ["--control"] * control
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"callgrind failed: {done.stderr[-2_000:]}")
    return output


def read_profile(path: Path) -> Profile:
    """Return calls and inclusive costs by function; `totals` is the sum of the file."""
    profile: Profile = defaultdict(Function)
    events: list[str] = []
    name = callee = ""
    lines = iter(path.read_text().splitlines())
    for line in lines:
        key, _, value = line.partition("=")
        if line.startswith("events:"):
            events = line.split()[1:]
        elif line.startswith("totals:"):
            add(profile["totals"], events, line.split()[1:])
        elif key == "fn":
            name = value
        elif key == "cfn":
            callee = value
        elif key == "calls":
            profile[callee].calls += int(value.split()[0])
            add(profile[name], events, next(lines).split()[1:])
        elif line[:1].isdigit():
            add(profile[name], events, line.split()[1:])
    return profile


def add(function: Function, events: list[str], costs: list[str]) -> None:
    """Add a line's costs; the file omits trailing zeros."""
    for event, cost in zip(events, costs, strict=False):
        function.costs[event] += int(cost)


def lines(sizes: tuple[int, ...]) -> Iterator[str]:
    """Yield the table, line by line, as the counts arrive."""
    yield f"{'pending':>9}" + "".join(f"{operation:>10}" for operation in FUNCTIONS)
    for size in sizes:
        counts = measure(size)
        yield f"{size:>9,}" + "".join(f"{counts[operation]:>10.1f}" for operation in FUNCTIONS)


if __name__ == "__main__":
    reason = why_not()
    if reason:
        sys.exit(f"cannot count instructions: {reason}")
    for line in lines(SIZES):
        print(line)
