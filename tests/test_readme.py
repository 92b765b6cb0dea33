"""The code in README.md and docs/ runs, and prints what its comments state."""

import re
import runpy
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = [*READMES, *sorted((ROOT / "docs").rglob("*.md"))]
README, CHINESE = (page.read_text("utf-8") for page in READMES)
NUMBER = re.compile(r"\d(?:[\d,.^]*\d)?")
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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


def test_submits_on_the_pages_are_in_the_form_that_type_checkers_check():
    unchecked = re.compile(r"\b(?:app|b|shop|tasks)\.submit\([a-z]")
    for page in PAGES:
        code = "".join(code for _, code in FENCED.findall(page.read_text("utf-8")))
        assert not unchecked.search(code), page


@pytest.mark.parametrize("readme", [README, CHINESE], ids=["en", "zh"])
def test_a_readme_begins_with_how_to_install_and_soon_shows_code_that_runs(readme):
    lines = readme.splitlines(keepends=True)
    assert lines[3].startswith("pip install . ")
    assert BLOCK.search("".join(lines[:30]))


def without_comments(code):
    """Return code without its comments; what a line prints is kept."""
    return re.sub(r"^((?!\s*print\().*?)\s+# .*$", r"\1", code, flags=re.MULTILINE)


def outline(text):
    """Return what both languages must share: headings, code, numbers of tables, links, images."""
    prose = FENCED.sub("", text)
    rows = [line for line in prose.splitlines() if line.startswith("|")]
    return {
        "headings": [
            line.partition(" ")[0] for line in re.findall(r"^#+ .*$", prose, re.MULTILINE)
        ],
        "code": [(kind, without_comments(code)) for kind, code in FENCED.findall(text)],
        "cells": [row.count("|") for row in rows],
        "numbers": [NUMBER.findall(row) for row in rows],
        "all numbers": sorted(NUMBER.findall(prose)),
        "quoted": [re.findall(r"`[^`]+`", row) for row in rows],
        "links": re.findall(r"\]\(((?!README).*?)\)", prose),
        "images": re.findall(r'src="(.*?)"', prose),
    }


def test_the_chinese_readme_is_in_step_with_the_english_one():
    english, chinese = outline(README), outline(CHINESE)
    assert all(english.values())
    for part in english:
        assert chinese[part] == english[part], part


def test_the_figures_of_both_readmes_are_those_of_the_benchmarks():
    tool = runpy.run_path(str(ROOT / "tools" / "readme-figures"))
    for name, words in tool["PAGES"].items():
        page = (ROOT / name).read_text("utf-8")
        assert tool["with_figures"](page, words) == page, "run tools/readme-figures"
        assert page.count("`make bench-") > 5


def test_the_readme_names_two_commands_and_both_exist():
    assert ("console", "make serve\nmake test\n") in FENCED.findall(README)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^serve:.*## ", makefile, re.MULTILINE)
    assert re.search(r"^test:.*## ", makefile, re.MULTILINE)


@pytest.mark.parametrize("name", ["tools/screenshots", "benchmarks/dashboard.py"])
def test_the_browser_that_a_program_starts_is_a_package_that_make_installs(name):
    packages = re.search(
        r"^PACKAGES := (.*?) #", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
    )[1]
    (browser,) = re.findall(r'"/usr/bin/(chromium.*?)"', (ROOT / name).read_text("utf-8"))
    assert browser in packages.split()


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


def test_links_between_pages_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page} has a link to {target}"


def test_every_link_has_a_text_without_which_a_forge_shows_nothing():
    for page in PAGES:
        assert re.findall(r"(?<!!)\[\]\(.*?\)", page.read_text("utf-8")) == [], page
