"""The code in README.md and docs/ runs, and prints what its comments state."""

import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text("utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_prints_its_comments(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a page may make files
    code = "\n".join(BLOCK.findall(page.read_text("utf-8")))
    names = {"__name__": "__page__"}
    exec(compile(code, str(page), "exec"), names)
    for value in names.values():
        if isinstance(value, sqlite3.Connection):
            value.close()  # Python 3.13 and later warn about open connections
    assert capsys.readouterr().out.splitlines() == PRINTED.findall(code)


def test_the_readme_shows_code_that_runs_before_line_20():
    before = "".join(README.splitlines(keepends=True)[:19])
    assert BLOCK.search(before)


def test_the_readme_names_two_commands_and_both_exist():
    commands = re.search(r"```console\n(.*?)```", README, re.DOTALL)
    assert commands
    assert commands[1].split("\n") == ["make serve", "make test", ""]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^serve:.*## ", makefile, re.MULTILINE)
    assert re.search(r"^test:.*## ", makefile, re.MULTILINE)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_serve_installs_only_the_server_and_make_setup_the_tools(tmp_path):
    def extras_of(target):
        words = ["make", "-n", target, f"VENV={tmp_path}/venv"]
        ran = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        return re.findall(r"-e '\.\[(.*?)\]'", ran.stdout)

    assert extras_of("serve") == extras_of("lab") == ["server"]
    assert extras_of("setup") == ["server", "test,check,docs,bench"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_exist(page):
    for target in re.findall(r"\]\(([^)#:]+\.md)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
