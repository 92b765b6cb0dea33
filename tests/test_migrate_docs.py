"""The programs before a migration, on docs/how-to/migrate.md, run with the libraries they use."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs/how-to/migrate.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## From (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
BEFORE = re.compile(r"^Before.*?:\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AFTER = re.compile(r"^```(python|sh)$", re.MULTILINE)
SECONDS = 60


def test_every_section_has_the_code_before_and_after():
    assert len(SECTIONS) == 6
    for title, text in SECTIONS.items():
        assert len(BEFORE.findall(text)) == 1, title
        assert AFTER.search(text), title


@pytest.mark.parametrize(
    "title",
    [
        title
        for title, text in SECTIONS.items()
        if any(language == "py" for language, _ in BEFORE.findall(text))
    ],
)
def test_the_program_before_runs(title, tmp_path):
    code = BEFORE.search(SECTIONS[title])[2].replace("redis://localhost", "memory://")
    program = tmp_path / "before.py"
    program.write_text(code, "utf-8")
    ran = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
