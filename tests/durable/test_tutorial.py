"""The tutorial, typed in and run: every file of it, every command, every line that it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "tutorials" / "durable-orders.md").read_text("utf-8")
FILE = re.compile(r"^`(\w+\.py)`\n\n```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = dict(FILE.findall(PAGE))
INSTALL = ("python3 -m venv", "pip install", "cd ~/shop")  # done already, by whoever runs the tests
KILLED = -9


def sessions():
    """Give each command of the page, and the lines that it shows below it."""
    for block in CONSOLE.findall(PAGE):
        for part in block.split("$ ")[1:]:
            command, _, shown = part.partition("\n")
            if not command.startswith(INSTALL):
                yield command, shown.splitlines()


def run(command, folder, python):
    """Run one command as a shell would; a killed program ends as a shell says it."""
    words = command.split()
    if words[0] == "python":
        words[0] = python
    ran = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )  # fmt: skip
    assert ran.returncode in (0, KILLED), ran.stderr
    for line in ran.stderr.splitlines():  # failures of tasks are logged, each by its task's id
        assert not re.match(r"(Traceback|Exception|\w*Warning)", line) or "task " in ran.stderr
    return ran.stdout.splitlines() + (["Killed"] if ran.returncode == KILLED else [])


def matches(shown, printed):
    pattern = "\n".join(re.escape(line).replace("…", ".*") for line in shown)
    return re.fullmatch(pattern, "\n".join(printed))


def follow(folder, python):
    """Type in the tutorial, and compare all that it shows."""
    for name, code in FILES.items():
        (folder / name).write_text(code, "utf-8")
    commands = list(sessions())
    assert {command for command, _ in commands} >= {
        f"python {name}" for name in FILES if name != "shop.py"
    }
    for command, shown in commands:
        printed = run(command, folder, python)
        assert matches(shown, printed), (command, shown, printed)


def test_the_tutorial_does_what_it_says(tmp_path):
    follow(tmp_path, sys.executable)


def test_an_order_expires_in_twenty_lines_with_asyncio_and_without():
    assert len(FILES["orders.py"].splitlines()) <= 20
    assert len(FILES["orders_sync.py"].splitlines()) <= 20


def test_the_tutorial_begins_with_nothing():
    first = CONSOLE.search(PAGE)
    assert first
    assert "$ pip install .\n" in first[1]
